"""Operations in which examples meet a tensor they share: its per-example gradients from the output's gradient.

Keyed by the name of the node autograd leaves behind, so that a formula serves whoever calls the operation: a layer, a
subclass of one, or a forward written by hand. An operation that is not here goes through its own backward, one
example at a time.

Index conventions: n example, t position, i and o the two axes of a matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from sparsedp.grad_sample.conv import ConvWeight
from sparsedp.grad_sample.embedding import token_rows
from sparsedp.grad_sample.linear import SequenceOuter
from sparsedp.grad_sample.sampler import Block, Explicit, GradSampler, Workspace, keep, working
from sparsedp.grad_sample.trace import ExampleAxis, FallbackError


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Rows of a table: `ids` [n, t], and the gradients `b` [n, t, e] of what was read; the row `padding` has none."""

    ids: Tensor
    b: Tensor
    padding: int
    rows: int

    def dense(self) -> Tensor:
        b = self.without_padding().b
        values = b.new_zeros(b.shape[0], self.rows, b.shape[2])
        return values.scatter_add_(1, self.ids.unsqueeze(2).expand_as(b), b)

    def without_padding(self) -> Tokens:
        """The same, with zeros for the gradients of padding."""
        if not 0 <= self.padding < self.rows:
            return replace(self, padding=-1)
        return replace(self, b=self.b.masked_fill((self.ids == self.padding).unsqueeze(2), 0), padding=-1)

    def restricted(self, block: Block, space: Workspace) -> GradSampler:
        return token_rows(self.ids, keep(self.b, 2, block.columns), self.padding, block, space)


Contribution = Explicit | SequenceOuter | ConvWeight | Tokens
"""What one operation adds to the per-example gradients of a tensor that all examples share. Private."""


def times(part: Explicit | SequenceOuter, scale: float) -> Explicit | SequenceOuter:
    """The same of a tensor that was multiplied by a number."""
    if scale == 1:
        return part
    if isinstance(part, SequenceOuter):
        return SequenceOuter(part.a * scale, part.b)
    return Explicit(part.values * scale)


def added(parts: Sequence[Contribution]) -> list[Contribution]:
    """Contributions to one tensor, merged: products, and tokens, become one along the positions."""
    tokens = [part for part in parts if isinstance(part, Tokens)]
    products = [part for part in parts if isinstance(part, SequenceOuter)]
    whole = [part for part in parts if isinstance(part, Explicit)]
    merged = [part for part in parts if isinstance(part, ConvWeight)]
    if len(tokens) > 1:
        tokens = [part.without_padding() for part in tokens]
        ids, b = (torch.cat([getattr(part, name) for part in tokens], 1) for name in ("ids", "b"))
        tokens = [Tokens(ids, b, tokens[0].padding, tokens[0].rows)]
    if len(products) > 1:
        left, right = [part.a for part in products], [part.b for part in products]
        products = [SequenceOuter(torch.cat(left, 1), torch.cat(right, 1))]
    if whole:
        whole = [Explicit(functools.reduce(torch.add, (part.values for part in whole)))]
    return [*merged, *tokens, *products, *whole]


@dataclass(frozen=True, slots=True, eq=False)
class Backprop:
    """One operation's output gradient and what autograd saved; `slot` is the input that is shared. Private."""

    gradient: Tensor
    saved: dict[str, Any]
    slot: int
    shape: tuple[int, ...]
    axis: ExampleAxis
    examples: int

    def to_front(self, tensor: Tensor) -> Tensor:
        return self.axis.to_front(tensor, self.examples)

    def summed(self, values: Tensor, scale: float = 1) -> Explicit:
        """Values like the output, times a number, summed over all axes along which the shared tensor was spread."""
        values = values if scale == 1 else values * scale
        return Explicit(summed_to(self.to_front(working(values)), self.shape))


@dataclass(frozen=True, slots=True)
class Rule:
    """What to keep of a node before the backward pass, and the formula."""

    saved: tuple[str, ...]
    contribution: Callable[[Backprop], Contribution]


def summed_to(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """[n, *larger] summed to [n, *shape], as broadcasting spread it."""
    extra = values.dim() - 1 - len(shape)
    spread = [
        *range(1, 1 + extra),
        *(a for a, size in enumerate(shape, start=1 + extra) if size == 1 and values.shape[a] != 1),
    ]
    long = [axis for axis in spread if values.shape[axis] != 1]
    values = values.sum(long, keepdim=True) if long else values
    return values.reshape(len(values), *shape)


def saved_by(node: Node) -> dict[str, Any]:
    """What the node's formula needs, taken before the backward pass frees it."""
    rule = RULES.get(node.name())
    values = {name: getattr(node, f"_saved_{name}") for name in (() if rule is None else rule.saved)}
    return {name: value.detach() if isinstance(value, Tensor) else value for name, value in values.items()}


def _add_product(bp: Backprop) -> Contribution:
    """What `addcmul` computes: self + value * tensor1 * tensor2."""
    if bp.slot == 0:
        return bp.summed(bp.gradient)
    other = bp.saved["tensor2" if bp.slot == 1 else "tensor1"]
    return bp.summed(bp.gradient * other * bp.saved["value"])


def _matrix(bp: Backprop, left: Tensor | None, right: Tensor | None) -> Contribution:
    """One of the factors of left [m, k] @ right [k, n] is shared."""
    if bp.axis.axis == 0 and left is not None:
        return SequenceOuter(_positions(bp, bp.gradient), _positions(bp, left))
    assert right is not None
    return SequenceOuter(_positions(bp, right.T), _positions(bp, bp.gradient.T))


def _positions(bp: Backprop, matrix: Tensor) -> Tensor:
    """[examples and positions, features] to [n, t, features]."""
    axis = ExampleAxis(0, bp.axis.before, bp.axis.after)
    return axis.to_front(working(matrix), bp.examples)


def _sum_and_product(bp: Backprop) -> Contribution:
    if bp.slot == 0:
        return bp.summed(bp.gradient, bp.saved["beta"])
    found = _matrix(bp, bp.saved["mat1"], bp.saved["mat2"])
    assert isinstance(found, SequenceOuter)
    return times(found, bp.saved["alpha"])


def _layer_norm(bp: Backprop) -> Contribution:
    gradient = working(bp.gradient)
    if bp.slot == 1:
        gradient = gradient * ((working(bp.saved["input"]) - bp.saved["result1"]) * bp.saved["result2"])
    return bp.summed(gradient)


def _embedding(bp: Backprop) -> Contribution:
    """The ids have the output's axes but the last."""
    ids = bp.to_front(bp.saved["indices"]).reshape(bp.examples, -1)
    b = bp.to_front(working(bp.gradient)).reshape(*ids.shape, -1)
    return Tokens(ids, b, bp.saved["padding_idx"], bp.shape[0])


def _convolution(bp: Backprop) -> Contribution:
    if bp.axis.axis != 0:
        raise FallbackError("a convolution whose first axis does not hold the examples")
    if bp.slot == 2:
        values = working(bp.gradient)
        shape = (*bp.shape, *[1] * (values.dim() - 2))
        return Explicit(summed_to(bp.to_front(values), shape).reshape(bp.examples, *bp.shape))
    x, gradient = working(bp.saved["input"]), working(bp.gradient)
    a, b = (gradient, x) if bp.saved["transposed"] else (x, gradient)
    axes = len(bp.shape) - 2
    stride, padding, dilation = (
        tuple(bp.saved[name]) * (axes // len(bp.saved[name])) for name in ("stride", "padding", "dilation")
    )
    found = ConvWeight(a, b.contiguous(), bp.shape[2:], stride, padding, dilation, bp.saved["groups"])
    if bp.axis == ExampleAxis(0):
        return found
    # Every example has several rows, laid out along one axis with the examples.
    return Explicit(bp.axis.to_front(found.dense(), bp.examples).sum(1))


RULES: dict[str, Rule] = {
    "AddBackward0": Rule(("alpha",), lambda bp: bp.summed(bp.gradient, bp.saved["alpha"] if bp.slot else 1)),
    "SubBackward0": Rule(("alpha",), lambda bp: bp.summed(bp.gradient, -bp.saved["alpha"] if bp.slot else 1)),
    "MulBackward0": Rule(
        ("self", "other"), lambda bp: bp.summed(bp.gradient * bp.saved["self" if bp.slot else "other"])
    ),
    "AddcmulBackward0": Rule(("tensor1", "tensor2", "value"), _add_product),
    "ExpandBackward0": Rule((), lambda bp: bp.summed(bp.gradient)),
    "WhereBackward0": Rule(
        ("condition",),
        lambda bp: bp.summed(bp.gradient * (~bp.saved["condition"] if bp.slot else bp.saved["condition"])),
    ),
    "PreluKernelBackward0": Rule(
        ("self",), lambda bp: bp.summed(bp.gradient * bp.saved["self"].clamp(max=0))
    ),
    "MmBackward0": Rule(("self", "mat2"), lambda bp: _matrix(bp, bp.saved["self"], bp.saved["mat2"])),
    "AddmmBackward0": Rule(("mat1", "mat2", "alpha", "beta"), _sum_and_product),
    "NativeLayerNormBackward0": Rule(("input", "result1", "result2"), _layer_norm),
    "EmbeddingBackward0": Rule(("indices", "padding_idx"), _embedding),
    "ConvolutionBackward0": Rule(
        ("input", "stride", "padding", "dilation", "transposed", "groups"), _convolution
    ),
}
