"""One unit in, one unit out: models and loaders that let a unit change what others add are found."""

from __future__ import annotations

import pytest
import torch
from audited import audited, data, network, problems
from torch import nn
from torch.utils.data import TensorDataset, default_collate

from sparsedp.randomness import StepSecret

pytestmark = pytest.mark.usefixtures("quick")

MOVED = "times the stated sensitivity"


class Mixing(nn.Module):
    """Subtracts the mean of the batch, in one way or another."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second, self.how = nn.Linear(24, 20), nn.Linear(20, 2), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).tanh()
        if self.how == "always" or (self.how == "large batches" and len(h) > 16):
            h = h - h.mean(0)
        if self.how == "backward":
            h = h + 5 * (h.mean(0) - h.mean(0).detach())
        return self.second(h)


def test_a_model_that_mixes_the_rows_of_large_batches_is_found():
    result = audited(Mixing("large batches"), steps=4)
    assert MOVED in problems(result)
    assert result.lower_bound > result.claimed_epsilon


@pytest.mark.parametrize("how", ["always", "backward"])
def test_a_model_that_always_mixes_rows_is_taken_row_by_row(how, caplog):
    """The engine sees it in the graph, so that no row moves what another adds."""
    assert MOVED not in problems(audited(Mixing(how), steps=4))
    assert "mixes samples" in caplog.text


class Masked(nn.Module):
    """Noise in the model, which would follow a row's position if torch's generator gave it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(24, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * (torch.rand_like(x) < 0.5))


def test_a_model_that_draws_random_numbers_passes_for_they_belong_to_the_rows():
    assert MOVED not in problems(audited(Masked(), steps=4))


def test_random_numbers_that_follow_the_position_are_found(monkeypatch):
    real = StepSecret.words
    monkeypatch.setattr(
        StepSecret,
        "words",
        lambda self, rows, draw, count: real(
            self, None if rows is None else torch.arange(len(rows)), draw, count
        ),
    )
    assert MOVED in problems(audited(Masked(), steps=4))


def test_a_collate_that_mixes_rows_is_found():
    def centred(items):
        inputs, labels = default_collate(items)
        return inputs - inputs.mean(0), labels

    assert MOVED in problems(audited(collate=centred, steps=4))


def test_units_with_several_rows_pass_and_are_left_out_whole():
    result = audited(
        dataset=data(600), units=[i // 3 for i in range(600)], rows_per_unit=2, batch_size=20, steps=4
    )
    assert result.passed, problems(result)


def test_rows_that_are_not_finite_move_nothing_that_they_should_not():
    rows, labels = data().tensors
    spoiled = TensorDataset(rows.clone().index_fill_(0, torch.arange(0, 400, 5), float("nan")), labels)
    result = audited(network(), spoiled, steps=4)
    assert result.passed, problems(result)
