"""One unit in, one unit out: loaders that let a unit change what others add are found; models cannot."""

from __future__ import annotations

import pytest
import torch
from audited import audited, data, network, problems
from torch import nn
from torch.utils.data import TensorDataset, default_collate

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


@pytest.mark.parametrize("how", ["large batches", "always", "backward"])
def test_a_model_that_mixes_rows_moves_no_further_for_it_is_given_one_at_a_time(how):
    assert MOVED not in problems(audited(Mixing(how), steps=4))


class Masked(nn.Module):
    """Noise in the model, which would follow a row's position if torch's generator gave it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(24, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * (torch.rand_like(x) < 0.5))


def test_a_model_that_draws_random_numbers_passes_for_they_belong_to_the_rows():
    assert MOVED not in problems(audited(Masked(), steps=4))


def test_a_collate_that_mixes_rows_is_found():
    def centred(items):
        inputs, labels = default_collate(items)
        return inputs - inputs.mean(0), labels

    assert MOVED in problems(audited(collate_fn=centred, steps=4))


def test_units_with_several_rows_pass_and_are_left_out_whole():
    result = audited(
        dataset=data(600), unit_ids=[i // 3 for i in range(600)], rows_per_unit=2, batch_size=20, steps=4
    )
    assert result.passed, problems(result)


def test_rows_that_are_not_finite_move_nothing_that_they_should_not():
    rows, labels = data().tensors
    spoiled = TensorDataset(rows.clone().index_fill_(0, torch.arange(0, 400, 5), float("nan")), labels)
    result = audited(network(), spoiled, steps=4)
    assert result.passed, problems(result)


@pytest.mark.parametrize("norm", ["auto", {"0.*": 0.3, "*": 0.4}])
def test_a_clip_beyond_flat_passes(norm):
    result = audited(max_grad_norm=norm, steps=4)
    assert result.passed, problems(result)
