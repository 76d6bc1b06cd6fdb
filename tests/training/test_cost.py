"""What a step costs, by counting: with k fixed nothing grows with d."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from sparsedp.batch import MicroBatch
from sparsedp.clipping import FlatClip, Identity
from sparsedp.grad_sample import BookKeepingEngine, ClippedSumQuery
from sparsedp.methods.method import Decays, Statistics
from sparsedp.optimizers.ema import WeightAverage
from sparsedp.optimizers.sparse import SupportOptimizer
from sparsedp.parameters import Support
from sparsedp.privacy.charge import Charge, ChargeLog
from sparsedp.privacy.mechanism import GaussianMechanism, Release
from sparsedp.privacy.queries import GradientSum
from sparsedp.randomness import SeededRandomness
from sparsedp.runs.record import History
from sparsedp.validation.state import StateGuard

WIDTH, ACTIVE_ROWS = 16, 300

BY_INDEX = {"embedding", "_embedding_bag", "index_select", "index_copy_", "detach", "view"}

"""Operators that may be handed a whole table: they read or write some of its rows, or rename it."""


class Words(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, WIDTH)
        self.bag = nn.EmbeddingBag(rows, WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids).mean(1) + self.bag(ids))


def loss(model: Callable[[Tensor], Tensor], rows: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(rows[0]), rows[1], reduction="none")


def some_rows(rows: int) -> Tensor:
    """Active rows spread over a table, at the same places among its first ones whatever its size."""
    return torch.arange(ACTIVE_ROWS) * 7 % min(rows, 10_000)


def steps(rows: int, optimizer: str, geometry: str) -> Iterator[Release]:
    """Everything a training step does, with one batch for every size of table."""
    torch.manual_seed(0)
    model = Words(rows)
    engine = BookKeepingEngine(model, loss)
    d = engine.layout.dimension
    second, head = engine.layout.slots[1].offset, engine.layout.slots[2].offset
    within = (some_rows(rows).unsqueeze(1) * WIDTH + torch.arange(WIDTH)).reshape(-1)
    support = Support(torch.cat([within, second + within, torch.arange(head, d)]), d)
    mover = SupportOptimizer(
        model, engine.layout, getattr(torch.optim, optimizer)(model.parameters(), lr=0.1), coasts=False
    )
    average, history, guard = (
        WeightAverage(model, engine.layout, 0.9),
        History(engine.layout),
        StateGuard(
            model, loss, lambda: (torch.zeros(1, 12, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
        ),
    )
    statistics, decays = Statistics.fresh(support), Decays()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 3000, (64, 12), generator=generator)
    batch = MicroBatch((ids, torch.randint(0, 2, (64,), generator=generator)))
    ledger, randomness, number = ChargeLog(), SeededRandomness(0), 0
    while True:
        space = Identity() if geometry == "identity" else statistics.geometry(decays)
        with guard.untouched(last_of_epoch=False):
            released = GaussianMechanism(ledger, randomness).release(
                GradientSum(engine, [batch], ClippedSumQuery(support, FlatClip(1.0), space)),
                Charge("train", number, 0.01, 1.0),
                expected_batch_size=64.0,
            )
        average.follow(support)
        mover.apply(released)
        average.update()
        history.record_support(released)
        statistics = statistics.moved_to(support).updated(released, decays)
        number += 1
        yield released


class Sizes(TorchDispatchMode):
    """Records every operator that sees a tensor of at least `limit` elements, and the largest other one."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit, self.largest, self.operators = limit, 0, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor) and leaf.numel() >= self.limit:
                self.operators.add(func.overloadpacket.__name__)
            elif isinstance(leaf, Tensor):
                self.largest = max(self.largest, leaf.numel())
        return result


@pytest.mark.parametrize("geometry", ["identity", "standardized"])
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_no_operator_of_a_step_sees_d_elements_but_to_index_the_table(optimizer, geometry):
    rows = 60_000
    step = steps(rows, optimizer, geometry)
    k = next(step).support.size
    with Sizes(limit=rows) as sizes:  # already a number for every row is too much
        next(step)
    assert sizes.operators <= BY_INDEX
    assert "embedding" in sizes.operators  # the recorder records
    assert sizes.largest <= 3 * max(k, 64 * 12 * WIDTH)
