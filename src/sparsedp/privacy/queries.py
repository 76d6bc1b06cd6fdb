"""Sums over units that know how far one unit can move them: what the mechanism adds noise to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from sparsedp.batch import Batch, MicroBatch
from sparsedp.clipping import ROUNDING_MARGIN, Clip, FlatClip, Geometry, Identity
from sparsedp.errors import DataError
from sparsedp.grad_sample.query import ClippedSumEngine, ClippedSumQuery, mean_per_unit
from sparsedp.parameters import Support

if TYPE_CHECKING:
    from sparsedp.privacy.mechanism import Grid

_ROWS_AT_ONCE = 16  # few enough for the cache in float64


class BoundedSum(ABC):
    """A sum over units, each scaled down to the clip norm: it knows how far one unit can move it."""

    __slots__ = ()

    clip: Clip

    @property
    @abstractmethod
    def size(self) -> int:
        """How many numbers the sum has. Public."""

    @property
    def sensitivity(self) -> float:
        """Largest L2 change when one unit is added or removed."""
        return self.clip.sensitivity

    @property
    def support(self) -> Support:
        """The coordinates the numbers stand for: all there are, unless a query says otherwise."""
        return Support.full(self.size)

    @property
    def geometry(self) -> Geometry:
        """The space the sum is clipped and noised in."""
        return Identity()

    @abstractmethod
    def partial_sums(self, bound: float) -> Iterator[Tensor]:
        """The sum in float64, in one or more parts, clipped so that a unit moves it by at most `bound`. Private.

        Cut by unit: a unit that is added moves a single part, or makes two of it. The parts' memory is the caller's.
        """


@final
@dataclass(frozen=True, slots=True, eq=False)
class GradientSum(BoundedSum):
    """The clipped sum of per-example gradients on a support: mask, standardize, top-r of each example, clip, sum."""

    engine: ClippedSumEngine
    batches: Iterable[MicroBatch]
    query: ClippedSumQuery

    @property
    def clip(self) -> Clip:  # type: ignore[override]
        return self.query.clip

    @property
    def size(self) -> int:
        return self.query.support.size

    @property
    def support(self) -> Support:
        return self.query.support

    @property
    def geometry(self) -> Geometry:
        return self.query.geometry

    def partial_sums(self, bound: float) -> Iterator[Tensor]:
        query = replace(self.query, clip=self.query.clip.tightened(bound))
        empty = True
        for batch in self.batches:
            empty = False
            yield self.engine.clipped_sum([batch], query)
        if empty:
            yield self.engine.clipped_sum([], query)


@final
@dataclass(frozen=True, slots=True, eq=False)
class ClippedVectorSum(BoundedSum):
    """The clipped sum of explicit vectors, one per unit; one that is not finite counts as zero."""

    vectors: Tensor
    clip: Clip

    @property
    def size(self) -> int:
        return int(self.vectors.shape[1])

    def partial_sums(self, bound: float) -> Iterator[Tensor]:
        rows = self.vectors.to(torch.float64)
        factors = self.clip.tightened(bound).factors(torch.linalg.vector_norm(rows, dim=1))
        yield factors @ torch.where((factors > 0).unsqueeze(1), rows, torch.zeros_like(rows))


@final
@dataclass(frozen=True, slots=True, eq=False)
class ChannelStatisticsSum(BoundedSum):
    """The clipped sum over units of their channels' means, or of their spreads around a centre.

    An example of shape [channels, ...] gives one number per channel that is measured (`columns`): the mean over its
    positions, or the root mean square of its distance from `centre`. A unit gives the mean over its examples.

    Formal guarantees:
        What a unit adds follows from its own examples and the public centre, and is clipped last: adding or removing
        one unit moves the sum by at most the clip norm.

    Edge cases:
        A unit with a number that is not finite adds zero.
    """

    batches: Iterable[MicroBatch]
    channels: int
    clip: Clip
    centre: Tensor | None = None
    columns: Tensor | None = None

    @property
    def size(self) -> int:
        return self.channels if self.columns is None else self.columns.numel()

    def partial_sums(self, bound: float) -> Iterator[Tensor]:
        yield torch.zeros(self.size, dtype=torch.float64)
        for batch in self.batches:
            inputs = inputs_of(batch.rows)
            if inputs.shape[1] != self.channels:
                raise DataError(f"inputs: got {inputs.shape[1]} channels, expected {self.channels}")
            inputs = inputs if self.columns is None else inputs[:, self.columns.to(inputs.device)]
            parts = torch.split(inputs, _ROWS_AT_ONCE)
            values = torch.cat([self._statistic(part.to("cpu", torch.float64)) for part in parts])
            yield from ClippedVectorSum(mean_per_unit(values, batch.units), self.clip).partial_sums(bound)

    def _statistic(self, inputs: Tensor) -> Tensor:
        positions = inputs.unsqueeze(2).flatten(2)
        if self.centre is None:
            return positions.mean(dim=2)
        distances = positions - self.centre.to(positions).unsqueeze(1)
        return distances.square().mean(dim=2).sqrt()


@final
@dataclass(frozen=True, slots=True, eq=False)
class RowCountSum(BoundedSum):
    """The sum over units of their indicator vectors, each scaled to the clip norm at most (DP-FEST, Sec. 3.1).

    A unit's vector is 1 for every table row that any of its examples touches (`row_pairs`: unit and row), however
    often, and 0 elsewhere.

    Formal guarantees:
        Scaled unit by unit, so adding or removing one moves the sum by at most the clip norm.
    """

    batches: Iterable[MicroBatch]
    row_pairs: Callable[[MicroBatch], tuple[Tensor, Tensor]]
    rows: int
    clip: Clip

    @property
    def size(self) -> int:
        return self.rows

    def partial_sums(self, bound: float) -> Iterator[Tensor]:
        clip = self.clip.tightened(bound)
        yield torch.zeros(self.rows, dtype=torch.float64)
        for batch in self.batches:
            units, touched = self.row_pairs(batch)
            pairs = torch.unique(units * self.rows + touched) if self.rows else touched
            owners, places = pairs // max(1, self.rows), pairs % max(1, self.rows)
            norms = torch.bincount(owners, minlength=1).double().sqrt()
            part = torch.zeros(self.rows, dtype=torch.float64)
            yield part.index_add_(0, places, clip.factors(norms)[owners])


@final
@dataclass(frozen=True, slots=True, eq=False)
class LossSum(BoundedSum):
    """The sum over units of their loss: the mean over a unit's examples, each clamped to [0, bound].

    Formal guarantees:
        What a unit adds lies in [0, bound] whatever its examples are, less the margin that clips keep for the float
        rounding of what others add. So adding or removing one unit moves the sum by at most the bound.

    Edge cases:
        A loss that is not finite counts as the bound, and not as a small one: a model that diverged shows it.
    """

    losses: Callable[[MicroBatch], Tensor]
    batches: Iterable[MicroBatch]
    clip: FlatClip

    @property
    def size(self) -> int:
        return 1

    def partial_sums(self, bound: float) -> Iterator[Tensor]:
        most = self.clip.tightened(bound).norm / (1 + ROUNDING_MARGIN)
        yield torch.zeros(1, dtype=torch.float64)
        for batch in self.batches:
            if batch.example_count:
                losses = self.losses(batch).detach().to("cpu", torch.float64)
                bounded = torch.where(losses.isfinite(), losses, most).clamp(0.0, most)
                units = None if batch.units is None else batch.units.cpu()
                yield mean_per_unit(bounded, units).sum().reshape(1)


@final
@dataclass(frozen=True, slots=True, eq=False)
class ClientUpdateSum(BoundedSum):
    """The sum of clients' updates on the grid, each held to the clip norm here, whatever the client did.

    Formal guarantees:
        Adding or removing one client adds or removes one vector of integers, of norm at most the grid's bound.
        Nothing is rounded after that.
    """

    updates: Sequence[Tensor]
    support: Support = field()  # field(): over the properties of the base class
    clip: Clip
    grid: Grid
    geometry: Geometry = field()

    @property
    def size(self) -> int:
        return self.support.size

    def partial_sums(self, bound: float) -> Iterator[Tensor]:
        """The updates one by one: multiples of the grid's step, so that putting them on the grid changes nothing."""
        yield torch.zeros(self.size, dtype=torch.float64)
        for update in self.updates:
            yield self._clipped(update, bound).mul_(self.grid.step)

    def _clipped(self, update: Tensor, bound: float) -> Tensor:
        """An update's integers in float64; one that is too long is shortened, towards zero."""
        steps = update.to(torch.float64)
        norm = torch.linalg.vector_norm(steps) * self.grid.step
        if float(norm) <= bound:
            return steps
        return (steps * self.clip.tightened(bound).factors(norm)).trunc_()


def on_grid(update: Tensor, clip: Clip, grid: Grid) -> Tensor:
    """A client's own part: its update clipped and rounded to the grid, as int64; zero if it is not finite."""
    values = update.to(torch.float64)
    factor = clip.tightened(grid.bound).factors(torch.linalg.vector_norm(values))
    scaled = values * factor if factor > 0 else torch.zeros_like(values)
    return scaled.div_(grid.step).round_().to(torch.int64)


def is_within(update: Tensor, grid: Grid) -> bool:
    """Whether an update on the grid keeps to its bound, as every client that clips does."""
    return float(torch.linalg.vector_norm(update.to(torch.float64))) * grid.step <= grid.bound


def inputs_of(rows: Batch) -> Tensor:
    """The inputs of a batch: its first tensor."""
    inputs = rows[0] if isinstance(rows, (tuple, list)) and rows else rows
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or inputs.dim() < 2:
        shaped = isinstance(inputs, Tensor)
        found = f"{inputs.dtype} {tuple(inputs.shape)}" if shaped else type(inputs).__name__
        raise DataError(
            f"normalise: got inputs {found}, expected real numbers of shape [rows, channels, ...]"
        )
    return inputs
