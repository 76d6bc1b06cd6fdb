"""A model that raises in the middle of a step, after the charge, leaves a run that can be resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from runs import CLASSES, FEATURES, a_trainer, advance, weights
from sparsedp.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("checked_once")


class Fragile(nn.Module):
    """Raises in a forward once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.broken = False

    def forward(self, x: Tensor) -> Tensor:
        if self.broken:
            raise RuntimeError("out of memory")
        return self.layer(x)


def broken_in_step(step: int, out: Path, seed: int | None) -> None:
    """A run whose model raises in that step, counted from 1."""
    model = Fragile()
    trainer = advance(made(model, out, seed), step - 1)
    model.broken = True
    with pytest.raises(RuntimeError, match="out of memory"), trainer:
        advance(trainer, 1)


def made(model: nn.Module, out: Path, seed: int | None, resume: bool = False) -> Trainer:
    return a_trainer("dp-sgd", model=model, out=out, seed=seed, resume=resume, epochs=4)


@pytest.mark.parametrize("step", [1, 2, 6])
def test_a_seeded_run_replays_to_the_same_bits(step, tmp_path):
    whole = advance(made(Fragile(), tmp_path / "whole", seed=0)).finish()
    broken_in_step(step, tmp_path / "cut", seed=0)
    again = advance(made(Fragile(), tmp_path / "cut", seed=0, resume=True)).finish()
    assert torch.equal(weights(again.model), weights(whole.model))
    assert again.ledger.steps == whole.ledger.steps == 12


@pytest.mark.parametrize("step", [1, 2, 6])
def test_an_unseeded_run_goes_on_after_the_steps_that_were_paid_for(step, tmp_path):
    broken_in_step(step, tmp_path / "cut", seed=None)
    trainer = made(Fragile(), tmp_path / "cut", seed=None, resume=True)
    assert trainer.position >= step
    result = advance(trainer).finish()
    assert result.complete
    assert result.ledger.steps == 12
