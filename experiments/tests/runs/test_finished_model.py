"""The rows and the model a finished run is looked at with."""

import numpy as np
import pytest
import torch
from sparsedp_experiments.runs.finished_model import finished_model

from sparsedp.errors import SparseDPError
from sparsedp_experiments.runs.settings import Settings
from sparsedp_experiments.theory.diagnose import choose_rows


def test_rows_are_chosen_at_random_without_repetition():
    chosen = choose_rows(100, None, 1, 30)
    assert len(set(chosen.tolist())) == 30
    assert chosen.tolist() != sorted(chosen.tolist())
    assert torch.equal(chosen, choose_rows(100, None, 1, 30))
    assert sorted(choose_rows(5, None, 1, 30).tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("per_unit", [1, 2])
def test_a_unit_has_at_most_as_many_rows_as_a_step_draws_and_they_stand_together(per_unit):
    units = torch.tensor([5, 3, 5, 5, 3, 9, 1, 1, 1, 9])
    owners = units[choose_rows(10, units, per_unit, 10)].tolist()
    assert owners == sorted(owners)
    counts = np.bincount(owners)
    for unit, size in ((1, 3), (3, 2), (5, 3), (9, 2)):
        assert counts[unit] == min(per_unit, size)


@pytest.mark.parametrize("side", ["test", "train"])
def test_the_finished_model_is_the_runs_model_and_data(side):
    settings = Settings.from_json({"dataset": "digits", "seed": 4, "subset": 200})
    found = finished_model(settings, side, 150)
    assert [batch.row_count for batch in found.batches] == [128, 22]
    assert all(batch.units is None for batch in found.batches)
    pairs = zip(found.model.state_dict().values(), found.fresh.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) and one is not other for one, other in pairs)
    assert found.loss(found.model, found.batches[0].rows).shape == (128,)


def test_people_of_a_file_with_units_come_whole(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {"x_train": rng.random((40, 3)), "y_train": np.arange(40) % 2}
    arrays |= {
        "units_train": np.repeat(np.arange(20), 2),
        "x_test": rng.random((400, 3)),
        "y_test": np.arange(400) % 2,
    }
    arrays["units_test"] = 100 + np.repeat(np.arange(200), 2)
    np.savez(tmp_path / "mine.npz", **arrays)
    asked = {
        "dataset": str(tmp_path / "mine.npz"),
        "classes": ["a", "b"],
        "model": "logistic",
        "rows_per_unit": 2,
    }
    found = finished_model(Settings.from_json(asked), "test", 300)
    assert sum(batch.row_count for batch in found.batches) == 300
    for batch in found.batches:
        assert batch.units is not None
        assert torch.bincount(batch.units).max() <= 2


def test_too_few_rows_are_refused():
    with pytest.raises(SparseDPError, match="at least 2"):
        finished_model(Settings.from_json({"dataset": "digits"}), "test", 1)


@pytest.mark.parametrize("normalise", [{}, {"noise_multiplier": 20.0}])
def test_least_squares_is_refused_as_its_gradients_never_change(normalise):
    asked = {"dataset": "digits", "model": "least-squares", "normalise": normalise}
    with pytest.raises(SparseDPError, match="linear in its weights"):
        finished_model(Settings.from_json(asked), "test", 20)
