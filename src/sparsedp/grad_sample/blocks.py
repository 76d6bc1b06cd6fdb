"""The active part of each parameter: what the fast engine computes, and how it maps back to the support."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsedp.clipping import Geometry, Identity
from sparsedp.parameters import Layout, Slot, Support

DENSE_ENOUGH = 0.7
"""Rows or columns are dropped when at most this share of them is active; above, the copy costs more than it saves."""


@dataclass(frozen=True, eq=False)
class Block:
    """One parameter restricted to the rows and columns that hold an active coordinate.

    `shape` is the block's own shape, `row_count` the parameter's number of rows, `places` the flat positions of the
    active coordinates inside the block, in the order of the support (None when all are active), and `span` the slice
    of the support's k-vector they fill.
    """

    shape: tuple[int, ...]
    row_count: int
    rows: Tensor | None
    columns: Tensor | None
    places: Tensor | None
    span: slice
    device: torch.device

    @property
    def size(self) -> int:
        """Scalars in the block."""
        return math.prod(self.shape)

    @property
    def active_count(self) -> int:
        """Active coordinates in the block."""
        count: int = self.span.stop - self.span.start
        return count

    def active(self, flat: Tensor) -> Tensor:
        """The active entries of the last axis of flat blocks, in the order of the support."""
        return flat if self.places is None else flat[..., self.places]

    @functools.cached_property
    def place_of_row(self) -> Tensor | None:
        """For every row of the parameter its place in the block, -1 for dropped ones; None when none are.

        The one thing that is as long as a table has rows: made once per support, then only looked up.
        """
        if self.rows is None:
            return None
        lookup = torch.full((self.row_count,), -1, dtype=torch.int32, device=self.device)
        lookup[self.rows] = torch.arange(self.rows.numel(), dtype=torch.int32, device=self.device)
        return lookup


@dataclass(frozen=True, eq=False)
class Metric:
    """How a block's gradients are measured: z = (g - centre) * weight, zero off the support.

    `weight` None means the identity on a fully active block; `centre` None means zero.
    """

    weight: Tensor | None
    centre: Tensor | None

    @property
    def is_identity(self) -> bool:
        """Whether z is g."""
        return self.weight is None and self.centre is None

    @functools.cached_property
    def squared_weight(self) -> Tensor:
        """The squared weight."""
        assert self.weight is not None
        return self.weight.square()

    @functools.cached_property
    def squared_rows(self) -> Tensor:
        """The squared weight as a matrix, with one to four rows of ones below: products like a multiple of four."""
        assert self.weight is not None
        return torch.cat(
            [self.squared_weight, self.weight.new_ones(4 - len(self.weight) % 4, self.weight.shape[1])]
        )

    def squared_constant(self) -> float:
        """The squared norm of a zero gradient in this metric."""
        if self.centre is None or self.weight is None:
            return 0.0
        return float((self.centre.double() * self.weight.double()).square().sum())

    def apply_(self, gradients: Tensor) -> Tensor:
        """Raw gradients to z, in place."""
        if self.centre is not None:
            gradients.sub_(self.centre)
        return gradients if self.weight is None else gradients.mul_(self.weight)

    def apply_to_sum(self, total: Tensor, factor_sum: Tensor) -> Tensor:
        """The clipped sum of z from the factor-weighted sum of raw gradients."""
        if self.centre is not None:
            total = total - factor_sum * self.centre.reshape(total.shape).to(total.dtype)
        return total if self.weight is None else total * self.weight.reshape(total.shape)


def make_blocks(layout: Layout, support: Support, device: torch.device) -> dict[str, Block]:
    """The blocks of every parameter with an active coordinate."""
    blocks: dict[str, Block] = {}
    filled = 0
    if support.is_full:
        for slot in layout:
            if slot.size:
                span = slice(filled, filled + slot.size)
                blocks[slot.name] = Block(slot.shape, _row_count(slot), None, None, None, span, device)
            filled += slot.size
        return blocks
    split = support.split(layout)
    for slot in layout:
        active = split[slot.name].to(device)
        if count := active.numel():
            span = slice(filled, filled + count)
            blocks[slot.name] = _make_block(slot, active, span)
        filled += count
    return blocks


def _make_block(slot: Slot, active: Tensor, span: slice) -> Block:
    """The block of sorted flat positions; costs their number, whatever the parameter's size."""
    if active.numel() == slot.size:
        return Block(slot.shape, _row_count(slot), None, None, None, span, active.device)
    shape = list(slot.shape)
    kept: list[Tensor | None] = [None, None]
    places = [active] if not shape else list(torch.unravel_index(active, slot.shape))
    for axis in range(min(2, len(shape))):
        kept[axis], shape[axis], places[axis] = _active_slices(places[axis], shape[axis])
    flat = places[0]
    for place, length in zip(places[1:], shape[1:], strict=True):
        flat = flat * length + place
    inside = None if flat.numel() == math.prod(shape) else flat
    rows, columns = kept
    return Block(tuple(shape), _row_count(slot), rows, columns, inside, span, active.device)


def _row_count(slot: Slot) -> int:
    return slot.shape[0] if slot.shape else 1


def _active_slices(places: Tensor, length: int) -> tuple[Tensor | None, int, Tensor]:
    """Along one axis: which slices to keep (None: all), how many those are, and the places among them."""
    active, within = torch.unique(places, return_inverse=True)
    if active.numel() > DENSE_ENOUGH * length:
        return None, length, places
    return active, active.numel(), within


class Metrics:
    """Each block's metric for one support and geometry, in block order and in plane order."""

    def __init__(self, blocks: Mapping[str, Block], geometry: Geometry, dtype: torch.dtype) -> None:
        self._by_block = {name: _make_metric(block, geometry, dtype) for name, block in blocks.items()}
        self._by_plane: dict[tuple[str, int], Metric] = {}

    def of(self, name: str) -> Metric:
        """The metric in the block's own shape."""
        return self._by_block[name]

    def in_planes(self, name: str, planes: int, to_planes: Callable[[Tensor], Tensor]) -> Metric:
        """The metric as [planes, 1, scalars], made once for each order, which the number of planes tells."""
        if (name, planes) not in self._by_plane:
            metric = self._by_block[name]
            self._by_plane[name, planes] = Metric(
                None if metric.weight is None else to_planes(metric.weight).unsqueeze(1),
                None if metric.centre is None else to_planes(metric.centre).unsqueeze(1),
            )
        return self._by_plane[name, planes]


def _make_metric(block: Block, geometry: Geometry, dtype: torch.dtype) -> Metric:
    if isinstance(geometry, Identity):
        if block.places is None:
            return Metric(None, None)
        return Metric(_fill(block, torch.ones(block.active_count), dtype), None)
    inverse_scale = geometry.scale[block.span].reciprocal()
    return Metric(_fill(block, inverse_scale, dtype), _fill(block, geometry.centre[block.span], dtype))


def _fill(block: Block, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values on the active coordinates as a block, zero elsewhere."""
    if block.places is None:
        return values.to(block.device, dtype).reshape(block.shape)
    flat = torch.zeros(block.size, dtype=dtype, device=block.device)
    flat[block.places] = values.to(flat)
    return flat.reshape(block.shape)
