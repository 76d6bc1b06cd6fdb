"""Convolutions of one, two and three dimensions.

The per-example weight gradient is a batched product of output gradients with patches of the input. A depthwise
convolution's gradients are themselves a depthwise convolution of the input, with the output gradient as kernel. Where
positions are few for the size of the weight, nothing is formed at all (`linear`).

Index conventions: n example, g group, o output channel, c input channel, x kernel offset, t output position.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsedp.grad_sample.linear import GhostNorms, cached, measure, pays, summed
from sparsedp.grad_sample.sampler import Block, Explicit, GradSampler, Metric, Workspace, keep, silence

CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d}
"""By number of axes; those whose depthwise kernels are quick."""


@dataclass(frozen=True, eq=False)
class ConvWeight(GradSampler):
    """Weight gradients [o, c, *kernel]: `a` is the input, `b` the output's gradient; transposed, the other way."""

    a: Tensor
    b: Tensor
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    space: Workspace = field(default_factory=Workspace)

    @property
    def block_size(self) -> int:
        return self.b.shape[1] * (self.a.shape[1] // self.groups) * math.prod(self.kernel)

    def dense(self) -> Tensor:
        shape = (self.b.shape[1], self.a.shape[1] // self.groups, *self.kernel)
        return self.explicit(slice(None)).reshape(-1, *shape)

    def restricted(self, block: Block, space: Workspace) -> GradSampler:
        if self.groups > 1 and not (block.rows is None and block.columns is None):
            return Explicit(self.dense()).restricted(block, space)
        a, b = keep(self.a, 1, block.columns), keep(self.b, 1, block.rows)
        return replace(self, a=a, b=b.contiguous(), space=space)

    @property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(size + 2 * side for size, side in zip(self.a.shape[2:], self.padding, strict=True))

    def _padded(self, a: Tensor) -> Tensor:
        """Some examples' input with its padding; valid until the next one of this shape is."""
        if not any(self.padding):
            return a
        framed = self.space.framed(self.padding, (*a.shape[:2], *self._sizes), a)
        sides = zip(self.padding, a.shape[2:], strict=True)
        _inner(framed, [slice(side, side + size) for side, size in sides]).copy_(a)
        return framed

    def explicit(self, span: slice) -> Tensor:
        a, b = self._padded(self.a[span]), self.b[span]
        return self._by_channel(a, b) if self._depthwise else self._by_patches(a, b, span)

    @property
    def _depthwise(self) -> bool:
        return self.groups > 1 and self.a.shape[1] == self.groups and len(self.kernel) in CONVOLUTIONS

    def _by_channel(self, a: Tensor, b: Tensor) -> Tensor:
        """Every example's channels as channels of one example; what strides were become dilations."""
        n, channels = a.shape[:2]
        convolve, a = CONVOLUTIONS[len(self.kernel)], self._used(a)
        found = convolve(
            a.reshape(1, n * channels, *a.shape[2:]),
            b.reshape(n * b.shape[1], 1, *b.shape[2:]),
            stride=self.dilation,
            dilation=self.stride,
            groups=n * channels,
        )
        return found.view(n, -1)

    def _used(self, a: Tensor) -> Tensor:
        reach = zip(self.b.shape[2:], self.stride, self.kernel, self.dilation, strict=True)
        return _inner(a, [slice((out - 1) * s + (k - 1) * d + 1) for out, s, k, d in reach])

    def has_ghost_norm(self, metric: Metric) -> bool:
        pixels, positions = math.prod(self._sizes), math.prod(self.b.shape[2:])
        products = pixels**2 * self.a.shape[1] + positions**2 * self.b.shape[1]
        return metric.is_identity and self.groups == 1 and pays(products, positions, self.block_size)

    def squared_norms(self, metric: Metric) -> Tensor:
        return self._measured.squared

    def add_weighted_sum(self, factors: Tensor, total: Tensor, metric: Metric) -> None:
        together = self._measured.together(factors)
        a, b = silence(together, self.a, self.b)
        for span in summed(len(a), math.prod(b.shape[2:])):
            scaled = b[span] * together[span].to(b).reshape(-1, *[1] * (b.dim() - 1))
            total += self._weight_gradient(a[span], scaled)
        for example in self._measured.alone:
            total += factors[example] * self._formed(example)

    @functools.cached_property
    def _measured(self) -> GhostNorms:
        return measure(self._grams(), self._formed, exact=self.a.dtype == torch.float64)

    def _grams(self) -> Iterator[tuple[Tensor, Tensor]]:
        for span in cached(len(self.a), self.a[0].numel() + self.b[0].numel()):
            a = self.space.wide("a", self._padded(self.a[span])).flatten(2)
            b = self.space.wide("b", self.b[span]).flatten(2)
            yield self._patch_gram(torch.bmm(a.transpose(1, 2), a)), torch.bmm(b.transpose(1, 2), b)

    def _patch_gram(self, pixels: Tensor) -> Tensor:
        """From the products of any two pixels [n, p, p] those of any two patches [n, t, t]: a sum over offsets."""
        sizes, positions = self._sizes, self.b.shape[2:]
        by_axis = pixels.view(-1, *sizes, *sizes)
        total = pixels.new_zeros(len(pixels), *positions, *positions)
        for offset in itertools.product(*map(range, self.kernel)):
            steps = zip(offset, self.dilation, self.stride, positions, strict=True)
            seen = [slice(x * d, x * d + s * (out - 1) + 1, s) for x, d, s, out in steps]
            total += by_axis[(slice(None), *seen, *seen)]
        return total.view(len(pixels), math.prod(positions), -1)

    def _formed(self, example: int) -> Tensor:
        one = slice(example, example + 1)
        return self._weight_gradient(self.a[one].double(), self.b[one].double())

    def _weight_gradient(self, a: Tensor, b: Tensor) -> Tensor:
        shape = (b.shape[1], a.shape[1] // self.groups, *self.kernel)
        a = self._used(self._padded(a))
        weight, none = a.new_empty(1).expand(shape), (0,) * len(self.kernel)
        geometry = (self.stride, none, self.dilation, False, none, self.groups)
        wanted = (False, True, False)
        _, found, _ = torch.ops.aten.convolution_backward(b, a, weight, None, *geometry, wanted)
        gradient: Tensor = found.flatten()
        return gradient

    def _by_patches(self, a: Tensor, b: Tensor, span: slice) -> Tensor:
        n, channels, outputs = a.shape[0], a.shape[1] // self.groups, b.shape[1]
        view = self._patches(a, b.shape[2:])
        patches = self.space.scratch(tuple(view.shape), a).copy_(view)
        patches = patches.view(n * self.groups, channels * math.prod(self.kernel), -1)
        flat = b.reshape(n * self.groups, outputs // self.groups, -1)
        room = self.space.result((flat.shape[0], flat.shape[1], patches.shape[1]), a, span)
        return torch.bmm(flat, patches.transpose(1, 2), out=room).view(n, -1)

    def _patches(self, a: Tensor, positions: torch.Size) -> Tensor:
        """A view [n, c, *kernel, *positions] of the padded input."""
        a = a.contiguous()
        within = [d * s for d, s in zip(self.dilation, a.stride()[2:], strict=True)]
        between = [d * s for d, s in zip(self.stride, a.stride()[2:], strict=True)]
        return a.as_strided((*a.shape[:2], *self.kernel, *positions), (*a.stride()[:2], *within, *between))


def _inner(tensor: Tensor, spans: list[slice]) -> Tensor:
    for axis, span in enumerate(spans, start=2):
        tensor = tensor.narrow(axis, span.start or 0, span.stop - (span.start or 0))
    return tensor
