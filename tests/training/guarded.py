"""A model and a loss under the guards of a run, without the run: a trial, then steps on other rows each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runs import CLASSES, FEATURES, network
from sparsedp.batch import LossFunction
from sparsedp.validation.state import StateGuard

Batch = tuple[Tensor, Tensor]


def batch_of(step: int, count: int = 7) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(count, FEATURES, generator=generator), torch.arange(count) % CLASSES


def cross_entropy(model: Callable[..., Any], rows: Batch) -> Tensor:
    return F.cross_entropy(model(rows[0]), rows[1], reduction="none")


def take_steps(
    model: nn.Module | None = None,
    loss: LossFunction = cross_entropy,
    *,
    steps: int = 4,
    between: Callable[[int], object] = lambda step: None,
) -> None:
    """The trial on one row, then steps, two to an epoch."""
    model = network() if model is None else model
    state = StateGuard(model, loss, lambda: batch_of(0, 1))
    state.check()
    for step in range(1, steps + 1):
        last = step % 2 == 0
        with state.untouched(last_of_epoch=last):
            for count in (7, 3):
                loss(model, batch_of(step, count)).sum().backward()
        between(step)
