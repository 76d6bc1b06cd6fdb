"""Parameters by name or structure, and orders of their coordinates, rows or both, best first."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from sparsedp.errors import SparseDPError
from sparsedp.parameters import ParameterLayout, ParameterSlice, Support
from sparsedp.randomness import PublicRandomness

logger = logging.getLogger("sparsedp")

HEAD, BIAS, NORMS, EMBEDDINGS, DENSE = ("head", "bias", "norms", "embeddings", "dense")
"""Words for structure: the module registered last, every bias (`bias`, `in_proj_bias`, `bias_hh_l0`), normalisation
layers, embedding tables, all that is no table."""

Names = tuple[str, ...]
"""Patterns of parameter names, such as "encoder.*", and words for structure."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A model's parameters by the part they take.

    Attributes:
        scope: those that take part at all; the others are frozen.
        always: those of them that are active in any case.
        ranked: the rest of them, of which the best are active.
    """

    layout: ParameterLayout
    scope: tuple[ParameterSlice, ...]
    always: tuple[ParameterSlice, ...]
    ranked: tuple[ParameterSlice, ...]

    @classmethod
    def of(cls, layout: ParameterLayout, scope: Names, always: Names) -> Parts:
        """Sort the parameters; no scope means all of them."""
        inside = find(layout, scope, "scope") if scope else layout.slots
        if scope and size_of(inside) == 0:
            raise SparseDPError(
                f"scope: got {scope}, which fits none of the parameters {_some(layout)}; name a part that the model "
                "has, or leave it out"
            )
        found = find(layout, always, "always")
        kept = tuple(slot for slot in inside if slot in found)
        parts = cls(layout, inside, kept, tuple(slot for slot in inside if slot not in found))
        if HEAD in always:
            parts.head_support()
        return parts

    def all_support(self) -> Support:
        """Everything that takes part."""
        if len(self.scope) == len(self.layout.slots):
            return Support.full(self.layout.dimension)
        return Support(coordinates(self.scope), self.layout.dimension)

    def head_support(self) -> Support:
        """The head, as far as it takes part."""
        head = find(self.layout, (HEAD,), "head")
        inside = [slot for slot in head if slot in self.scope]
        if not inside:
            raise SparseDPError(
                f"got the head as always active or as a stage of its own, that is {_some(head)}, and a scope of "
                f'{_some(self.scope)} without any of it; add "{HEAD}" to scope, or leave that part out'
            )
        return Support(coordinates(inside), self.layout.dimension)

    def support_with(self, best: Tensor) -> Support:
        """What is active in any case, and the best of the rest."""
        return Support(torch.cat([coordinates(self.always), best]), self.layout.dimension)

    def check_tables(self, who: str) -> None:
        """Refuse to rank rows of what is no embedding table."""
        others = [slot.name for slot in self.ranked if not slot.table]
        if others:
            raise SparseDPError(
                f"{who}: it ranks rows of embedding tables, and {others[:6]} are none; give "
                'always=("dense",), or a scope without them'
            )
        if not self.ranked:
            logger.warning(
                "%s: the model has no embedding table, so there is nothing to select; all stays active", who
            )

    def among_ranked(self, order: Tensor) -> Tensor:
        """An order of all coordinates, without those that are not ranked."""
        if len(self.ranked) == len(self.layout.slots):
            return order
        mask = torch.zeros(self.layout.dimension, dtype=torch.bool)
        for slot in self.ranked:
            mask[slot.span] = True
        return order[mask[order]]


def find(layout: ParameterLayout, names: Names, what: str) -> tuple[ParameterSlice, ...]:
    """The parameters that any of the names means, in layout order; a word may mean none, a pattern may not."""
    last = _module(layout.slots[-1])
    means = {
        HEAD: lambda slot: _module(slot) == last,
        BIAS: lambda slot: BIAS in slot.name.rpartition(".")[2],
        NORMS: lambda slot: slot.norm,
        EMBEDDINGS: lambda slot: slot.table,
        DENSE: lambda slot: not slot.table,
    }
    chosen: set[str] = set()
    for name in names:
        fits = means.get(name, lambda slot, name=name: fnmatchcase(slot.name, name))
        found = {slot.name for slot in layout if fits(slot)}
        if not found and name not in means:
            raise SparseDPError(
                f"{what}: got {name!r}, which fits none of the parameters {_some(layout)}; expected a pattern of "
                f"names, or one of {', '.join(means)}"
            )
        chosen |= found
    return tuple(slot for slot in layout if slot.name in chosen)


def coordinates(slots: Iterable[ParameterSlice]) -> Tensor:
    """The flat indices of some parameters."""
    spans = [torch.arange(slot.span.start, slot.span.stop) for slot in slots]
    return torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)


def size_of(slots: Iterable[ParameterSlice]) -> int:
    """How many scalars some parameters have."""
    return sum(slot.size for slot in slots)


def _module(slot: ParameterSlice) -> str:
    return slot.name.rpartition(".")[0]


def _some(slots: Iterable[ParameterSlice]) -> list[str]:
    """The names of the first of them, for a message."""
    return [slot.name for slot in slots][:20]


class Granularity(Enum):
    """What is ranked."""

    COORDINATES = "coordinates"
    ROWS = "rows"


_MEMBER_ORDER, _GROUP_ORDER = 0, 1


def order_by_score(scores: Tensor, layout: ParameterLayout, granularity: Granularity) -> Tensor:
    """All coordinates, best first."""
    if scores.shape != (layout.dimension,) or bool(scores.isnan().any()):
        raise SparseDPError(
            f"scores: got {scores}, expected d={layout.dimension} numbers, none NaN; look for diverged training"
        )
    members = _descending(scores)
    groups = group_ids(layout, granularity)
    if groups is None:
        return members
    totals = torch.zeros(int(groups[-1]) + 1, dtype=torch.float64).index_add_(0, groups, scores.double())
    means = totals / torch.bincount(groups)
    return _by_group(members, groups, _descending(means))


def random_order(
    public: PublicRandomness, key: tuple[int, ...], layout: ParameterLayout, granularity: Granularity
) -> Tensor:
    """All coordinates in random order, group by group; every order of the groups is equally likely."""
    members = public.permutation(layout.dimension, (_MEMBER_ORDER, *key))
    groups = group_ids(layout, granularity)
    if groups is None:
        return members
    return _by_group(members, groups, public.permutation(int(groups[-1]) + 1, (_GROUP_ORDER, *key)))


def group_ids(layout: ParameterLayout, granularity: Granularity) -> Tensor | None:
    """The group 0, 1, ... of each coordinate, in layout order; None when each is its own group."""
    if granularity is Granularity.COORDINATES:
        return None
    rows = TableRows(tuple(slot for slot in layout if slot.size))
    return torch.repeat_interleave(torch.arange(rows.total), rows.spans(torch.arange(rows.total))[1])


def _by_group(members: Tensor, groups: Tensor, group_order: Tensor) -> Tensor:
    """Members sorted by their group's place, keeping their own order inside a group."""
    place = torch.empty_like(group_order)
    place[group_order] = torch.arange(group_order.numel())
    return members[torch.sort(place[groups[members]], stable=True).indices]


def _descending(values: Tensor) -> Tensor:
    return torch.sort(values, descending=True, stable=True).indices


@dataclass(frozen=True, slots=True)
class TableRows:
    """The rows of some parameters, numbered through: all of the first one's, then the next one's.

    A row is an entry of the first axis: an output unit, a filter, a row of a table, an entry of a bias.
    """

    slots: tuple[ParameterSlice, ...]

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
