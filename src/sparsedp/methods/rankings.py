"""Rankings: what orders the coordinates, best first, and where each of them gets what it knows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from sparsedp.methods.granularity import Granularity, order_by_score, random_order
from sparsedp.methods.knowledge import Knowledge
from sparsedp.methods.observation import Observation
from sparsedp.methods.order import Order, TableRows
from sparsedp.methods.registry import Registry
from sparsedp.methods.scope import Parts
from sparsedp.randomness import PublicRandomness

RankingState = Mapping[str, Tensor]


class RankedBy(Enum):
    """What a ranking goes by."""

    GRADIENTS = "released gradients"
    TOUCHED_ROWS = "a count of the rows of tables that units touch"
    STEP_ROWS = "a count, in every step, of the rows of tables that its units touch"
    PUBLIC = "nothing private"

    @property
    def counts_rows(self) -> bool:
        """Whether it takes a release of its own, of one number for each row of a table."""
        return self in (RankedBy.TOUCHED_ROWS, RankedBy.STEP_ROWS)

    @property
    def selects(self) -> bool:
        """Whether it takes one release of its own, in a stage that selects."""
        return self is RankedBy.TOUCHED_ROWS


@dataclass(frozen=True, slots=True)
class Place:
    """Where and when a ranking is asked for: all of it public.

    `period` counts from 0 in the main stage; `steps_left` are those of it still to come.
    """

    parts: Parts
    granularity: Granularity
    public: PublicRandomness
    period: int
    known: Knowledge = field(default_factory=Knowledge)
    steps_left: int = 0

    def by_score(self, scores: Tensor) -> Order:
        """What is ranked by falling score of its d coordinates; ties go to the lower index."""
        return Order(self.parts.among_ranked(order_by_score(scores, self.parts.layout, self.granularity)))


class Ranking(Protocol):
    """Gives an order of the coordinates from a state that observations have moved."""

    @property
    def name(self) -> str:
        """What options and reports call it."""
        ...

    @property
    def source(self) -> RankedBy:
        """What it goes by."""
        ...

    def init(self, dimension: int) -> RankingState:
        """The state before any observation."""
        ...

    def update(self, state: RankingState, seen: Observation) -> RankingState:
        """The state after one more step; the old one is left as it is."""
        ...

    def scores(self, state: RankingState) -> Tensor | None:
        """One number per coordinate, larger is better; None for an order without numbers."""
        ...

    def order(self, state: RankingState, place: Place) -> Order:
        """What is ranked, best first."""
        ...


class ByScore(ABC):
    """A ranking by one number per coordinate, from released gradients: a subclass says `init`, `update`, `scores`.

    `scores` is asked for only after at least one `update`.
    """

    __slots__ = ()

    name: str

    @property
    def source(self) -> RankedBy:
        """Released gradients."""
        return RankedBy.GRADIENTS

    @abstractmethod
    def init(self, dimension: int) -> RankingState:
        """The state before any observation."""

    @abstractmethod
    def update(self, state: RankingState, seen: Observation) -> RankingState:
        """The state after one more step; the old one is left as it is."""

    @abstractmethod
    def scores(self, state: RankingState) -> Tensor:
        """One number per coordinate, larger is better."""

    def order(self, state: RankingState, place: Place) -> Order:
        """By falling score; ties go to the lower index."""
        return place.by_score(self.scores(state))


class WithoutScores(ABC):
    """A ranking without a number per coordinate, which learns nothing from gradients; a subclass says `order`."""

    __slots__ = ()

    name: str

    def init(self, dimension: int) -> RankingState:
        """Nothing."""
        return {}

    def update(self, state: RankingState, seen: Observation) -> RankingState:
        """Nothing is learned."""
        return state

    def scores(self, state: RankingState) -> None:
        """Coordinates have none."""
        return

    @abstractmethod
    def order(self, state: RankingState, place: Place) -> Order:
        """What is ranked, best first."""


@dataclass(frozen=True, slots=True)
class RandomOrder(WithoutScores):
    """A fresh public random permutation each time (TP-Rand; RS, Alg. 1 line 5)."""

    name: str = "random"

    @property
    def source(self) -> RankedBy:
        """Chance."""
        return RankedBy.PUBLIC

    def order(self, state: RankingState, place: Place) -> Order:
        """A permutation that the period and the public seed fix."""
        layout, granularity = place.parts.layout, place.granularity
        return Order(
            place.parts.among_ranked(random_order(place.public, (place.period,), layout, granularity))
        )


@dataclass(frozen=True, slots=True)
class Frequency(WithoutScores):
    """Rows of embedding tables by how many units touch them, counted once with noise (DP-FEST, arXiv 2311.08357).

    A unit's touched rows weigh one over the root of their number, so that its vector has norm one: a unit that
    touches many rows says less about each.
    """

    name: str = "frequency"

    @property
    def source(self) -> RankedBy:
        """A release of its own."""
        return RankedBy.TOUCHED_ROWS

    def update(self, state: RankingState, seen: Observation) -> RankingState:
        """Keep the counts; there is one number for each row."""
        return {"counts": seen.gradient}

    def order(self, state: RankingState, place: Place) -> Order:
        """By falling count; ties go to the lower row."""
        counts = state["counts"]
        return Order(torch.sort(counts, descending=True, stable=True).indices, TableRows(place.parts.ranked))


_RANKINGS: Registry[Ranking] = Registry("ranking", "register_ranking")


def register_ranking(ranking: Ranking) -> Ranking:
    """Make a ranking available by name: to `MethodOptions(ranking=...)`, and to plans read from their files."""
    return _RANKINGS.register(ranking)


def get_ranking(name: str) -> Ranking:
    """The ranking of that name."""
    return _RANKINGS.get(name)


def ranking_names() -> list[str]:
    """The names of all rankings."""
    return _RANKINGS.names()


register_ranking(RandomOrder())
register_ranking(Frequency())
