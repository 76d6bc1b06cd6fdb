"""The rows of a unit side by side: what is a sum along a sequence for one sample is a sum over rows for a unit."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol, Self, final, runtime_checkable

import torch
from torch import Tensor

from sparsedp.grad_sample.layers.source import Source

MOST_PADDING = 2
"""Times as many places as rows: where units differ more in size, they are left as they are."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class UnitRows:
    """Places for the rows of units, as many for each as the largest has rows; those left over hold zeros.

    `places` numbers the place of each row; None where every place has its row.
    """

    units: int
    most: int
    places: Tensor | None

    @classmethod
    def of(cls, units: Tensor) -> Self | None:
        """From the unit of each row (0, 0, 1, 2, 2, ...); None where too many places would be left over."""
        sizes = torch.bincount(units)
        count, most = sizes.numel(), int(sizes.max())
        if count * most == units.numel():
            return cls(count, most, None)
        if count * most > MOST_PADDING * units.numel():
            return None
        within = torch.arange(units.numel(), device=units.device) - (sizes.cumsum(0) - sizes)[units]
        return cls(count, most, units * most + within)

    def beside(self, rows: Tensor) -> Tensor:
        """[rows, ...] as [units, places, ...]."""
        if self.places is not None:
            rows = rows.new_zeros(self.units * self.most, *rows.shape[1:]).index_copy_(0, self.places, rows)
        return rows.reshape(self.units, self.most, *rows.shape[1:])


@runtime_checkable
class ByUnit(Protocol):
    """A source that can be had by unit, without its samples' gradients being formed."""

    def by_unit(self, rows: UnitRows) -> Source:
        """With units for samples."""
        ...


@functools.cache
def can_be_by_unit(kind: type) -> bool:
    """Whether sources of this kind can be had by unit; asked once for a kind."""
    return issubclass(kind, ByUnit)
