"""Grad samplers: the per-example gradients of one parameter, in a form that need not hold them all at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, final

import torch
from torch import Tensor

from sparsedp.grad_sample.blocks import Metric

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
    """A unit's examples side by side: as many places for each unit as the largest has examples; zeros in the rest.

    `places` numbers the place of each example; None where every place has its example.
    """

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
        """[examples, ...] as [units, places, ...]."""
        if self.places is not None:
            room = values.new_zeros(self.units * self.most, *values.shape[1:])
            values = room.index_copy_(0, self.places, values)
        return values.reshape(self.units, self.most, *values.shape[1:])


class GradSampler:
    """Per-example gradients of one parameter's block over one chunk of examples. Private.

    Explicit gradients come in planes, [planes, examples, scalars], whatever order is cheapest to produce; `to_planes`
    and `from_planes` translate a tensor of the block's shape to [planes, scalars] and back. Some kinds have ghost
    norms: formulas for norms and sums, so that explicit gradients are not formed.
    """

    __slots__ = ()

    @property
    def block_size(self) -> int:
        """Scalars per example in explicit form."""
        raise NotImplementedError

    def explicit(self, span: slice) -> Tensor:
        """The gradients of some examples, [planes, examples, scalars]; the caller may overwrite them."""
        raise NotImplementedError

    def to_planes(self, block: Tensor) -> Tensor:
        """A block-shaped tensor in plane order."""
        return block.reshape(1, -1)

    def from_planes(self, planes: Tensor) -> Tensor:
        """A tensor in plane order back in block order (flat or shaped)."""
        return planes

    def in_block_order(self, span: slice) -> Tensor:
        """Explicit gradients as one plane in the block's own order."""
        planes = self.explicit(span)
        if planes.shape[0] == 1:
            return planes
        rows = [self.from_planes(planes[:, i]).reshape(-1) for i in range(planes.shape[1])]
        return torch.stack(rows).unsqueeze(0)

    def joined(self, others: Sequence[GradSampler]) -> GradSampler | None:
        """With what the parameter's other uses contribute, where that keeps the ghost norms."""
        return None if others else self

    def by_unit(self, units: Tensor, places: UnitPlaces | None) -> GradSampler | None:
        """With units for examples, where no example's gradient need be formed for it."""
        return None

    def has_ghost_norm(self, metric: Metric) -> bool:
        """Whether formulas serve this metric and cost less than explicit gradients; by shapes alone."""
        return False

    def squared_norms(self, metric: Metric) -> Tensor:
        """Squared norms in the metric, one per example.

        Not finite where the example's gradient is not finite, or too extreme to measure in its dtype.
        """
        raise NotImplementedError

    def add_weighted_sum(self, factors: Tensor, total: Tensor, metric: Metric) -> None:
        """Add the factor-weighted sum over examples of the raw gradients to a flat float64 total.

        A zero factor silences even a NaN. Where the metric has a centre, it will be subtracted: the sum must then be
        exact enough to survive the cancellation.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class Explicit(GradSampler):
    """Small parameters (biases, norm weights): the gradients themselves, [examples, *block shape]."""

    values: Tensor

    @property
    def block_size(self) -> int:
        """Scalars per example."""
        return self.values[0].numel()

    def explicit(self, span: slice) -> Tensor:
        """The gradients of some examples, never in half precision: norms, factors and sums are made of them."""
        return working(self.values[span]).reshape(1, -1, self.block_size).clone()


def silence(factors: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    """Zero the examples whose factor is zero, so that 0 * NaN cannot appear; free when there are none."""
    quiet = factors == 0
    if not bool(quiet.any()):
        return values
    return tuple(each.masked_fill(quiet.reshape(-1, *[1] * (each.dim() - 1)), 0) for each in values)


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
