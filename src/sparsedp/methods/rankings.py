"""Rankings: what orders the coordinates, best first, and where each of them gets what it knows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from torch import Tensor

from sparsedp.core.errors import SparseDPError
from sparsedp.core.layout import Layout
from sparsedp.core.randomness import PublicRandomness
from sparsedp.methods.granularity import Granularity, order_by_score, random_order
from sparsedp.methods.observation import Observation

RankingState = Mapping[str, Tensor]


class Source(Enum):
    """What a ranking goes by."""

    GRADIENTS = "released gradients"
    PUBLIC = "nothing private"


@dataclass(frozen=True, slots=True)
class Place:
    """Where and when a ranking is asked for: all of it public.

    `period` counts from 0 in the main stage.
    """

    layout: Layout
    granularity: Granularity
    public: PublicRandomness
    period: int


class Ranking(Protocol):
    """Gives an order of the coordinates from a state that observations have moved."""

    @property
    def name(self) -> str:
        """What options and reports call it."""
        ...

    @property
    def source(self) -> Source:
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

    def order(self, state: RankingState, place: Place) -> Tensor:
        """All coordinates, best first."""
        ...


class ByScore(ABC):
    """A ranking by one number per coordinate, from released gradients: a subclass says `init`, `update`, `scores`.

    `scores` is asked for only after at least one `update`.
    """

    __slots__ = ()

    name: str

    @property
    def source(self) -> Source:
        """Released gradients."""
        return Source.GRADIENTS

    @abstractmethod
    def init(self, dimension: int) -> RankingState:
        """The state before any observation."""

    @abstractmethod
    def update(self, state: RankingState, seen: Observation) -> RankingState:
        """The state after one more step; the old one is left as it is."""

    @abstractmethod
    def scores(self, state: RankingState) -> Tensor:
        """One number per coordinate, larger is better."""

    def order(self, state: RankingState, place: Place) -> Tensor:
        """By falling score; ties go to the lower index."""
        return order_by_score(self.scores(state), place.layout, place.granularity)


@dataclass(frozen=True, slots=True)
class RandomOrder:
    """A fresh public random permutation each time (TP-Rand; RS, Alg. 1 line 5)."""

    name: str = "random"

    @property
    def source(self) -> Source:
        """Chance."""
        return Source.PUBLIC

    def init(self, dimension: int) -> RankingState:
        """Nothing."""
        return {}

    def update(self, state: RankingState, seen: Observation) -> RankingState:
        """Nothing is learned."""
        return state

    def scores(self, state: RankingState) -> None:
        """There are none."""
        return

    def order(self, state: RankingState, place: Place) -> Tensor:
        """A permutation that the period and the public seed fix."""
        return random_order(place.public, (place.period,), place.layout, place.granularity)


_RANKINGS: dict[str, Ranking] = {}


def register_ranking(ranking: Ranking) -> Ranking:
    """Make a ranking available by name: to `MethodOptions(ranking=...)`, and to plans read from their files."""
    if ranking.name in _RANKINGS and _RANKINGS[ranking.name] != ranking:
        raise SparseDPError(f"ranking: the name {ranking.name!r} is taken; choose another")
    _RANKINGS[ranking.name] = ranking
    return ranking


def get_ranking(name: str) -> Ranking:
    """The ranking of that name."""
    if name not in _RANKINGS:
        raise SparseDPError(
            f"ranking: got {name!r}, expected one of {ranking_names()}; one of your own is made known by "
            "register_ranking"
        )
    return _RANKINGS[name]


def ranking_names() -> list[str]:
    """The names of all rankings."""
    return sorted(_RANKINGS)


register_ranking(RandomOrder())
