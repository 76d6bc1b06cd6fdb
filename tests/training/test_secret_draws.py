"""What an unseeded run draws in secret cannot be made again from what it wrote down."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.data import TensorDataset

from runs import ROWS, a_plan, loss_fn, network, sgd
from sparsedp.methods import get_method
from sparsedp.randomness import PublicRandomness
from sparsedp.results import Event, StepReport
from sparsedp.training.trainer import Trainer


@pytest.fixture(autouse=True)
def same_public_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two unseeded runs then write down the same; all that may still differ is secret."""
    monkeypatch.setattr(PublicRandomness, "fresh", classmethod(lambda cls: cls(5)))


def run(first_number: float) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The releases of an unseeded run, and the rows of its batches; a row's second number tells which it is."""
    inputs = torch.stack(
        [torch.full((ROWS,), first_number), torch.arange(ROWS) / ROWS, *torch.zeros(3, ROWS)], 1
    )
    releases, batches = [], []

    def watch(event: Event) -> None:
        if isinstance(event, StepReport):
            releases.append(event.released.mean)

    trainer = Trainer(
        network(),
        TensorDataset(inputs, torch.zeros(ROWS, dtype=torch.int64)),
        loss_fn,
        plan=a_plan(get_method("dp-sgd")),
        optimizer=sgd,
        callbacks=[watch],
    )
    for batch in trainer:
        parts = list(batch.micro_batches)
        batches.append(torch.cat([torch.empty(0), *(part.rows[0][:, 1] for part in parts)]))
        object.__setattr__(batch, "micro_batches", iter(parts))
        trainer.step(batch)
    return releases, batches


def test_the_noise_of_an_unseeded_run_cannot_be_made_again_from_its_record():
    """No row is finite, so that releases are noise alone."""
    (one, _), (other, _) = run(math.nan), run(math.nan)
    assert len(one) == len(other) == 15
    same = [float((a == b).double().mean()) for a, b in zip(one, other, strict=True)]
    assert max(same) < 0.2  # on a grid two numbers may meet, once in a million


def test_the_batches_of_an_unseeded_run_cannot_be_made_again_from_its_record():
    (_, one), (_, other) = run(0.0), run(0.0)
    assert (
        sum(torch.equal(a, b) for a, b in zip(one, other, strict=True)) <= 1
    )  # of 20 rows of 60: once in 10^13
