"""The measurements behind the figures: every committed study reads, and every kind runs on a few small digits."""

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
from scipy import stats

from sparsedp_experiments.figures.plots import draw_all
from sparsedp_experiments.figures.study import Study, load_studies, measure_missing, records_of_study
from sparsedp_experiments.figures.support import by_chance, held_out
from sparsedp_experiments.runs.results import read_rows

STUDIES = load_studies()
SMALL_RUN = {
    "dataset": "digits", "model": "mlp", "subset": 300, "epochs": 6, "batch_size": 64, "lr": 0.5, "clip_norm": 0.5,
    "max_physical_batch": None,
}  # fmt: skip
SMALL = {
    "held_out": 64, "batch": 16, "rows": 64, "after_epochs": [0, 2], "units": 24, "planes": 2, "shown": 5,
    "pool": 2, "hidden": 8, "masks": 4, "attacks": 5, "steps": 4, "guess_rows": 20, "draws": 400, "every": 8,
    "few": 32, "iterations": 3,
}  # fmt: skip


def small(study: Study) -> Study:
    """The study on three hundred 8x8 digits, at its first point."""
    settings = {**study.settings, **SMALL_RUN}
    settings = {name: value for name, value in settings.items() if value is not None}
    sizes = {name: SMALL.get(name, value) for name, value in study.measure.items()}
    if study.kind == "warmup":
        sizes |= {"shares": [0.1, 0.5, 1.0], "ratios": [0.2]}
    if study.kind == "inversion":
        sizes |= {"ratios": [0.5], "noise_multipliers": [0.0, 0.01]}
    if study.kind == "least-squares":
        sizes |= {"rates": [0.0, 0.5]}
    if study.kind == "misranking":
        sizes |= {"strengths": [0.1]}
        settings = {}
    grid = {name: values[:1] for name, values in study.grid.items()}
    return replace(study, settings=settings, measure=sizes, grid=grid)


def finite(value) -> bool:
    if isinstance(value, dict):
        return all(map(finite, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(finite, value))
    return not isinstance(value, float) or math.isfinite(value)


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_every_committed_study_has_points_and_settings_that_resolve(study):
    digests = [study.digest(point) for point in study.points()]
    assert len(set(digests)) == len(digests) > 0
    if study.settings:
        for point in study.points():
            study.run_settings(point).resolved()
    assert records_of_study(study), "records are found by today's digests"


@pytest.mark.nightly
@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_every_study_runs_on_a_few_digits_and_gives_plain_finite_numbers(study, tmp_path):
    tiny = small(study)
    measure_missing([tiny], tmp_path / "records.jsonl")
    (found,) = read_rows(tmp_path / "records.jsonl")
    assert finite(json.loads(json.dumps(found)))


def test_a_warm_up_is_repeatable_and_chance_lies_below_the_oracle(tmp_path):
    tiny = small(next(study for study in STUDIES if study.kind == "warmup"))
    for name in ("one", "two"):
        measure_missing([tiny], tmp_path / name)
    (found,), (again,) = (read_rows(tmp_path / name) for name in ("one", "two"))
    assert found == again
    measure_missing([tiny], tmp_path / "one")
    assert len(read_rows(tmp_path / "one")) == 1, "what has a record is not measured again"
    for curve in (*found["recovery"].values(), *found["concentration"].values()):
        assert curve[-1] == pytest.approx(1)
        assert all(a <= b + 1e-4 for a, b in itertools.pairwise(curve))
    oracle = found["recovery"]["oracle"]
    assert all(x <= best + 1e-4 for x, best in zip(found["recovery"]["energy"], oracle, strict=True))


@pytest.mark.nightly
def test_every_figure_is_drawn_from_the_committed_records(tmp_path):
    assert len(draw_all(tmp_path)) == 12


def test_counts_of_epochs_frozen_by_chance_are_binomial_at_a_constant_rate():
    assert by_chance([0.3] * 8) == pytest.approx([stats.binom.pmf(n, 8, 0.3) for n in range(9)])
    mixed = by_chance([0.0, 1.0, 0.5])
    assert mixed == pytest.approx([0, 0.5, 0.5, 0])


def test_held_out_units_bring_all_their_rows_and_keep_their_order():
    from sparsedp_experiments.data.bundle import Dense, Split

    units = torch.tensor([5, 3, 5, 9, 3, 3])
    inputs = torch.arange(6.0).reshape(6, 1)
    split = Split(Dense(inputs), torch.zeros(6, dtype=torch.int64), units)
    batches = held_out(split, 3, 2, seed=0)
    seen = []
    for batch in batches:
        rows = batch.rows[0].reshape(-1).long()
        for number in range(int(batch.units[-1]) + 1):
            own = rows[batch.units == number]
            assert len(set(units[own].tolist())) == 1
            seen.append(sorted(own.tolist()))
    assert sorted(seen) == [[0, 2], [1, 4, 5], [3]]
