"""What a dense step holds, by counting: one vector of d wide numbers from sum to release, and the gradient."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from sparsedp.batch import MicroBatch
from sparsedp.clipping import FlatClip
from sparsedp.grad_sample import BookKeepingEngine, ClippedSumQuery
from sparsedp.optimizers.sparse import support_optimizer
from sparsedp.parameters import Support
from sparsedp.privacy.charge import Charge, ChargeLog
from sparsedp.privacy.mechanism import GaussianMechanism
from sparsedp.privacy.queries import GradientSum
from sparsedp.randomness import SystemRandomness


class Held(TorchDispatchMode):
    """Follows the memory that operators ask for: the most held at once, and every piece of at least `large` bytes."""

    def __init__(self, large: int) -> None:
        super().__init__()
        self.large, self.now, self.most, self.pieces = large, 0, 0, list[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage().data_ptr() for x in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        fresh = {x.untyped_storage() for x in _tensors(result) if x.untyped_storage().data_ptr() not in given}
        for storage in fresh:
            self.now += storage.nbytes()
            weakref.finalize(storage, self._freed, storage.nbytes())
            if storage.nbytes() >= self.large:
                self.pieces.append(storage.nbytes())
        self.most = max(self.most, self.now)
        return result

    def _freed(self, size: int) -> None:
        self.now -= size


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def loss(model: nn.Module, rows: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(rows[0]), rows[1], reduction="none")


def held_by_a_step(model: nn.Module, inputs: Tensor, batches: int, coasts: bool) -> tuple[int, Held]:
    """D, and what the second of two steps held."""
    engine = BookKeepingEngine(model, loss)
    d = engine.layout.dimension
    mover = support_optimizer(
        model, engine.layout, torch.optim.SGD(model.parameters(), lr=0.1), coasts=coasts
    )
    query, ledger = ClippedSumQuery(Support.full(d), FlatClip(1.0)), ChargeLog()
    batch = MicroBatch((inputs, torch.zeros(len(inputs), dtype=torch.int64)))

    def step(number: int) -> None:
        released = GaussianMechanism(ledger, SystemRandomness()).release(
            GradientSum(engine, [batch] * batches, query),
            Charge("train", number, 0.01, 1.0),
            expected_batch_size=float(len(inputs)),
        )
        mover.apply(released)

    step(0)
    with Held(large=4 * d) as held:
        step(1)
    assert held.now < held.most  # it sees what is freed
    return d, held


@pytest.mark.parametrize("coasts", [False, True])
def test_a_dense_step_holds_one_vector_of_wide_numbers_and_the_gradient(coasts):
    model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.Linear(1024, 4))
    d, held = held_by_a_step(model, torch.randn(8, 1024), 1, coasts)
    assert held.pieces == [8 * d]
    assert held.most < 13 * d


def test_with_two_micro_batches_there_are_two_and_no_more():
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.Linear(512, 4))
    d, held = held_by_a_step(model, torch.randn(8, 512), 2, False)
    assert held.pieces == [8 * d] * 2
    assert held.most < 21 * d


def test_convolutions_add_no_more_than_their_largest_layer():
    """Their sums are made in the order of kernel offsets and turned at the end, one layer at a time."""
    model = nn.Sequential(
        *(nn.Conv2d(64, 64, 3, padding=1) for _ in range(8)), nn.Flatten(), nn.Linear(64 * 16, 4)
    )
    d, held = held_by_a_step(model, torch.randn(2, 64, 4, 4), 1, False)
    assert held.pieces == [8 * d]
    assert held.most < 17 * d
