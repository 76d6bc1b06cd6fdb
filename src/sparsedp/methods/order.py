"""An order of what is ranked, best first, from which supports are cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsedp.parameters import Slot


@dataclass(frozen=True, slots=True)
class TableRows:
    """The rows of some parameters, numbered through: all of the first one's, then the next one's."""

    slots: tuple[Slot, ...]

    @property
    def counts(self) -> list[int]:
        """How many rows each has."""
        return [slot.shape[0] if slot.shape else 1 for slot in self.slots]

    @property
    def total(self) -> int:
        """How many there are in all."""
        return sum(self.counts)

    def spans(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The first coordinate of each row, and how many it has."""
        firsts = _before(self.counts)
        widths = torch.tensor(
            [slot.size // max(1, count) for slot, count in zip(self.slots, self.counts, strict=True)],
            dtype=torch.int64,
        )
        offsets = torch.tensor([slot.offset for slot in self.slots], dtype=torch.int64)
        table = torch.searchsorted(firsts, rows, right=True) - 1
        return offsets[table] + (rows - firsts[table]) * widths[table], widths[table]


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """Coordinates, best first; or rows of tables, which are made coordinates only as far as they are needed.

    Rows are taken whole until one no longer fits, and what is left of a count goes to the first of that one.
    """

    items: Tensor
    rows: TableRows | None = None

    def first(self, count: int) -> Tensor:
        """The first `count` coordinates."""
        if self.rows is None:
            return self.items[:count]
        starts, widths = self.rows.spans(self.items[: self._taken(count)])
        within = torch.arange(int(widths.sum())) - torch.repeat_interleave(_before(widths.tolist()), widths)
        return (torch.repeat_interleave(starts, widths) + within)[:count]

    def prefix(self, count: int) -> Order:
        """The part of it that `first` needs for at most so many coordinates; the rest need not be kept."""
        return Order(self.items[: self._taken(count)].clone(), self.rows)

    def _taken(self, count: int) -> int:
        """How many items hold the first `count` coordinates."""
        if self.rows is None:
            return count
        widths = self.rows.spans(self.items)[1]
        return int(torch.searchsorted(torch.cumsum(widths, 0), count)) + 1


def _before(sizes: Sequence[int]) -> Tensor:
    """What comes before each: 0, the first, the first two, ..."""
    ends = torch.tensor(list(sizes), dtype=torch.int64).cumsum(0)
    return torch.cat([torch.zeros(1, dtype=torch.int64), ends])[:-1]
