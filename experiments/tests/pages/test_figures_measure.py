"""The measurements behind the gallery: every committed study reads, and every kind runs on a few small digits."""

import io
import itertools
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from scipy import stats
from sparsedp_experiments.figures.run import chosen

from sparsedp.errors import SparseDPError
from sparsedp_experiments.figures.study import Store, Study, load_studies, record_name, rounded
from sparsedp_experiments.figures.support import by_chance, held_out
from sparsedp_experiments.runs.grid import CONFIGS
from sparsedp_experiments.runs.results import read_rows
from sparsedp_experiments.runs.settings import KINDS
from sparsedp_experiments.theory.trajectory import measure

STUDIES = load_studies(CONFIGS)
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
def test_every_committed_study_names_a_kind_and_settings_that_resolve(study):
    assert study.kind in KINDS
    names = [record_name(point) for point in study.points()]
    assert len(set(names)) == len(names) > 0
    if study.settings:
        for point in study.points():
            study.run_settings(point).resolved()


@pytest.mark.nightly
@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_every_study_runs_on_a_few_digits_and_gives_plain_finite_numbers(study):
    tiny = small(study)
    found = KINDS[tiny.kind](tiny, tiny.points()[0])
    assert finite(json.loads(json.dumps(found)))
    assert all(cost["seconds"] >= 0 for cost in found["costs"].values())


def test_the_same_point_gives_the_same_numbers():
    tiny = small(next(study for study in STUDIES if study.kind == "warmup"))
    first, second = (KINDS["warmup"](tiny, tiny.points()[0]) for _ in range(2))
    for found in (first, second):
        found.pop("costs")
    assert first == second


def test_a_warm_ups_supports_capture_everything_at_the_full_ratio_and_chance_lies_between():
    tiny = small(next(study for study in STUDIES if study.kind == "warmup"))
    found = KINDS["warmup"](tiny, tiny.points()[0])
    for curve in (*found["recovery"].values(), *found["concentration"].values()):
        assert curve[-1] == pytest.approx(1)
        assert all(a <= b + 1e-12 for a, b in itertools.pairwise(curve))
    oracle = found["recovery"]["oracle"]
    assert all(x <= best + 1e-12 for x, best in zip(found["recovery"]["energy"], oracle, strict=True))
    assert found["concentration"]["mean gradient"] == pytest.approx(oracle)


def test_measuring_skips_what_is_there_and_measures_again_what_the_study_changed(tmp_path, monkeypatch):
    study = Study("toy", "toy", "Toy", {}, {"seed": [0, 1]}, {"size": 3})
    calls = []

    def toy(study, point):
        calls.append(point["seed"])
        return {"value": study.measure["size"] + point["seed"] / 3}

    monkeypatch.setattr("sparsedp_experiments.figures.run.KINDS", {"toy": toy})
    screen = Console(file=io.StringIO())
    store = Store(tmp_path / "records.jsonl")
    measure([study], store, screen, most=1)
    assert calls == [0]
    measure([study], store, screen)
    store.path.write_bytes(store.path.read_bytes().splitlines(keepends=True)[0])
    measure([study], store, screen)
    assert calls == [0, 1, 1]
    assert [record["value"] for record in store.records(study)] == [3.0, 3.3333]
    measure([replace(study, measure={"size": 4})], store, screen)
    assert calls == [0, 1, 1, 0, 1]
    assert [row["value"] for row in read_rows(store.path)][-2] == 4
    assert [record["value"] for record in store.records(study)] == [3.0, 3.3333], "older records stay"


def test_a_study_is_shown_once_every_cell_of_its_grid_has_a_seed(tmp_path):
    study = Study("toy", "toy", "Toy", {}, {"epsilon": [1, 3], "seed": [0, 1]}, {})
    store = Store(tmp_path / "records.jsonl")
    for seed in (0, 1):
        store.keep(study, {"epsilon": 1, "seed": seed}, {}, None)
    assert store.records(study) == []
    store.keep(study, {"epsilon": 3, "seed": 1}, {}, None)
    assert [tuple(record["point"].values()) for record in store.records(study)] == [(1, 0), (1, 1), (3, 1)]
    assert [len(points) for points in replace(study, grid={"epsilon": [1, 3]}).by_seed()] == [2]


def test_numbers_keep_five_digits_and_integers_all():
    assert rounded({"a": [0.123456789, 123456789], "b": None}) == {"a": [0.12346, 123456789], "b": None}


def test_a_study_that_says_too_much_or_too_little_is_refused(tmp_path):
    file = tmp_path / "bad.toml"
    for text in (
        '[bad]\nkind = "warmup"',
        '[bad]\nkind = "a"\ntitle = "b"\n[bad.colours]\n',
        '[bad]\nkind = "a"\ntitle = "b"\n[bad.grid]\nseed = 1\n',
    ):
        file.write_text(text)
        with pytest.raises(SparseDPError, match="bad: "):
            load_studies(file)
    with pytest.raises(SparseDPError, match="no study named"):
        chosen(STUDIES, ["nothing"])


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


COSTS = """
import json, torch
from sparsedp_experiments.figures.study import Costs

costs = Costs()
with costs.of("a big array"):
    torch.ones(20_000_000).sum()
print(json.dumps(costs.to_json()["a big array"]))
"""


def test_costs_say_how_long_and_how_much():
    # A process of its own: this one may be told to keep freed memory, which then costs nothing anew.
    done = subprocess.run(
        [sys.executable, "-c", COSTS],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    found = json.loads(done.stdout)
    assert found["seconds"] > 0
    if Path("/proc/self/clear_refs").exists() and "megabytes" in found:
        assert 60 < found["megabytes"] < 200
