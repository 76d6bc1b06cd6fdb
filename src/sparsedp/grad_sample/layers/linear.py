"""Linear layers: the per-sample gradient is an outer product, or a sum of them along a sequence.

Index conventions: n sample, t position, o output feature, i input feature.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparsedp.grad_sample.blocks import Block, Metric
from sparsedp.grad_sample.layers.grams import EXTREME, GramNorms, cached, measure, pays, summed
from sparsedp.grad_sample.layers.source import (
    MOST_SUMMED,
    Explicit,
    Family,
    Source,
    add_to,
    as_it_is,
    keep,
    never,
    one_plane,
    silence,
    squared_norms_of,
    working,
)
from sparsedp.grad_sample.layers.unit_rows import UnitRows
from sparsedp.grad_sample.tape import Call
from sparsedp.grad_sample.wide_products import cached_rows, inner_products, outer_sum
from sparsedp.grad_sample.workspace import Space

WIDE = 8192
"""Inputs whose products are summed in float32 before the sum goes on in float64."""
NARROW, NARROW_TIMES = 16, 8
"""So few inputs, for so many times the outputs, are the low-rank additions of LoRA."""


@dataclass(frozen=True, slots=True, eq=False)
class Outer:
    """One outer product b a^T per sample: norms and sums without ever forming it."""

    a: Tensor
    b: Tensor
    space: Space

    to_planes = staticmethod(one_plane)
    from_planes = staticmethod(as_it_is)

    @property
    def block_size(self) -> int:
        """Scalars per sample."""
        return self.a.shape[1] * self.b.shape[1]

    def explicit(self, span: slice) -> Tensor:
        """The outer products of some samples."""
        return (self.b[span].unsqueeze(2) * self.a[span].unsqueeze(1)).flatten(1).unsqueeze(0)

    def by_unit(self, rows: UnitRows) -> SequenceOuter:
        """A unit's rows are the positions of a sequence."""
        return SequenceOuter(rows.beside(self.a), rows.beside(self.b), self.space)

    def holds(self, metric: Metric) -> bool:
        """In any metric."""
        return True

    def squared_norms(self, metric: Metric) -> Tensor:
        """||((b a^T) - centre) * weight||^2 = b^2 . (weight^2 a^2) - 2 b . (weight^2 centre a) + constant.

        The expansion cancels, so with a centre it is evaluated in float64.
        """
        if metric.centre is None:
            return self._plain_norms(metric)
        assert metric.weight is not None
        a, b = self.a.double(), self.b.double()
        weight, centre = metric.weight.double().square(), metric.centre.double()
        square = ((a * a) @ weight.T * (b * b)).sum(1)
        cross = (a @ (weight * centre).T * b).sum(1)
        return square - 2 * cross + (weight * centre * centre).sum()

    def _plain_norms(self, metric: Metric) -> Tensor:
        if metric.weight is None:
            a_squared, b_squared = squared_norms_of(self.a), squared_norms_of(self.b)
            squared = a_squared * b_squared
            if self.a.dtype == torch.float64:
                return squared
            return squared.masked_fill((a_squared > EXTREME**2) | (b_squared > EXTREME**2), torch.inf)
        rows, step = metric.squared_rows.to(self.a.dtype), cached_rows()
        parts = [self.a[start : start + step] for start in range(0, len(self.a), step)]
        products = torch.cat([self._products(part, rows) for part in parts])
        b2 = self.b * self.b
        norms: Tensor = torch.linalg.vecdot(products[:, : len(metric.weight)], b2)
        if self.a.dtype == torch.float64:
            return norms
        extreme = (products[:, -1] > EXTREME**2) | (b2.amax(1) > EXTREME**2)
        return norms.masked_fill(extreme, torch.inf)

    def _products(self, a: Tensor, rows: Tensor) -> Tensor:
        squares = torch.mul(a, a, out=self.space.scratch(tuple(a.shape), a))
        if a.shape[1] <= WIDE:
            return inner_products(squares, rows)
        spans = [slice(start, start + WIDE) for start in range(0, a.shape[1], WIDE)]
        return (
            torch.stack([(squares[:, span] @ rows[:, span].T).double() for span in spans]).sum(0).to(a.dtype)
        )

    def add_weighted_sum(self, factors: Tensor, total: Tensor, metric: Metric) -> None:
        """One ordinary weight gradient on the scaled output gradients."""
        a, b = silence(factors, self.a, self.b)
        if metric.centre is not None:
            a, b = a.double(), b.double()
        scaled = b * factors.to(b).unsqueeze(1)
        for start in range(0, len(a), MOST_SUMMED):
            span = slice(start, start + MOST_SUMMED)
            add_to(total, outer_sum(scaled[span], a[span]))


@dataclass(frozen=True, eq=False)
class SequenceOuter:
    """A sum of outer products along the positions of a sequence: a is [n, t, i], b is [n, t, o].

    Formed sample by sample, or measured by the Gram matrices of positions where these are few.
    """

    a: Tensor
    b: Tensor
    space: Space

    to_planes = staticmethod(one_plane)
    from_planes = staticmethod(as_it_is)

    @property
    def block_size(self) -> int:
        """Scalars per sample."""
        return self.a.shape[2] * self.b.shape[2]

    def explicit(self, span: slice) -> Tensor:
        """Per-sample weight gradients by a batched product, which for few inputs is quicker turned."""
        a, b = self.a[span], self.b[span].transpose(1, 2)
        n, i, o = a.shape[0], a.shape[2], b.shape[1]
        room = self.space.result((n, o, i), a, span)
        if i <= NARROW and o >= NARROW_TIMES * i:
            turned = torch.bmm(a.transpose(1, 2), b.transpose(1, 2), out=self.space.scratch((n, i, o), a))
            return room.copy_(turned.transpose(1, 2)).flatten(1).unsqueeze(0)
        return torch.bmm(b, a, out=room).flatten(1).unsqueeze(0)

    def by_unit(self, rows: UnitRows) -> SequenceOuter:
        """A unit's sequences one after the other."""
        return SequenceOuter(rows.beside(self.a).flatten(1, 2), rows.beside(self.b).flatten(1, 2), self.space)

    def holds(self, metric: Metric) -> bool:
        """Where all of the block counts alike, and positions are few for its size."""
        t, i, o = self.a.shape[1], self.a.shape[2], self.b.shape[2]
        return metric.is_identity and pays(t * t * (i + o), t, i * o)

    def squared_norms(self, metric: Metric) -> Tensor:
        """From Gram matrices."""
        return self._measured.squared

    def add_weighted_sum(self, factors: Tensor, total: Tensor, metric: Metric) -> None:
        """One ordinary weight gradient, and by themselves the samples whose positions cancel."""
        together = self._measured.together(factors)
        a, b = silence(together, self.a, self.b)
        for span in summed(len(a), a.shape[1]):
            scaled = b[span] * together[span].to(b).reshape(-1, 1, 1)
            add_to(total, scaled.flatten(0, 1).T @ a[span].flatten(0, 1))
        for sample in self._measured.alone:
            total += factors[sample] * self._formed(sample).flatten()

    @functools.cached_property
    def _measured(self) -> GramNorms:
        return measure(self._grams(), self._formed, exact=self.a.dtype == torch.float64)

    def _grams(self) -> Iterator[tuple[Tensor, Tensor]]:
        t, i, o = self.a.shape[1], self.a.shape[2], self.b.shape[2]
        for span in cached(len(self.a), t * (i + o)):
            a, b = self.space.wide("a", self.a[span]), self.space.wide("b", self.b[span])
            yield torch.bmm(a, a.transpose(1, 2)), torch.bmm(b, b.transpose(1, 2))

    def _formed(self, sample: int) -> Tensor:
        return self.b[sample].double().T @ self.a[sample].double()


def linear_source(call: Call, parameter: str, block: Block, space: Space) -> Source:
    """Per-sample gradients of a Linear's weight or bias."""
    gradient = call.output_gradient
    assert gradient is not None
    b = working(gradient)
    if parameter == "bias":
        return Explicit(b.flatten(1, -2).sum(1) if b.dim() > 2 else b)
    a = working(call.input)
    a, b = keep(a, -1, block.columns), keep(b, -1, block.rows)
    if a.dim() == 2:
        return Outer(a, b, space)
    return SequenceOuter(a.flatten(1, -2), b.flatten(1, -2), space)


def _axes(module: nn.Module, parameter: str) -> int:
    return 2 if parameter == "weight" else 0


LINEAR = Family(frozenset({"weight", "bias"}), linear_source, _axes, never)
