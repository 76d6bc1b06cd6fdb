"""The active part of each parameter: what the fast engine computes, and how it maps back to the support."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsedp.core.geometry import Geometry, Identity
from sparsedp.core.layout import Layout, Slot
from sparsedp.core.support import Support

DENSE_ENOUGH = 0.7
"""Rows or columns are dropped when at most this share of them is active; above, the copy costs more than it saves."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """One parameter restricted to the rows and columns that hold an active coordinate.

    `shape` is the block's own shape, `mask` its active coordinates (None when all are), `places` their flat positions
    inside the block, in the order of the support, and `span` the slice of the support's k-vector they fill.
    """

    shape: tuple[int, ...]
    rows: Tensor | None
    columns: Tensor | None
    mask: Tensor | None
    places: Tensor
    span: slice

    @property
    def size(self) -> int:
        """Scalars in the block."""
        return math.prod(self.shape)

    def active(self, flat: Tensor) -> Tensor:
        """The active entries of a flat block, in the order of the support."""
        return flat if self.mask is None else flat[self.places]


@dataclass(frozen=True, eq=False)
class Metric:
    """How a block's gradients are measured: z = (g - centre) * weight, zero off the support.

    `weight` None means the identity on a fully active block; `centre` None means zero.
    """

    weight: Tensor | None
    centre: Tensor | None

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


def make_blocks(
    layout: Layout, support: Support, restrictable: Mapping[str, int], device: torch.device
) -> dict[str, Block]:
    """The blocks of every parameter with an active coordinate.

    `restrictable` says along how many leading axes (0, 1 or 2) a parameter's layer can drop inactive slices.
    """
    mask = support.mask(device)
    blocks: dict[str, Block] = {}
    filled = 0
    for slot in layout:
        active = mask[slot.span]
        count = int(active.sum())
        if count:
            span = slice(filled, filled + count)
            blocks[slot.name] = _make_block(slot, active, restrictable.get(slot.name, 0), span)
        filled += count
    return blocks


def _make_block(slot: Slot, active: Tensor, axes: int, span: slice) -> Block:
    mask = active.reshape(slot.shape)
    if bool(active.all()):
        return Block(slot.shape, None, None, None, torch.arange(slot.size, device=active.device), span)
    rows = _active_slices(mask, 0) if axes >= 1 else None
    if rows is not None:
        mask = mask.index_select(0, rows)
    columns = _active_slices(mask, 1) if axes >= 2 else None
    if columns is not None:
        mask = mask.index_select(1, columns)
    places = mask.reshape(-1).nonzero().reshape(-1)
    full = places.numel() == mask.numel()
    return Block(tuple(mask.shape), rows, columns, None if full else mask, places, span)


def _active_slices(mask: Tensor, axis: int) -> Tensor | None:
    moved = mask.movedim(axis, 0).reshape(mask.shape[axis], -1)
    active = moved.any(dim=1).nonzero().reshape(-1)
    return active if active.numel() <= DENSE_ENOUGH * mask.shape[axis] else None


class Metrics:
    """Each block's metric for one support and geometry, in block order and in plane order."""

    def __init__(self, blocks: Mapping[str, Block], geometry: Geometry, dtype: torch.dtype) -> None:
        self._by_block = {name: _make_metric(block, geometry, dtype) for name, block in blocks.items()}
        self._by_plane: dict[str, Metric] = {}

    def of(self, name: str) -> Metric:
        """The metric in the block's own shape."""
        return self._by_block[name]

    def in_planes(self, name: str, to_planes: Callable[[Tensor], Tensor]) -> Metric:
        """The metric as [planes, 1, scalars]; a parameter's order never changes, so it is made once."""
        if name not in self._by_plane:
            metric = self._by_block[name]
            self._by_plane[name] = Metric(
                None if metric.weight is None else to_planes(metric.weight).unsqueeze(1),
                None if metric.centre is None else to_planes(metric.centre).unsqueeze(1),
            )
        return self._by_plane[name]


def _make_metric(block: Block, geometry: Geometry, dtype: torch.dtype) -> Metric:
    if isinstance(geometry, Identity):
        return Metric(None if block.mask is None else block.mask.to(dtype), None)
    inverse_scale = geometry.scale[block.span].reciprocal()
    return Metric(_fill(block, inverse_scale, dtype), _fill(block, geometry.centre[block.span], dtype))


def _fill(block: Block, values: Tensor, dtype: torch.dtype) -> Tensor:
    flat = torch.zeros(block.size, dtype=dtype, device=block.places.device)
    flat[block.places] = values.to(flat)
    return flat.reshape(block.shape)
