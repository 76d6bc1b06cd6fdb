"""Scores: what orders the coordinates, from releases or by chance. Pure functions of public values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsedp._serialization import from_json, to_json
from sparsedp._validate import number
from sparsedp.errors import SparseDPError
from sparsedp.methods.public_scores import NEVER, Knowledge
from sparsedp.methods.ranking import Granularity, Order, Parts, TableRows, order_by_score, random_order
from sparsedp.methods.registry import add_named, find_named
from sparsedp.privacy.mechanism import Release
from sparsedp.randomness import PublicRandomness


@dataclass(frozen=True, slots=True, eq=False)
class NoisyGradient:
    """A d-vector to score and the variance of the Gaussian noise in each of its coordinates (float64, CPU).

    Formal guarantees: Made from a `Release` and public numbers alone, so all that follows is post-processing.
    """

    gradient: Tensor
    noise_variance: Tensor


def observe(released: Release, frozen: Tensor | None = None, frozen_std: float = 0.0) -> NoisyGradient:
    """The released gradient on its support; elsewhere fresh public noise (RS Alg. 4, line 22), or zeros.

    A frozen coordinate with fresh noise looks like an active one without signal, and can come back. `frozen` are d
    standard normal numbers, public, and `frozen_std` is the noise an active coordinate would have had.
    """
    support, mean = released.support, released.mean.to("cpu", torch.float64)
    if support.is_full:
        return NoisyGradient(mean, released.noise_variance.to("cpu", torch.float64))
    gradient = torch.zeros(support.dimension) if frozen is None else frozen
    gradient = gradient.to("cpu", torch.float64) * frozen_std
    variance = torch.full((support.dimension,), frozen_std**2, dtype=torch.float64)
    gradient[support.indices] = mean
    variance[support.indices] = released.noise_scale.to("cpu", torch.float64) ** 2
    return NoisyGradient(gradient, variance)


RankingState = Mapping[str, Tensor]


class ScoreSource(Enum):
    """What a ranking goes by."""

    GRADIENTS = "released gradients"
    TOUCHED_ROWS = "a count of the rows of tables that units touch"
    STEP_ROWS = "a count, in every step, of the rows of tables that its units touch"
    PUBLIC = "nothing private"

    @property
    def counts_rows(self) -> bool:
        """Whether it takes a release of its own, of one number for each row of a table."""
        return self in (ScoreSource.TOUCHED_ROWS, ScoreSource.STEP_ROWS)


@dataclass(frozen=True, slots=True)
class RankingContext:
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


class Ranking:
    """Orders the coordinates by a state that observations have moved: by falling score, if it says nothing else.

    `scores` is asked for only after at least one `update`. A ranking that learns nothing overrides `order` alone.
    """

    __slots__ = ()

    name: str
    source: ClassVar[ScoreSource] = ScoreSource.GRADIENTS

    def init(self, dimension: int) -> RankingState:
        """The state before any observation."""
        return {}

    def update(self, state: RankingState, seen: NoisyGradient) -> RankingState:
        """The state after one more observation; the old one is left as it is."""
        return state

    def scores(self, state: RankingState) -> Tensor | None:
        """One number per coordinate, larger is better; None for an order without numbers."""
        return None

    def order(self, state: RankingState, place: RankingContext) -> Order:
        """What is ranked, best first; ties go to the lower index."""
        scores = self.scores(state)
        if scores is None:
            raise NotImplementedError(f"{self.name}: a ranking needs scores, or an order")
        return place.by_score(scores)


class MeanScore(Ranking):
    """The mean over steps of a number per coordinate, `term`."""

    __slots__ = ()

    def term(self, seen: NoisyGradient) -> Tensor:
        """A step's numbers, in memory of their own."""
        raise NotImplementedError

    def init(self, dimension: int) -> RankingState:
        return {"sum": _zeros(dimension), "steps": torch.tensor(0)}

    def update(self, state: RankingState, seen: NoisyGradient) -> RankingState:
        return {"sum": self.term(seen).add_(state["sum"]), "steps": state["steps"] + 1}

    def scores(self, state: RankingState) -> Tensor:
        return state["sum"] / state["steps"]


@dataclass(frozen=True, slots=True)
class Energy(MeanScore):
    """`mean_t(g_t^2 - v_t)`: squared gradient less the noise floor (TP-TopK, Sec. 3.2 and Alg. 1 line 14).

    Unbiased for `G^2` when `g_t = G + noise` (Lemma 5.2). May be negative; only the order counts.
    """

    name: str = "energy"

    def term(self, seen: NoisyGradient) -> Tensor:
        return seen.gradient.square().sub_(seen.noise_variance)


@dataclass(frozen=True, slots=True)
class Magnitude(MeanScore):
    """`mean_t |g_t|` (AdaDPIGU, Alg. 1 lines 6 and 9).

    **Deviations.** The paper's text takes the clipped gradient before the noise, which leaks; this takes the released
    one.
    """

    name: str = "magnitude"

    def term(self, seen: NoisyGradient) -> Tensor:
        return seen.gradient.abs()


@dataclass(frozen=True, slots=True)
class Ranked(Ranking):
    """`|sum_t g_t|` (RS, Alg. 4 lines 9 and 22; App. I)."""

    name: str = "ranked"

    def init(self, dimension: int) -> RankingState:
        return {"sum": _zeros(dimension)}

    def update(self, state: RankingState, seen: NoisyGradient) -> RankingState:
        return {"sum": state["sum"] + seen.gradient}

    def scores(self, state: RankingState) -> Tensor:
        return state["sum"].abs()


@dataclass(frozen=True, slots=True)
class Coherent(Ranking):
    """`(mean_t g_t)^2 - mean_t(v_t)/T`: squared mean gradient less the noise floor of the mean. Ours.

    Unbiased for `G^2` when `g_t = G + noise`, with variance `2 v^2/T^2 + 4 v G^2/T` against the energy score's
    `2 v^2/T + 4 v G^2/T`.
    """

    name: str = "coherent"

    def init(self, dimension: int) -> RankingState:
        return {"sum": _zeros(dimension), "variance": _zeros(dimension), "steps": torch.tensor(0)}

    def update(self, state: RankingState, seen: NoisyGradient) -> RankingState:
        return {
            "sum": state["sum"] + seen.gradient,
            "variance": state["variance"] + seen.noise_variance,
            "steps": state["steps"] + 1,
        }

    def scores(self, state: RankingState) -> Tensor:
        return (state["sum"] ** 2 - state["variance"]) / state["steps"] ** 2


def _zeros(dimension: int) -> Tensor:
    return torch.zeros(dimension, dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class RandomOrder(Ranking):
    """A fresh public random permutation each time (TP-Rand; RS, Alg. 1 line 5)."""

    name: str = "random"
    source: ClassVar[ScoreSource] = ScoreSource.PUBLIC

    def order(self, state: RankingState, place: RankingContext) -> Order:
        layout, granularity = place.parts.layout, place.granularity
        order = random_order(place.public, (place.period,), layout, granularity)
        return Order(place.parts.among_ranked(order))


@dataclass(frozen=True, slots=True)
class Frequency(Ranking):
    """Rows of embedding tables by how many units touch them, counted once with noise (DP-FEST, arXiv 2311.08357).

    A unit's touched rows weigh one over the root of their number, so that its vector has norm one: a unit that
    touches many rows says less about each.
    """

    name: str = "frequency"
    source: ClassVar[ScoreSource] = ScoreSource.TOUCHED_ROWS

    def update(self, state: RankingState, seen: NoisyGradient) -> RankingState:
        return {"counts": seen.gradient}

    def order(self, state: RankingState, place: RankingContext) -> Order:
        counts = state["counts"]
        return Order(torch.sort(counts, descending=True, stable=True).indices, TableRows(place.parts.ranked))


@dataclass(frozen=True, slots=True)
class Contributions(Ranking):
    """Rows whose noisy count in this step reaches a threshold, largest first (DP-AdaFEST, arXiv 2311.08357).

    A unit's touched rows weigh one over the root of their number, as for `Frequency`.

    Attributes:
        threshold: in standard deviations of the count's noise; the paper's tau is `threshold * s_1 * C_1`. Of the
            rows that nobody touches a share of `1 - Phi(threshold)` gets through.
        share: of a step's precision `s^-2` for the count; the gradient has the rest.
    """

    threshold: float = 2.0
    share: float = 0.1
    name: str = "contributions"
    source: ClassVar[ScoreSource] = ScoreSource.STEP_ROWS

    def __post_init__(self) -> None:
        if number(self.share, "contributions: share", above=0.0) >= 1:
            raise SparseDPError(
                f"contributions: share: got {self.share}, expected a number in (0, 1), such as 0.1"
            )
        number(self.threshold, "contributions: threshold", at_least=0.0)

    def update(self, state: RankingState, seen: NoisyGradient) -> RankingState:
        return {"counts": seen.gradient, "variance": seen.noise_variance}

    def order(self, state: RankingState, place: RankingContext) -> Order:
        counts = state["counts"]
        reached = (counts >= self.threshold * state["variance"].sqrt()).nonzero().reshape(-1)
        best = torch.sort(counts[reached], descending=True, stable=True).indices
        return Order(reached[best], TableRows(place.parts.ranked))


@dataclass(frozen=True, slots=True)
class Given(Ranking):
    """By the user's public scores, or by the weights' magnitude where there are none.

    `checksum` names the scores, so that a plan says which they were; it is empty for the weights' magnitude.
    """

    checksum: str = ""
    name: str = "given"
    source: ClassVar[ScoreSource] = ScoreSource.PUBLIC

    def check(self, known: Knowledge) -> None:
        """Refuse other scores than those that were planned with."""
        found = "" if known.scores is None else known.scores.checksum
        if found != self.checksum:
            raise SparseDPError(
                f"public_scores: got {found[:12] or 'none'}, and the plan names {self.checksum[:12] or 'none'} "
                "(SHA-256); give the scores it was planned with"
            )

    def order(self, state: RankingState, place: RankingContext) -> Order:
        """By falling score; ties go to the lower index, and what has the score -inf is left out."""
        given, layout = place.known.scores, place.parts.layout
        scores = place.known.magnitudes() if given is None else given.by_coordinate(layout)
        order = place.by_score(scores).items
        found = order[scores[order] > NEVER]
        if not found.numel() and place.parts.ranked and not place.parts.always:
            raise SparseDPError("public_scores: every score is -inf or false, so nothing would be trained")
        return Order(found)


_OWN = (RandomOrder(), Frequency(), Energy(), Magnitude(), Ranked(), Coherent(), Contributions(), Given())
_RANKINGS: dict[str, Ranking] = {one.name: one for one in _OWN}


def register_ranking(ranking: Ranking) -> Ranking:
    """Make a ranking known by name, to `get_method(name, ranking=...)` and to plans read from their files."""
    return add_named(_RANKINGS, ranking.name, ranking, "ranking")


def read_ranking(value: Any) -> Ranking:
    """A registered ranking by its name, or from its name and the values of its fields."""
    given = {"name": value} if isinstance(value, str) else value
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        raise SparseDPError(
            f'ranking: got {value!r}, expected a name, or {{"name": ..., and its own values}}'
        )
    known = find_named(_RANKINGS, given["name"], "ranking")
    return from_json(type(known), {**to_json(known), **given}, "ranking")
