"""What of a model is not on the fast path, and what a step costs: asked before training, on made-up rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparsedp.batch import MicroBatch, PerSampleLoss, Rows, row_count
from sparsedp.core.clip import FlatClip
from sparsedp.grad_sample.bookkeeping import BookkeepingEngine
from sparsedp.grad_sample.check import check_model
from sparsedp.grad_sample.query import Query
from sparsedp.parameters import Support
from sparsedp.randomness import Chance, SystemRandomness

TIMED_ROWS, TIMES = 32, 3
"""Rows to take the time of, and how often; the least counts."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """What leaves the fast path, in words, and a clipped sum's processor time over that of an ordinary gradient."""

    notes: tuple[str, ...]
    times_plain: float


def coverage(model: nn.Module, loss: PerSampleLoss, rows: Rows) -> Coverage:
    """Which parameters or operations leave the fast path, why, and what a step of the whole model costs.

    **Privacy.** Sums and gradients are thrown away. Give made-up rows all the same: what a model does may depend on
    them.

    Raises:
        ModelError: the model mixes samples or remembers them.
    """
    check_model(model, loss, rows)
    engine = BookkeepingEngine(model, loss)
    query = Query(Support.full(engine.layout.dimension), FlatClip(1.0))
    parameters = engine.layout.parameters(model)
    many = _repeated(rows, TIMED_ROWS)

    def clipped() -> None:
        chance = Chance(SystemRandomness().secret(()), torch.arange(row_count(many)))
        engine.clipped_sum([MicroBatch(many, chance=chance)], query)

    def plain() -> None:
        torch.autograd.grad(loss(model, many).sum(), parameters, allow_unused=True)

    cost = _seconds(clipped) / _seconds(plain)
    return Coverage(engine.notes, cost)


def _repeated(rows: Rows, least: int) -> Rows:
    """The same rows over and over, at least so many."""
    times = -(-least // max(row_count(rows), 1))

    def again(leaf: object) -> object:
        return torch.cat([leaf] * times) if isinstance(leaf, Tensor) else leaf

    return pytree.tree_map(again, rows)


def _seconds(step: Callable[[], None]) -> float:
    step()
    taken = []
    for _ in range(TIMES):
        start = time.process_time()
        step()
        taken.append(time.process_time() - start)
    return max(min(taken), 1e-9)
