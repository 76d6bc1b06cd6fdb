"""Linear maps: the per-example gradient is an outer product, or a sum of them along positions.

Ghost norms: a sum of outer products sum_t b_t a_t^T has the squared norm sum_{t,s} (a_t . a_s)(b_t . b_s), and the
weighted sum over examples is one ordinary weight gradient, so no example's gradient is formed. The Gram matrices are
float64, so the norm is exact to float64 rounding of the terms. An example whose positions nearly cancel has large
terms and a small gradient. In the float32 sum that examples share, its rounding would be bounded by its terms, not by
the clip. So an example whose terms add up to more than `MOST_TERMS` times its gradient is kept out of that sum: its
gradient is formed in float64, by itself, for norm and sum alike.

Index conventions: n example, t and s position, o output feature, i input feature.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparsedp.grad_sample.sampler import (
    MOST_SUMMED,
    Block,
    GradSampler,
    Metric,
    UnitPlaces,
    Workspace,
    add_to,
    keep,
    silence,
    spans,
    squared_norms_of,
)

MOST_TERMS = 64.0
"""Times an example's gradient that the norms of its terms may add up to in a sum that examples share."""
EXTREME = 2.0**40
"""Beyond this size squares of companions may underflow in float32: such an example counts as not finite."""
MOST_POSITIONS = 4096
"""Positions of examples summed in float32 before the sum goes on in float64."""
WIDE_BYTES = 4 << 20
"""What is turned into float64 at a time, so that it stays in the cache."""

LEAST_BLOCK, LARGE_BLOCK = 1 << 14, 1 << 19
"""Scalars below which a formed gradient stays in the cache, and beyond which it is formed twice: too few are kept."""
FORMING = 16.0
"""Products in float64 that cost as much as to write a scalar of a formed gradient and read it twice."""

WIDE = 8192
"""Inputs whose products are summed in float32 before the sum goes on in float64."""
WIDE_FACTOR = 4096
"""Scalars whose squares are summed in float32: rounding is then a quarter of the clip's margin at most."""
WIDE_INPUT, FEW_OUTPUTS, SLICE = 512, 20, 128
"""So wide inputs to so few outputs a CPU's matrix library splits badly over its threads; as a batch of products over
slices of examples each thread runs its best kernel."""


@dataclass(frozen=True, slots=True, eq=False)
class Outer(GradSampler):
    """One outer product b a^T per example: norms and sums without ever forming it."""

    a: Tensor
    b: Tensor
    space: Workspace

    @property
    def block_size(self) -> int:
        return self.a.shape[1] * self.b.shape[1]

    def explicit(self, span: slice) -> Tensor:
        return (self.b[span].unsqueeze(2) * self.a[span].unsqueeze(1)).flatten(1)

    def by_unit(self, units: Tensor, places: UnitPlaces | None) -> GradSampler | None:
        if places is None:
            return None
        return SequenceOuter(places.beside(self.a), places.beside(self.b), self.space)

    def has_ghost_norm(self, metric: Metric) -> bool:
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
        norms: Tensor = square - 2 * cross + (weight * centre * centre).sum()
        if self.a.dtype == torch.float64:
            return norms
        # What is too extreme for its own dtype counts as not finite, in every metric.
        return norms.masked_fill((a.square().sum(1) > EXTREME**2) | (b.abs().amax(1) > EXTREME), torch.inf)

    def _plain_norms(self, metric: Metric) -> Tensor:
        if metric.weight is None:
            a_squared, b_squared = _factor_norms(self.a), _factor_norms(self.b)
            squared = a_squared * b_squared
            if self.a.dtype == torch.float64:
                return squared
            return squared.masked_fill((a_squared > EXTREME**2) | (b_squared > EXTREME**2), torch.inf)
        rows = metric.squared_rows.to(self.a.dtype)
        # a slice for every thread at a time, and no more, so that they stay in the cache
        parts = spans(len(self.a), SLICE * max(2, torch.get_num_threads()))
        products = torch.cat([self._products(self.a[span], rows) for span in parts])
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
        parts = [(squares[:, span] @ rows[:, span].T).double() for span in spans(a.shape[1], WIDE)]
        return torch.stack(parts).sum(0).to(a.dtype)

    def add_weighted_sum(self, factors: Tensor, total: Tensor, metric: Metric) -> None:
        a, b = silence(factors, self.a, self.b)
        if metric.centre is not None:
            a, b = a.double(), b.double()
        scaled = b * factors.to(b).unsqueeze(1)
        for span in spans(len(a), MOST_SUMMED):
            add_to(total, outer_sum(scaled[span], a[span]))


@dataclass(frozen=True, eq=False)
class SequenceOuter(GradSampler):
    """A sum of outer products along the positions of a sequence: a is [n, t, i], b is [n, t, o]."""

    a: Tensor
    b: Tensor
    space: Workspace = field(default_factory=Workspace)

    @property
    def block_size(self) -> int:
        return self.a.shape[2] * self.b.shape[2]

    def dense(self) -> Tensor:
        return torch.bmm(self.b.transpose(1, 2), self.a)

    def restricted(self, block: Block, space: Workspace) -> GradSampler:
        a, b = keep(self.a, -1, block.columns), keep(self.b, -1, block.rows)
        if a.shape[1] == 1:
            return Outer(a.squeeze(1), b.squeeze(1), space)
        return SequenceOuter(a, b, space)

    def explicit(self, span: slice) -> Tensor:
        a, b = self.a[span], self.b[span].transpose(1, 2)
        room = self.space.result((len(a), b.shape[1], a.shape[2]), a, span)
        return torch.bmm(b, a, out=room).flatten(1)

    def by_unit(self, units: Tensor, places: UnitPlaces | None) -> GradSampler | None:
        if places is None:
            return None
        a, b = (places.beside(values).flatten(1, 2) for values in (self.a, self.b))
        return SequenceOuter(a, b, self.space)

    def has_ghost_norm(self, metric: Metric) -> bool:
        t, i, o = self.a.shape[1], self.a.shape[2], self.b.shape[2]
        return metric.is_identity and pays(t * t * (i + o), t, i * o)

    def squared_norms(self, metric: Metric) -> Tensor:
        return self._measured.squared

    def add_weighted_sum(self, factors: Tensor, total: Tensor, metric: Metric) -> None:
        together = self._measured.together(factors)
        a, b = silence(together, self.a, self.b)
        for span in summed(len(a), a.shape[1]):
            scaled = b[span] * together[span].to(b).reshape(-1, 1, 1)
            add_to(total, scaled.flatten(0, 1).T @ a[span].flatten(0, 1))
        for example in self._measured.alone:
            total += factors[example] * self._formed(example).flatten()

    @functools.cached_property
    def _measured(self) -> GhostNorms:
        return measure(self._grams(), self._formed, exact=self.a.dtype == torch.float64)

    def _grams(self) -> Iterator[tuple[Tensor, Tensor]]:
        t, i, o = self.a.shape[1], self.a.shape[2], self.b.shape[2]
        for span in cached(len(self.a), t * (i + o)):
            a, b = self.space.wide("a", self.a[span]), self.space.wide("b", self.b[span])
            yield torch.bmm(a, a.transpose(1, 2)), torch.bmm(b, b.transpose(1, 2))

    def _formed(self, example: int) -> Tensor:
        return self.b[example].double().T @ self.a[example].double()


def _factor_norms(rows: Tensor) -> Tensor:
    """Squared norms of factors: so many squares PyTorch's own sums over several lanes are exact enough for."""
    if rows.shape[1] > WIDE_FACTOR:
        return squared_norms_of(rows)
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1).double().square()
    return norms


def pays(products: int, positions: int, block: int) -> bool:
    """Whether Gram matrices of so many products cost less than forming a block's gradients; by shapes alone."""
    again = positions / 2 if block > LARGE_BLOCK else 0.0
    return block >= LEAST_BLOCK and products <= (FORMING + again) * block


@dataclass(frozen=True, slots=True, eq=False)
class GhostNorms:
    """Squared norms [n], and the examples whose gradients are summed alone. Private."""

    squared: Tensor
    alone: list[int]

    def together(self, factors: Tensor) -> Tensor:
        if not self.alone:
            return factors
        return factors.index_fill(0, torch.tensor(self.alone, device=factors.device), 0)


def measure(grams: Iterable[tuple[Tensor, Tensor]], form: Callable[[int], Tensor], exact: bool) -> GhostNorms:
    """Squared norms from Gram matrices [n, t, t] of inputs and output gradients; `exact` ones are never extreme."""
    squares, terms, extremes = [], [], []
    for a, b in grams:
        squares.append((a * b).sum((1, 2)))
        sizes = [gram.diagonal(dim1=1, dim2=2) for gram in (a, b)]
        terms.append((sizes[0] * sizes[1]).sqrt().sum(1))
        extremes.append((torch.maximum(*sizes) > EXTREME**2).any(1))
    squared, largest = torch.cat(squares), torch.cat(terms)
    alone = (largest.square() > MOST_TERMS**2 * squared).nonzero().squeeze(1).tolist()
    for example in alone:
        squared[example] = form(example).square().sum()
    if not exact:
        squared.masked_fill_(torch.cat(extremes), torch.inf)
    return GhostNorms(squared, alone)


def cached(examples: int, scalars: int) -> list[slice]:
    """Samples of so many scalars each, as many at a time as stay in the cache in float64."""
    return spans(examples, WIDE_BYTES // (8 * max(scalars, 1)))


def summed(examples: int, positions: int) -> list[slice]:
    """Samples of so many positions each, as many at a time as may be summed in float32."""
    return spans(examples, min(MOST_SUMMED, MOST_POSITIONS // max(positions, 1)))


def inner_products(a: Tensor, rows: Tensor) -> Tensor:
    """`a @ rows.T`, [n, i] by [o, i] to [n, o]."""
    slices = a.shape[0] // SLICE
    if slices < 2 or not _fits(a, rows.shape[0]):
        return a @ rows.T
    whole = slices * SLICE
    parts = a[:whole].view(slices, SLICE, -1).transpose(1, 2)
    products = torch.bmm(rows.expand(slices, -1, -1), parts).transpose(1, 2).reshape(whole, -1)
    return products if whole == a.shape[0] else torch.cat([products, a[whole:] @ rows.T])


def outer_sum(b: Tensor, a: Tensor) -> Tensor:
    """`b.T @ a`, [n, o] by [n, i] to [o, i]; slices are added up in float64."""
    slices = a.shape[0] // SLICE
    if slices < 2 or not _fits(a, b.shape[1]):
        return b.T @ a
    whole = slices * SLICE
    left = b[:whole].reshape(slices, SLICE, -1).transpose(1, 2)
    total = torch.bmm(left, a[:whole].view(slices, SLICE, -1)).sum(0, dtype=torch.float64)
    return total if whole == a.shape[0] else total.add_(b[whole:].T @ a[whole:])


def _fits(a: Tensor, outputs: int) -> bool:
    return (
        a.device.type == "cpu" and a.shape[1] >= WIDE_INPUT and outputs <= FEW_OUTPUTS and a.is_contiguous()
    )
