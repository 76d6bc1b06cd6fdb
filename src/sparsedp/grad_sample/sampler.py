"""Grad samplers: the per-example gradients of one parameter's block, in a form that need not hold them all at once.

A block is the part of a parameter that holds active coordinates; a metric says how its gradients are measured.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self, final

import torch
from torch import Tensor

from sparsedp.clipping import Geometry, Identity
from sparsedp.parameters import ParameterLayout, ParameterSlice, Support

DENSE_ENOUGH = 0.7
"""Rows or columns are dropped when at most this share of them is active; above, the copy costs more than it saves."""


@dataclass(frozen=True, eq=False)
class Block:
    """One parameter restricted to the rows and columns that hold an active coordinate (None: all of them).

    `places` are the flat positions of the active coordinates inside the block, in the order of the support (None: all
    are active), and `span` is the slice of the support's k-vector they fill.
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
        return math.prod(self.shape)

    @property
    def active_count(self) -> int:
        return len(range(self.span.start, self.span.stop))

    def active(self, flat: Tensor) -> Tensor:
        return flat if self.places is None else flat[..., self.places]

    @functools.cached_property
    def place_of_row(self) -> Tensor | None:
        """For every row of the parameter its place in the block, -1 for dropped ones; None when none are."""
        if self.rows is None:
            return None
        lookup = torch.full((self.row_count,), -1, dtype=torch.int32, device=self.device)
        lookup[self.rows] = torch.arange(self.rows.numel(), dtype=torch.int32, device=self.device)
        return lookup


@dataclass(frozen=True, eq=False)
class Metric:
    """How gradients are measured: z = (g - centre) * weight, zero off the support; None: weight 1, centre 0."""

    weight: Tensor | None
    centre: Tensor | None

    @property
    def is_identity(self) -> bool:
        return self.weight is None and self.centre is None

    @functools.cached_property
    def squared_rows(self) -> Tensor:
        """The squared weight as a matrix, with one to four rows of ones below: products like a multiple of four."""
        assert self.weight is not None
        ones = self.weight.new_ones(4 - len(self.weight) % 4, self.weight.shape[1])
        return torch.cat([self.weight.square(), ones])

    def squared_constant(self) -> float:
        if self.centre is None or self.weight is None:
            return 0.0
        return float((self.centre.double() * self.weight.double()).square().sum())

    def apply_(self, gradients: Tensor) -> Tensor:
        if self.centre is not None:
            gradients.sub_(self.centre.reshape(-1))
        return gradients if self.weight is None else gradients.mul_(self.weight.reshape(-1))

    def apply_to_sum(self, total: Tensor, factor_sum: Tensor) -> Tensor:
        """The clipped sum of z from the factor-weighted sum of raw gradients."""
        if self.centre is not None:
            total = total - factor_sum * self.centre.reshape(-1).to(total.dtype)
        return total if self.weight is None else total * self.weight.reshape(-1)


def make_blocks(layout: ParameterLayout, support: Support, device: torch.device) -> dict[str, Block]:
    """The blocks of every parameter with an active coordinate."""
    blocks: dict[str, Block] = {}
    filled = 0
    split = None if support.is_full else support.split(layout)
    for slot in layout:
        active = None if split is None else split[slot.name].to(device)
        count = slot.size if active is None else active.numel()
        if count:
            blocks[slot.name] = _make_block(slot, active, slice(filled, filled + count), device)
        filled += count
    return blocks


def _make_block(slot: ParameterSlice, active: Tensor | None, span: slice, device: torch.device) -> Block:
    """The block of sorted flat positions (None: all); costs their number, whatever the parameter's size."""
    row_count = slot.shape[0] if slot.shape else 1
    if active is None or active.numel() == slot.size:
        return Block(slot.shape, row_count, None, None, None, span, device)
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
    return Block(tuple(shape), row_count, rows, columns, inside, span, device)


def _active_slices(places: Tensor, length: int) -> tuple[Tensor | None, int, Tensor]:
    """Along one axis: which slices to keep (None: all), how many those are, and the places among them."""
    active, within = torch.unique(places, return_inverse=True)
    if active.numel() > DENSE_ENOUGH * length:
        return None, length, places
    return active, active.numel(), within


def make_metrics(blocks: Mapping[str, Block], geometry: Geometry, dtype: torch.dtype) -> dict[str, Metric]:
    """How every block's gradients are measured in a geometry."""
    return {name: _make_metric(block, geometry, dtype) for name, block in blocks.items()}


def _make_metric(block: Block, geometry: Geometry, dtype: torch.dtype) -> Metric:
    if isinstance(geometry, Identity):
        if block.places is None:
            return Metric(None, None)
        return Metric(_fill(block, torch.ones(block.active_count), dtype), None)
    inverse_scale = geometry.scale[block.span].reciprocal()
    return Metric(_fill(block, inverse_scale, dtype), _fill(block, geometry.centre[block.span], dtype))


def _fill(block: Block, values: Tensor, dtype: torch.dtype) -> Tensor:
    if block.places is None:
        return values.to(block.device, dtype).reshape(block.shape)
    flat = torch.zeros(block.size, dtype=dtype, device=block.device)
    flat[block.places] = values.to(flat)
    return flat.reshape(block.shape)


STRETCH = 1024
"""Scalars summed in float32 before the sum goes on in float64."""
MOST_SUMMED = 1024
"""Examples summed in float32 before the sum goes on in float64."""
AT_ONCE = 1 << 18
"""Scalars that are turned into float64 at a time."""
MOST_PADDING = 2
"""Times as many places as examples: where units differ more in size, they are left as they are."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class UnitPlaces:
    """A unit's examples side by side, in as many `places` as the largest has (None: all are filled), then zeros."""

    units: int
    most: int
    places: Tensor | None

    @classmethod
    def of(cls, units: Tensor) -> Self | None:
        """From the unit of each example (0, 0, 1, 2, 2, ...); None where too many places would be left over."""
        sizes = torch.bincount(units)
        count, most = sizes.numel(), int(sizes.max())
        if count * most == units.numel():
            return cls(count, most, None)
        if count * most > MOST_PADDING * units.numel():
            return None
        within = torch.arange(units.numel(), device=units.device) - (sizes.cumsum(0) - sizes)[units]
        return cls(count, most, units * most + within)

    def beside(self, values: Tensor) -> Tensor:
        if self.places is not None:
            room = values.new_zeros(self.units * self.most, *values.shape[1:])
            values = room.index_copy_(0, self.places, values)
        return values.reshape(self.units, self.most, *values.shape[1:])


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """Named buffers that outlive a chunk, valid until asked for again. Their content is private, never read back."""

    name: str = ""
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def of(self, name: str) -> Workspace:
        return Workspace(name, self.buffers)

    def result(self, shape: tuple[int, ...], like: Tensor, span: slice) -> Tensor:
        """Room for explicit gradients: of all examples the sampler's own, of some shared by all samplers."""
        return self._take(f"{self.name}/result" if span == slice(None) else "some examples", shape, like)

    def part(self, part: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        return self._take(f"{self.name}/{part}", shape, like)

    def framed(self, frame: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Room shared by all that write the same inner part of every example; the frame around it is zero."""
        return self._take(f"framed by {frame} to {shape[1:]}", shape, like)

    def scratch(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        return self._take("scratch", shape, like)

    def wide(self, part: str, values: Tensor) -> Tensor:
        like = torch.empty(0, dtype=torch.float64, device=values.device)
        return self._take(f"wide {part}", tuple(values.shape), like).copy_(values)

    def _take(self, key: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        size, buffer = math.prod(shape), self.buffers.get(key)
        kind = (like.dtype, like.device)
        if buffer is None or buffer.numel() < size or (buffer.dtype, buffer.device) != kind:
            buffer = self.buffers[key] = like.new_zeros(size)
        return buffer[:size].view(shape)


class GradSampler:
    """Per-example gradients of one parameter's block over one chunk of examples. Private.

    Some kinds have ghost norms: formulas for norms and sums, so that explicit gradients are not formed. Some are made
    for whole tensors first: `dense` forms all, in the tensor's shape, and `restricted` gives the same of a block.
    """

    __slots__ = ()

    @property
    def block_size(self) -> int:
        raise NotImplementedError

    def explicit(self, span: slice) -> Tensor:
        """The gradients of some examples, [examples, scalars]; the caller may overwrite them."""
        raise NotImplementedError

    def by_unit(self, units: Tensor, places: UnitPlaces | None) -> GradSampler | None:
        """With units for examples, where no example's gradient need be formed for it."""
        return None

    def has_ghost_norm(self, metric: Metric) -> bool:
        """Whether formulas serve this metric and cost less than explicit gradients; by shapes alone."""
        return False

    def squared_norms(self, metric: Metric) -> Tensor:
        """Squared norms, not finite where a gradient is not, or too extreme to measure in its dtype."""
        raise NotImplementedError

    def add_weighted_sum(self, factors: Tensor, total: Tensor, metric: Metric) -> None:
        """Add the factor-weighted sum over examples of the raw gradients to a flat float64 total.

        A zero factor silences even a NaN. The sum is exact enough for the metric's centre to be subtracted from it.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class Explicit(GradSampler):
    """Small parameters (biases, norm weights): the gradients themselves, [examples, *block shape]."""

    values: Tensor

    @property
    def block_size(self) -> int:
        return self.values[0].numel()

    def dense(self) -> Tensor:
        return self.values

    def restricted(self, block: Block, space: Workspace) -> GradSampler:
        return Explicit(keep(keep(self.values, 1, block.rows), 2, block.columns))

    def explicit(self, span: slice) -> Tensor:
        """Never in half precision: norms, factors and sums are made of them."""
        return working(self.values[span]).reshape(-1, self.block_size).clone()


def spans(count: int, step: int) -> list[slice]:
    """So many at a time, at least one."""
    step = max(step, 1)
    return [slice(start, start + step) for start in range(0, count, step)]


def silence(factors: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    """Zero the examples whose factor is zero, so that 0 * NaN cannot appear; free when there are none."""
    rejected = factors == 0
    if not bool(rejected.any()):
        return values
    return tuple(each.masked_fill(rejected.reshape(-1, *[1] * (each.dim() - 1)), 0) for each in values)


def squared_norms_of(rows: Tensor) -> Tensor:
    """Squared norms along the last axis, in float64.

    Long float32 sums fall short of the truth by more than the clip's margin, so only short stretches are summed so.
    """
    stretches = rows.shape[-1] // STRETCH
    if not stretches:
        alone: Tensor = torch.linalg.vector_norm(rows, dim=-1).double().square()
        return alone
    whole = stretches * STRETCH
    tail = torch.linalg.vector_norm(rows[..., whole:], dim=-1)
    head = torch.linalg.vector_norm(rows[..., :whole].reshape(*rows.shape[:-1], stretches, STRETCH), dim=-1)
    squared: Tensor = head.double().square().sum(-1) + tail.double().square()
    return squared


def add_to(total: Tensor, values: Tensor) -> None:
    """Add to a flat total, a few values at a time: PyTorch copies narrow ones in the total's type first."""
    pairs = zip(torch.split(total, AT_ONCE), torch.split(values.reshape(-1), AT_ONCE), strict=True)
    for part, more in pairs:
        part += more


def keep(tensor: Tensor, axis: int, indices: Tensor | None) -> Tensor:
    """Some slices along an axis (None: all): a view where they stand side by side, else a copy."""
    if indices is None:
        return tensor
    first, count = int(indices[0]), indices.numel()
    if int(indices[-1]) - first + 1 == count:
        return tensor.narrow(axis, first, count)
    return tensor.index_select(axis, indices)


def working(tensor: Tensor) -> Tensor:
    """Half-precision values in float32, all else as it is."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
