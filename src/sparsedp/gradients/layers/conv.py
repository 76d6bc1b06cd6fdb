"""Convolutions of one, two and three dimensions.

The per-sample weight gradient is a batched product of output gradients with patches of the input. Where the stride is
one and there are channels enough, patches are never copied: for each kernel offset the shifted input is a view, once
the output gradient is padded to the input's row length.

Index conventions: n sample, g group, o output channel, c input channel, x kernel offset, t output position.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsedp.gradients.blocks import Block
from sparsedp.gradients.graph import CannotBookError
from sparsedp.gradients.layers.source import Explicit, Family, Source, keep, never, working
from sparsedp.gradients.tape import Call
from sparsedp.gradients.workspace import Space

ConvModule = nn.Conv1d | nn.Conv2d | nn.Conv3d

SHIFT_CHANNELS = 16
"""From this many input channels on, one product per kernel offset beats copying patches."""


@dataclass(frozen=True, slots=True, eq=False)
class ConvWeight:
    """Per-sample weight gradients of a convolution; `a` is already padded."""

    a: Tensor
    b: Tensor
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    space: Space

    @property
    def block_size(self) -> int:
        """Scalars per sample."""
        return self.b.shape[1] * (self.a.shape[1] // self.groups) * math.prod(self.kernel)

    @property
    def _shifts(self) -> bool:
        unit_stride = all(s == 1 for s in self.stride)
        wide = self.a.shape[1] >= SHIFT_CHANNELS and math.prod(self.kernel) > 1
        return unit_stride and wide and self.groups == 1

    def to_planes(self, block: Tensor) -> Tensor:
        """[o, c, *kernel] to one plane, or to one plane per kernel offset."""
        if not self._shifts:
            return block.reshape(1, -1)
        return block.flatten(2).permute(2, 0, 1).flatten(1).contiguous()

    def from_planes(self, planes: Tensor) -> Tensor:
        """Back to [o, c, *kernel] order."""
        if not self._shifts:
            return planes
        return planes.reshape(planes.shape[0], self.b.shape[1], -1).permute(1, 2, 0)

    def explicit(self, span: slice) -> Tensor:
        """Per-sample weight gradients: one plane, or one plane per kernel offset."""
        a, b = self.a[span], self.b[span]
        return self._by_shifts(a, b, span) if self._shifts else self._by_patches(a, b, span)

    def _by_patches(self, a: Tensor, b: Tensor, span: slice) -> Tensor:
        n, channels, outputs = a.shape[0], a.shape[1] // self.groups, b.shape[1]
        view = self._patches(a, b.shape[2:])
        patches = self.space.scratch(tuple(view.shape), a).copy_(view)
        patches = patches.view(n * self.groups, channels * math.prod(self.kernel), -1)
        flat = b.reshape(n * self.groups, outputs // self.groups, -1)
        room = self.space.result((flat.shape[0], flat.shape[1], patches.shape[1]), a, span)
        return torch.bmm(flat, patches.transpose(1, 2), out=room).view(1, n, -1)

    def _patches(self, a: Tensor, positions: torch.Size) -> Tensor:
        """A view [n, c, *kernel, *positions] of the padded input."""
        a = a.contiguous()
        within = [d * s for d, s in zip(self.dilation, a.stride()[2:], strict=True)]
        between = [d * s for d, s in zip(self.stride, a.stride()[2:], strict=True)]
        return a.as_strided((*a.shape[:2], *self.kernel, *positions), (*a.stride()[:2], *within, *between))

    def _by_shifts(self, a: Tensor, b: Tensor, span: slice) -> Tensor:
        n, channels, outputs, kernel = a.shape[0], a.shape[1], b.shape[1], math.prod(self.kernel)
        sizes = a.shape[2:]
        # Padding b to a's row length makes every shifted input a plain slice of the flattened one; the last row of
        # b needs no padding, so no slice runs past the end.
        wide = self.space.framed("wide", (n, outputs, b.shape[2], *sizes[1:]), b)
        _inner(wide, [slice(out) for out in b.shape[2:]]).copy_(b)
        flat_b = wide.flatten(2)
        unit = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
        length = sum((out - 1) * step for out, step in zip(b.shape[2:], unit, strict=True)) + 1
        flat_b = flat_b[:, :, :length]
        flat_a = a.flatten(2).transpose(1, 2)
        products = self.space.result((kernel, n, outputs, channels), b, span)
        for place, offset in enumerate(itertools.product(*map(range, self.kernel))):
            start = sum(x * d * step for x, d, step in zip(offset, self.dilation, unit, strict=True))
            torch.bmm(flat_b, flat_a[:, start : start + length], out=products[place])
        return products.flatten(2)


def conv_source(call: Call, parameter: str, block: Block, space: Space) -> Source:
    """Per-sample gradients of a convolution's weight or bias."""
    gradient = call.output_gradient
    assert gradient is not None
    module = call.module
    assert isinstance(module, ConvModule)
    b = working(gradient)
    if b.dim() != len(module.kernel_size) + 2:
        raise CannotBookError(f"layer {call.name!r} was given a single sample without a batch axis")
    if parameter == "bias":
        return Explicit(b.flatten(2).sum(2))
    a = working(call.input)
    a = keep(a, 1, block.columns)
    return ConvWeight(
        _pad(module, a, space),
        keep(b, 1, block.rows).contiguous(),
        tuple(module.kernel_size),
        tuple(module.stride),
        tuple(module.dilation),
        module.groups,
        space,
    )


def _pad(module: ConvModule, a: Tensor, space: Space) -> Tensor:
    padding = list(module._reversed_padding_repeated_twice)
    if not any(padding):
        return a
    if module.padding_mode != "zeros":
        return F.pad(a, padding, mode=module.padding_mode)
    before, after = padding[-2::-2], padding[-1::-2]
    sizes = [x + size + y for x, size, y in zip(before, a.shape[2:], after, strict=True)]
    framed = space.framed("padded", (*a.shape[:2], *sizes), a)
    _inner(framed, [slice(x, x + size) for x, size in zip(before, a.shape[2:], strict=True)]).copy_(a)
    return framed


def _inner(tensor: Tensor, spans: list[slice]) -> Tensor:
    """A view of part of every spatial axis."""
    for axis, span in enumerate(spans, start=2):
        tensor = tensor.narrow(axis, span.start or 0, span.stop - (span.start or 0))
    return tensor


def _axes(module: nn.Module, parameter: str) -> int:
    assert isinstance(module, ConvModule)
    return 2 if parameter == "weight" and module.groups == 1 else 0


CONV = Family(frozenset({"weight", "bias"}), conv_source, _axes, never)
