"""One trial of a model on some rows: what its modules, its loss and the engine gave for a few of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparsedp.batch import PerSampleLoss, Rows, check_losses, row_count
from sparsedp.grad_sample.alone import tolerance

LOSS = "<loss>"
"""Stands for the loss where a module's name is expected."""

Place = tuple[str, int, int]
"""A module's name, the number of its call, and the place among the tensors it returned."""


@dataclass(frozen=True, slots=True)
class ForwardOutcome:
    """What one forward gave for some of its rows: losses, and outputs whose first axis is as long as the batch.

    `coarsest` is the tolerance of the coarsest numbers met.
    """

    losses: Tensor
    outputs: dict[Place, Tensor]
    coarsest: float

    def only(self, number: int) -> ForwardOutcome:
        """The same for one of the rows."""
        mine = slice(number, number + 1)
        return ForwardOutcome(self.losses[mine], {p: x[mine] for p, x in self.outputs.items()}, self.coarsest)


def run(model: nn.Module, loss: PerSampleLoss, rows: Rows, which: Sequence[int]) -> ForwardOutcome:
    """A forward with gradients on, as training does it; keeps what belongs to the rows at `which`."""
    count, outputs, calls, coarsest = row_count(rows), {}, dict[str, int](), [0.0]

    def record(name: str, output: Any) -> None:
        number = calls[name] = calls.get(name, -1) + 1
        for place, leaf in enumerate(pytree.tree_leaves(output)):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                coarsest.append(tolerance(leaf.dtype))
            if isinstance(leaf, Tensor) and leaf.shape[:1] == (count,):
                outputs[name, number, place] = leaf.detach()[which].clone()

    with torch.enable_grad(), _each_output(model, record):
        losses = check_losses(loss(model, rows), count)
    coarsest += [tolerance(p.dtype) for p in model.parameters()]
    return ForwardOutcome(losses.detach()[which].clone(), outputs, max(coarsest))


def batched_outputs(two: ForwardOutcome, three: ForwardOutcome) -> frozenset[Place]:
    """Outputs with one row per sample: those as long as the batch for two numbers of rows.

    An axis of another meaning (8 time steps) may be as long as one of them, but not as both.
    """
    return frozenset(two.outputs.keys() & three.outputs.keys())


def first_difference(one: ForwardOutcome, other: ForwardOutcome, batched: frozenset[Place]) -> str | None:
    """The first module, in the order of calls, whose output differs; LOSS if only the loss does; None if nothing."""
    allowed = max(one.coarsest, other.coarsest)
    for place, output in one.outputs.items():
        if place in batched and place in other.outputs and _differ(output, other.outputs[place], allowed):
            return place[0]
    return LOSS if _differ(one.losses, other.losses, allowed) else None


def same(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit, NaN included."""
    return torch.equal(a.nan_to_num(), b.nan_to_num()) if a.is_floating_point() else torch.equal(a, b)


def _differ(a: Tensor, b: Tensor, allowed: float) -> bool:
    """Whether a row's results differ by more than rounding; NaN in the same places is no difference."""
    if a.shape != b.shape:
        return True
    if a.numel() == 0:
        return False
    x, y = (t.double().nan_to_num().reshape(len(t), -1) for t in (a, b))
    scale = torch.maximum(x.abs().amax(1), y.abs().amax(1)).clamp(min=1e-6)
    return bool(((x - y).abs().amax(1) > allowed * scale).any())


@contextmanager
def _each_output(model: nn.Module, record: Any) -> Iterator[None]:
    handles = [
        module.register_forward_hook(lambda _module, _args, output, name=name: record(name, output))
        for name, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
