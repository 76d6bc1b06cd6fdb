"""Which parameters take part, by name or structure: public, and fixed before the first release."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from sparsedp.errors import SparseDPError
from sparsedp.parameters import Layout, Slot, Support

logger = logging.getLogger("sparsedp")

HEAD, BIAS, NORMS, LAST, EMBEDDINGS, DENSE = "head", "bias", "norms", "last=", "embeddings", "dense"
"""Words for structure: the module registered last, every bias (`bias`, `in_proj_bias`, `bias_hh_l0`), normalisation
layers, the n modules registered last, embedding tables, all that is no table."""

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

    layout: Layout
    scope: tuple[Slot, ...]
    always: tuple[Slot, ...]
    ranked: tuple[Slot, ...]

    @classmethod
    def of(cls, layout: Layout, scope: Names, always: Names) -> Parts:
        """Sort the parameters; no scope means all of them.

        Raises:
            SparseDPError: a name that no parameter has, a scope that holds nothing, or a head that is always active
                and does not take part.
        """
        inside = find(layout, scope, "scope") if scope else layout.slots
        if scope:
            check_fits(layout, inside, f"scope: got {scope}")
        found = find(layout, always, "always") if always else ()
        for name in always:
            if counts_from_the_end(name):
                _check_inside(find(layout, (name,), "always"), inside, f"always: got {name!r}")
        kept = tuple(slot for slot in inside if slot in found)
        return cls(layout, inside, kept, tuple(slot for slot in inside if slot not in found))

    @property
    def whole(self) -> bool:
        """Whether every parameter is ranked."""
        return len(self.ranked) == len(self.layout.slots)

    @property
    def ranked_size(self) -> int:
        """Scalars that are ranked."""
        return size_of(self.ranked)

    def all_support(self) -> Support:
        """Everything that takes part."""
        if len(self.scope) == len(self.layout.slots):
            return Support.full(self.layout.dimension)
        return Support(coordinates(self.scope), self.layout.dimension)

    def head_support(self) -> Support:
        """The head, as far as it takes part.

        Raises:
            SparseDPError: none of it does, so a stage of the head would be charged and move nothing.
        """
        head = find(self.layout, (HEAD,), "head")
        _check_inside(head, self.scope, "stages: got one of the head alone")
        return Support(coordinates(slot for slot in head if slot in self.scope), self.layout.dimension)

    def support_with(self, best: Tensor) -> Support:
        """What is active in any case, and the best of the rest."""
        return Support(torch.cat([coordinates(self.always), best]), self.layout.dimension)

    def check_tables(self, who: str) -> None:
        """Refuse to rank rows of what is no embedding table.

        Raises:
            SparseDPError: names them.
        """
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
        if self.whole:
            return order
        mask = torch.zeros(self.layout.dimension, dtype=torch.bool)
        for slot in self.ranked:
            mask[slot.span] = True
        return order[mask[order]]


def find(layout: Layout, names: Names, what: str) -> tuple[Slot, ...]:
    """The parameters that any of the names means, in layout order.

    Raises:
        SparseDPError: a pattern that fits no parameter. A word for structure may fit none.
    """
    modules = list(dict.fromkeys(_module(slot) for slot in layout))
    chosen: set[str] = set()
    for name in names:
        if name.startswith(LAST):
            fits = [slot for slot in layout if _module(slot) in modules[-_count(name, what) :]]
        elif name == HEAD:
            fits = [slot for slot in layout if _module(slot) == modules[-1]]
        elif name == BIAS:
            fits = [slot for slot in layout if BIAS in slot.name.rpartition(".")[2]]
        elif name == NORMS:
            fits = [slot for slot in layout if slot.norm]
        elif name in (EMBEDDINGS, DENSE):
            fits = [slot for slot in layout if slot.table == (name == EMBEDDINGS)]
        else:
            fits = [slot for slot in layout if fnmatchcase(slot.name, name)]
            if not fits:
                raise SparseDPError(
                    f"{what}: got {name!r}, which fits none of the parameters {[slot.name for slot in layout][:20]}; "
                    f"expected a pattern of names, or one of {HEAD}, {BIAS}, {NORMS}, {LAST}n, {EMBEDDINGS}, {DENSE}"
                )
        chosen |= {slot.name for slot in fits}
    return tuple(slot for slot in layout if slot.name in chosen)


def counts_from_the_end(name: str) -> bool:
    """Whether a name goes by the order in which modules are registered."""
    return name == HEAD or name.startswith(LAST)


def log_meaning(layout: Layout, names: Names) -> None:
    """Log which parameters the names mean that go by the order in which modules are registered."""
    for name in dict.fromkeys(name for name in names if counts_from_the_end(name)):
        logger.info('"%s" means %s', name, [slot.name for slot in find(layout, (name,), "scope")])


def check_fits(layout: Layout, found: tuple[Slot, ...], got: str) -> None:
    """Refuse names that mean not one coordinate of the model.

    Raises:
        SparseDPError: says what was got, and which parameters there are.
    """
    if size_of(found) == 0:
        raise SparseDPError(
            f"{got}, which fits none of the parameters {[slot.name for slot in layout][:20]}; expected names or "
            "words that fit at least one; name a part that the model has, or leave it out"
        )


def part_sizes(layout: Layout) -> dict[str, int]:
    """How many scalars all parameters have, and of them the head's and the biases."""
    return {"all": layout.dimension} | {word: size_of(find(layout, (word,), "part")) for word in (HEAD, BIAS)}


def coordinates(slots: Iterable[Slot]) -> Tensor:
    """The flat indices of some parameters."""
    spans = [torch.arange(slot.span.start, slot.span.stop) for slot in slots]
    return torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)


def size_of(slots: Iterable[Slot]) -> int:
    """How many scalars some parameters have."""
    return sum(slot.size for slot in slots)


def _check_inside(wanted: tuple[Slot, ...], scope: tuple[Slot, ...], got: str) -> None:
    """Refuse parameters that are asked for and of which none takes part."""
    if not any(slot in scope for slot in wanted):
        names, others = ([slot.name for slot in slots][:6] for slots in (wanted, scope))
        raise SparseDPError(
            f"{got}, that is {names}, and a scope of {others} without any of it; expected some of it in the scope: "
            f'add "{HEAD}" to scope, or leave that part out'
        )


def _module(slot: Slot) -> str:
    return slot.name.rpartition(".")[0]


def _count(name: str, what: str) -> int:
    text = name.removeprefix(LAST)
    if not text.isdecimal() or int(text) < 1:
        raise SparseDPError(f"{what}: got {name!r}, expected {LAST} and how many modules, such as {LAST}2")
    return int(text)
