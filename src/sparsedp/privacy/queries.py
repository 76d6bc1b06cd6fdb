"""Sums of channel statistics over units, bounded unit by unit: what private normalisation releases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from sparsedp.batch import MicroBatch, Rows
from sparsedp.core.clip import Clip, FlatClip
from sparsedp.errors import DataError
from sparsedp.grad_sample.query import mean_by_unit
from sparsedp.privacy.mechanism import Grid

_ROWS_AT_ONCE = 16
"""Few enough for the cache in float64."""


@dataclass(frozen=True, slots=True)
class ClippedRows:
    """The clipped sum of explicit vectors, one per unit: for private feature statistics."""

    rows: Tensor
    clip: Clip

    @property
    def size(self) -> int:
        """The length of a row."""
        return int(self.rows.shape[1])

    @property
    def sensitivity(self) -> float:
        """The clip's."""
        return self.clip.sensitivity

    def parts(self, bound: float) -> Iterator[Tensor]:
        """The clipped sum, in one part; a row that is not finite contributes zero."""
        rows = self.rows.to(torch.float64)
        factors = self.clip.tightened(bound).factors(torch.linalg.vector_norm(rows, dim=1))
        yield factors @ torch.where((factors > 0).unsqueeze(1), rows, torch.zeros_like(rows))


@final
@dataclass(frozen=True, slots=True, eq=False)
class ChannelSum:
    """The clipped sum over units of their channels' means, or of their spreads around a centre.

    A row of shape [channels, ...] gives one number per channel: the mean over its positions, or the root mean square
    of its distance from `centre`. A unit gives the mean over its rows, clipped once.

    **Privacy.** What a unit adds follows from its own rows and the public centre, and is clipped last: adding or
    removing one unit moves the sum by at most the clip norm.
    **Edge cases.** A unit with a number that is not finite adds zero.

    Attributes:
        batches: the units. Private.
        channels: how many the inputs have; public.
        clip: the bound on a unit's vector.
        centre: one public number per channel that is measured; None for the means.
        columns: the channels that are measured; None for all. Public.
    """

    batches: Iterable[MicroBatch]
    channels: int
    clip: Clip
    centre: Tensor | None = None
    columns: Tensor | None = None

    @property
    def size(self) -> int:
        """One number per channel that is measured."""
        return self.channels if self.columns is None else self.columns.numel()

    @property
    def sensitivity(self) -> float:
        """The clip's."""
        return self.clip.sensitivity

    def parts(self, bound: float) -> Iterator[Tensor]:
        """The sum, micro-batch by micro-batch."""
        yield torch.zeros(self.size, dtype=torch.float64)
        for batch in self.batches:
            inputs = inputs_of(batch.rows)
            if inputs.shape[1] != self.channels:
                raise DataError(f"inputs: got {inputs.shape[1]} channels, expected {self.channels}")
            inputs = inputs if self.columns is None else inputs[:, self.columns.to(inputs.device)]
            parts = torch.split(inputs, _ROWS_AT_ONCE)
            values = torch.cat([self._statistic(part.to("cpu", torch.float64)) for part in parts])
            yield from ClippedRows(mean_by_unit(values, batch.units), self.clip).parts(bound)

    def _statistic(self, inputs: Tensor) -> Tensor:
        positions = inputs.unsqueeze(2).flatten(2)
        if self.centre is None:
            return positions.mean(dim=2)
        distances = positions - self.centre.to(positions).unsqueeze(1)
        return distances.square().mean(dim=2).sqrt()


def inputs_of(rows: Rows) -> Tensor:
    """The inputs of a batch: its first tensor.

    Raises:
        DataError: the batch is not (inputs, ...), or the inputs are not real numbers of shape [rows, channels, ...].
    """
    inputs = rows[0] if isinstance(rows, (tuple, list)) and rows else rows
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or inputs.dim() < 2:
        found = (
            f"{inputs.dtype} {tuple(inputs.shape)}" if isinstance(inputs, Tensor) else type(inputs).__name__
        )
        raise DataError(
            f"normalise: got inputs {found}, expected batches of (inputs, ...) with inputs of real numbers and shape "
            "[rows, channels, ...]; leave it out for other data"
        )
    return inputs


@final
@dataclass(frozen=True, slots=True, eq=False)
class TouchedSum:
    """The sum over units of their indicator vectors, each scaled to the clip's norm at most (DP-FEST, Sec. 3.1).

    A unit's vector is 1 for every row that any of its samples touches, however often, and 0 elsewhere.

    **Privacy.** Scaled unit by unit, so adding or removing one moves the sum by at most the clip norm.
    **Edge cases.** A unit that touches nothing, or padding alone, adds zero.

    Attributes:
        batches: the units. Private.
        look: the pairs of unit and row of a batch. Private.
        rows: how many rows there are; public.
        clip: the bound on a unit's vector.
    """

    batches: Iterable[MicroBatch]
    look: Callable[[MicroBatch], tuple[Tensor, Tensor]]
    rows: int
    clip: Clip

    @property
    def size(self) -> int:
        """One number per row."""
        return self.rows

    @property
    def sensitivity(self) -> float:
        """The clip's."""
        return self.clip.sensitivity

    def parts(self, bound: float) -> Iterator[Tensor]:
        """The sum, micro-batch by micro-batch."""
        clip = self.clip.tightened(bound)
        yield torch.zeros(self.rows, dtype=torch.float64)
        for batch in self.batches:
            units, touched = self.look(batch)
            pairs = torch.unique(units * self.rows + touched) if self.rows else touched
            owners, places = pairs // max(1, self.rows), pairs % max(1, self.rows)
            norms = torch.bincount(owners, minlength=1).double().sqrt()
            part = torch.zeros(self.rows, dtype=torch.float64)
            yield part.index_add_(0, places, clip.factors(norms)[owners])


def on_grid(update: Tensor, clip: Clip, grid: Grid) -> Tensor:
    """A client's own part: its update clipped and rounded to the grid, as int64.

    **Edge cases.** An update that is not finite becomes zero.
    """
    values = update.to(torch.float64)
    factor = clip.tightened(grid.bound).factors(torch.linalg.vector_norm(values))
    return (
        (values * factor / grid.step).round_().to(torch.int64)
        if factor > 0
        else values.new_zeros(len(values), dtype=torch.int64)
    )


def is_within(update: Tensor, grid: Grid) -> bool:
    """Whether an update on the grid keeps to its bound, as every client that clips does."""
    return float(torch.linalg.vector_norm(update.to(torch.float64))) * grid.step <= grid.bound


@final
@dataclass(frozen=True, slots=True, eq=False)
class UpdateSum:
    """The sum of clients' updates on the grid, each held to the clip norm here, whatever the client did.

    **Privacy.** Adding or removing one client adds or removes one vector of integers, of norm at most the grid's
    bound. Nothing is rounded after that.

    Attributes:
        updates: one vector of integers a client. Private.
        length: how many numbers each has; public.
        clip: the bound on a client.
        grid: what the integers are multiples of.
    """

    updates: Sequence[Tensor]
    length: int
    clip: FlatClip
    grid: Grid

    @property
    def size(self) -> int:
        """The length of an update."""
        return self.length

    @property
    def sensitivity(self) -> float:
        """The clip's."""
        return self.clip.sensitivity

    def parts(self, bound: float) -> Iterator[Tensor]:
        """The updates one by one: multiples of the grid's step, so that putting them on the grid changes nothing."""
        yield torch.zeros(self.length, dtype=torch.float64)
        for update in self.updates:
            yield self._clipped(update, bound).mul_(self.grid.step)

    def _clipped(self, update: Tensor, bound: float) -> Tensor:
        """An update's integers in float64; one that is too long is shortened, towards zero."""
        steps = update.to(torch.float64)
        norm = torch.linalg.vector_norm(steps) * self.grid.step
        if float(norm) <= bound:
            return steps
        return (steps * self.clip.tightened(bound).factors(norm)).trunc_()
