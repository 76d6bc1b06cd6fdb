"""Operations in which samples meet a tensor they share: its per-sample gradients from the output's gradient.

Keyed by the name of the node autograd leaves behind, so that a formula serves whoever calls the operation: a layer, a
subclass of one, or a forward written by hand. An operation that is not here goes through its own backward, one sample
at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import Node

from sparsedp.grad_sample.graph import CannotBookError
from sparsedp.grad_sample.layers.contributions import Contribution, Folded, Patches, Product, Tokens, Whole
from sparsedp.grad_sample.layers.source import working
from sparsedp.grad_sample.recurrent.nodes import input_of, is_ours
from sparsedp.grad_sample.rowaxis import RowAxis


@dataclass(frozen=True, slots=True, eq=False)
class Met:
    """One operation's output gradient and what autograd saved for its backward. Private.

    `slot` is the place of the shared tensor among the inputs, `shape` its shape.
    """

    gradient: Tensor
    saved: dict[str, Any]
    slot: int
    shape: tuple[int, ...]
    rows: RowAxis
    samples: int

    def to_front(self, tensor: Tensor) -> Tensor:
        """A tensor laid out like the output, samples first."""
        return self.rows.to_front(tensor, self.samples)

    def summed(self, values: Tensor) -> Whole:
        """Values like the output, summed over all axes along which the shared tensor was spread."""
        return Whole(summed_to(self.to_front(values), self.shape))


Rule = Callable[[Met], Contribution]


@dataclass(frozen=True, slots=True)
class Operation:
    """What to keep of a node before the backward pass, and the formula."""

    saved: tuple[str, ...]
    rule: Rule


def summed_to(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """[n, *larger] summed to [n, *shape], as broadcasting spread it."""
    extra = values.dim() - 1 - len(shape)
    if extra:
        values = values.flatten(1, extra).sum(1)
    spread = [axis for axis, size in enumerate(shape, start=1) if size == 1 and values.shape[axis] != 1]
    return values.sum(spread, keepdim=True) if spread else values


def saved_by(node: Node) -> dict[str, Any]:
    """What the node's formula needs, taken before the backward pass frees it."""
    operation = OPERATIONS.get(node.name())
    names = () if operation is None else operation.saved
    if is_ours(node):
        return {name: input_of(node).detach() for name in names}
    values = {name: getattr(node, f"_saved_{name}") for name in names}
    return {name: value.detach() if isinstance(value, Tensor) else value for name, value in values.items()}


def _add(met: Met) -> Contribution:
    return met.summed(met.gradient if met.slot == 0 else met.gradient * met.saved["alpha"])


def _subtract(met: Met) -> Contribution:
    return met.summed(met.gradient if met.slot == 0 else met.gradient * -met.saved["alpha"])


def _multiply(met: Met) -> Contribution:
    return met.summed(met.gradient * met.saved["other" if met.slot == 0 else "self"])


def _divide(met: Met) -> Contribution:
    other = met.saved["other"]
    if met.slot == 0:
        return met.summed(met.gradient / other)
    return met.summed(-met.gradient * met.saved["self"] / (other * other))


def _add_product(met: Met) -> Contribution:
    """What `addcmul` computes: self + value * tensor1 * tensor2."""
    if met.slot == 0:
        return met.summed(met.gradient)
    other = met.saved["tensor2" if met.slot == 1 else "tensor1"]
    return met.summed(met.gradient * other * met.saved["value"])


def _spread(met: Met) -> Contribution:
    return met.summed(met.gradient)


def _repeat(met: Met) -> Contribution:
    """Every axis of the output is so many copies of the input's."""
    values = met.to_front(met.gradient)
    sizes = (1,) * (values.dim() - 1 - len(met.shape)) + met.shape
    pairs = [n for whole, size in zip(values.shape[1:], sizes, strict=True) for n in (whole // size, size)]
    copies = list(range(1, 1 + len(pairs), 2))
    return Whole(values.reshape(met.samples, *pairs).sum(copies).reshape(met.samples, *met.shape))


def _choose(met: Met) -> Contribution:
    chosen = met.saved["condition"] if met.slot == 0 else ~met.saved["condition"]
    return met.summed(met.gradient * chosen)


def _prelu(met: Met) -> Contribution:
    return met.summed(met.gradient * met.saved["self"].clamp(max=0))


def _matrix(met: Met, left: Tensor | None, right: Tensor | None) -> Contribution:
    """One of the factors of left [m, k] @ right [k, n] is shared."""
    if met.rows.axis == 0 and left is not None:
        return Product(_positions(met, left), _positions(met, met.gradient))
    assert right is not None
    return Product(_positions(met, met.gradient.T), _positions(met, right.T))


def _positions(met: Met, matrix: Tensor) -> Tensor:
    """[samples and positions, features] to [n, t, features]."""
    rows = RowAxis(0, met.rows.before, met.rows.after)
    return rows.to_front(working(matrix), met.samples)


def _product(met: Met) -> Contribution:
    return _matrix(met, met.saved["self"], met.saved["mat2"])


def _sum_and_product(met: Met) -> Contribution:
    if met.slot == 0:
        return met.summed(met.gradient * met.saved["beta"])
    found = _matrix(met, met.saved["mat1"], met.saved["mat2"])
    assert isinstance(found, Product)
    alpha = met.saved["alpha"]
    return found if alpha == 1 else Product(found.a * alpha, found.b)


def _matrix_by_vector(met: Met) -> Contribution:
    if met.slot == 0:
        raise CannotBookError("a shared matrix times one sample's vector")
    return Whole((_positions(met, met.saved["self"] * met.gradient.unsqueeze(1))).sum(1))


def _batched_product(met: Met) -> Contribution:
    """[g, m, k] @ [g, k, n], the samples inside m or n."""
    gradient = working(met.gradient)
    if met.slot == 1 and met.rows.axis == 1:
        a, b = met.to_front(working(met.saved["self"])), met.to_front(gradient)
        return Whole(torch.einsum("sgtk,sgtn->sgkn", a, b))
    if met.slot == 0 and met.rows.axis == 2:
        a, b = met.to_front(working(met.saved["mat2"])), met.to_front(gradient)
        return Whole(torch.einsum("sgmt,sgkt->sgmk", b, a))
    raise CannotBookError("a batched product in which the samples lie along an axis of its own")


def _bilinear(met: Met) -> Contribution:
    """out[o] = left[i] W[o, i, j] right[j], as `nn.Bilinear` lays it out."""
    left, right = (met.saved[name].reshape(met.gradient.shape[0], -1) for name in ("i1", "i3"))
    if met.slot != 1 or met.rows.axis != 0 or met.gradient.dim() != 2:
        raise CannotBookError("a trilinear product other than nn.Bilinear's")
    pairs = _positions(met, (left.unsqueeze(2) * right.unsqueeze(1)).flatten(1))
    gradient = _positions(met, met.gradient)
    return Whole(torch.bmm(gradient.transpose(1, 2), pairs).reshape(met.samples, *met.shape))


def _layer_norm(met: Met) -> Contribution:
    gradient = working(met.gradient)
    if met.slot == 1:
        gradient = gradient * ((working(met.saved["input"]) - met.saved["result1"]) * met.saved["result2"])
    return met.summed(gradient)


def _group_norm(met: Met) -> Contribution:
    gradient, x = working(met.gradient), working(met.saved["input"])
    if met.slot == 1:
        grouped = x.reshape(*met.saved["result1"].shape, -1)
        mean, scale = (met.saved[name].unsqueeze(-1) for name in ("result1", "result2"))
        gradient = gradient * ((grouped - mean) * scale).reshape(x.shape)
    return _by_channel(met, gradient)


def _frozen_batch_norm(met: Met) -> Contribution:
    if met.saved["training"]:
        raise CannotBookError("batch norm mixes samples")
    gradient, x = working(met.gradient), working(met.saved["input"])
    if met.slot == 1:
        mean, variance = (
            met.saved[name].reshape(-1, *[1] * (x.dim() - 2)) for name in ("running_mean", "running_var")
        )
        gradient = gradient * ((x - mean) * (variance + met.saved["eps"]).rsqrt())
    return _by_channel(met, gradient)


def _by_channel(met: Met, values: Tensor) -> Contribution:
    shape = (*met.shape, *[1] * (values.dim() - 2))
    return Whole(summed_to(met.to_front(values), shape).reshape(met.samples, *met.shape))


def _embedding(met: Met) -> Contribution:
    """The ids have the output's axes but the last."""
    ids = met.to_front(met.saved["indices"]).reshape(met.samples, -1)
    b = met.to_front(working(met.gradient)).reshape(*ids.shape, -1)
    return tokens(ids, b, met.saved["padding_idx"], met.shape[0])


def tokens(ids: Tensor, b: Tensor, padding: int, rows: int) -> Tokens:
    """Rows read from a table; the padding row (none if negative, written modulo 2^64) has no gradient."""
    if 0 <= padding < rows:
        b = b.masked_fill((ids == padding).unsqueeze(2), 0)
    return Tokens(ids, b, rows)


def _convolution(met: Met) -> Contribution:
    if met.rows.axis != 0:
        raise CannotBookError("a convolution whose first axis does not hold the samples")
    if met.slot == 2:
        return _by_channel(met, working(met.gradient))
    x, gradient = working(met.saved["input"]), working(met.gradient)
    a, b = (gradient, x) if met.saved["transposed"] else (x, gradient)
    sides = [side for size in reversed(met.saved["padding"]) for side in (size, size)]
    stride, dilation = tuple(met.saved["stride"]), tuple(met.saved["dilation"])
    found = Patches(F.pad(a, sides), b, met.shape[2:], stride, dilation, met.saved["groups"])
    return found if met.rows.first else Folded(found, met.rows, met.samples)


def _projection(met: Met) -> Contribution:
    """A recurrent layer's, [t, n, features]: all of its steps are positions."""
    if met.slot == 0:
        raise CannotBookError("a recurrent layer whose input all samples share")
    if met.slot == 2:
        return met.summed(met.gradient)
    x, gradient = (met.to_front(values).squeeze(2) for values in (met.saved["x"], met.gradient))
    return Product(gradient, x.contiguous())


OPERATIONS: dict[str, Operation] = {
    "AddBackward0": Operation(("alpha",), _add),
    "SubBackward0": Operation(("alpha",), _subtract),
    "MulBackward0": Operation(("self", "other"), _multiply),
    "DivBackward0": Operation(("self", "other"), _divide),
    "AddcmulBackward0": Operation(("tensor1", "tensor2", "value"), _add_product),
    "RepeatBackward0": Operation((), _repeat),
    "ExpandBackward0": Operation((), _spread),
    "WhereBackward0": Operation(("condition",), _choose),
    "PreluKernelBackward0": Operation(("self",), _prelu),
    "MmBackward0": Operation(("self", "mat2"), _product),
    "AddmmBackward0": Operation(("mat1", "mat2", "alpha", "beta"), _sum_and_product),
    "MvBackward0": Operation(("self",), _matrix_by_vector),
    "BmmBackward0": Operation(("self", "mat2"), _batched_product),
    "TrilinearBackward0": Operation(("i1", "i3"), _bilinear),
    "NativeLayerNormBackward0": Operation(("input", "result1", "result2"), _layer_norm),
    "NativeGroupNormBackward0": Operation(("input", "result1", "result2"), _group_norm),
    "NativeBatchNormBackward0": Operation(
        ("input", "running_mean", "running_var", "training", "eps"), _frozen_batch_norm
    ),
    "EmbeddingBackward0": Operation(("indices", "padding_idx"), _embedding),
    "ConvolutionBackward0": Operation(
        ("input", "stride", "padding", "dilation", "transposed", "groups"), _convolution
    ),
    "ProjectionBackward": Operation(("x",), _projection),
}
