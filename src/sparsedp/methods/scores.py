"""Scores: what orders the coordinates, from releases or by chance. Pure functions of public values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from numbers import Real
from typing import ClassVar

import torch
from torch import Tensor

from sparsedp.errors import SparseDPError
from sparsedp.methods.public_scores import NEVER, Knowledge
from sparsedp.methods.ranking import Granularity, Order, Parts, TableRows, order_by_score, random_order
from sparsedp.methods.registry import Registry
from sparsedp.privacy.mechanism import Release
from sparsedp.randomness import PublicRandomness


@dataclass(frozen=True, slots=True, eq=False)
class NoisyGradient:
    """A d-vector to score and the variance of the Gaussian noise in each of its coordinates (float64, CPU).

    Formal guarantees: Made from a `Release` and public numbers alone, so all that follows is post-processing.
    """

    gradient: Tensor
    noise_variance: Tensor


def observe_released(released: Release, frozen_noise: Tensor, frozen_std: float) -> NoisyGradient:
    """The released gradient on its support and, on frozen coordinates, fresh public noise (RS Alg. 4, line 22).

    A frozen coordinate then looks like an active one without signal, and can come back.

    Args:
        released: one step's release.
        frozen_noise: d standard normal numbers, public; those on the support are not used.
        frozen_std: their scale, the noise an active coordinate would have had.
    """
    support = released.support
    if frozen_noise.shape != (support.dimension,):
        raise SparseDPError(
            f"frozen_noise: got shape {tuple(frozen_noise.shape)}, expected d={support.dimension} numbers"
        )
    gradient = frozen_noise.to("cpu", torch.float64) * frozen_std
    variance = torch.full((support.dimension,), frozen_std**2, dtype=torch.float64)
    gradient[support.indices] = released.mean.to("cpu", torch.float64)
    variance[support.indices] = released.noise_scale.to("cpu", torch.float64) ** 2
    return NoisyGradient(gradient, variance)


def observe_support(released: Release) -> NoisyGradient:
    """The released gradient on its support; zeros without noise elsewhere."""
    support = released.support
    return NoisyGradient(
        support.scatter(released.mean.to("cpu", torch.float64)),
        support.scatter(released.noise_variance.to("cpu", torch.float64)),
    )


def observe_dense(released: Release) -> NoisyGradient:
    """A release on the full support, as it is."""
    if not released.support.is_full:
        raise SparseDPError(
            f"step {released.step} was released on {released.support}, expected the full support; "
            "use observe_released, which says what frozen coordinates look like"
        )
    return NoisyGradient(
        released.mean.to("cpu", torch.float64), released.noise_variance.to("cpu", torch.float64)
    )


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


class Ranking(ABC):
    """Gives an order of the coordinates from a state that observations have moved; this one learns nothing."""

    __slots__ = ()

    name: str
    source: ClassVar[ScoreSource] = ScoreSource.PUBLIC

    def init(self, dimension: int) -> RankingState:
        """The state before any observation."""
        return {}

    def update(self, state: RankingState, seen: NoisyGradient) -> RankingState:
        """The state after one more observation; the old one is left as it is."""
        return state

    def scores(self, state: RankingState) -> Tensor | None:
        """One number per coordinate, larger is better; None for an order without numbers."""
        return None

    @abstractmethod
    def order(self, state: RankingState, place: RankingContext) -> Order:
        """What is ranked, best first."""


class ByScore(Ranking):
    """A ranking by one number per coordinate, from released gradients: a subclass says `init`, `update`, `scores`.

    `scores` is asked for only after at least one `update`.
    """

    __slots__ = ()

    source: ClassVar[ScoreSource] = ScoreSource.GRADIENTS

    @abstractmethod
    def init(self, dimension: int) -> RankingState:
        """The state before any observation."""

    @abstractmethod
    def update(self, state: RankingState, seen: NoisyGradient) -> RankingState:
        """The state after one more step; the old one is left as it is."""

    @abstractmethod
    def scores(self, state: RankingState) -> Tensor:
        """One number per coordinate, larger is better."""

    def order(self, state: RankingState, place: RankingContext) -> Order:
        """By falling score; ties go to the lower index."""
        return place.by_score(self.scores(state))


class MeanScore(ByScore):
    """The mean over steps of a number per coordinate, `term`."""

    __slots__ = ()

    @abstractmethod
    def term(self, seen: NoisyGradient) -> Tensor:
        """A step's numbers, in memory of their own."""

    def init(self, dimension: int) -> RankingState:
        """Zeros."""
        return {"sum": _zeros(dimension), "steps": _count()}

    def update(self, state: RankingState, seen: NoisyGradient) -> RankingState:
        """Add the step's numbers."""
        return {"sum": self.term(seen).add_(state["sum"]), "steps": state["steps"] + 1}

    def scores(self, state: RankingState) -> Tensor:
        """The mean over steps."""
        return state["sum"] / state["steps"]


@dataclass(frozen=True, slots=True)
class Energy(MeanScore):
    """`mean_t(g_t^2 - v_t)`: squared gradient less the noise floor (TP-TopK, Sec. 3.2 and Alg. 1 line 14).

    Unbiased for `G^2` when `g_t = G + noise` (Lemma 5.2). May be negative; only the order counts.
    """

    name: str = "energy"

    def term(self, seen: NoisyGradient) -> Tensor:
        """`g^2 - v`."""
        return seen.gradient.square().sub_(seen.noise_variance)


@dataclass(frozen=True, slots=True)
class Magnitude(MeanScore):
    """`mean_t |g_t|` (AdaDPIGU, Alg. 1 lines 6 and 9).

    **Deviations.** The paper's text takes the clipped gradient before the noise, which leaks; this takes the released
    one.
    """

    name: str = "magnitude"

    def term(self, seen: NoisyGradient) -> Tensor:
        """`|g|`."""
        return seen.gradient.abs()


@dataclass(frozen=True, slots=True)
class Ranked(ByScore):
    """`|sum_t g_t|` (RS, Alg. 4 lines 9 and 22; App. I)."""

    name: str = "ranked"

    def init(self, dimension: int) -> RankingState:
        """Zeros."""
        return {"sum": _zeros(dimension)}

    def update(self, state: RankingState, seen: NoisyGradient) -> RankingState:
        """Add `g`."""
        return {"sum": state["sum"] + seen.gradient}

    def scores(self, state: RankingState) -> Tensor:
        """The magnitude of the sum."""
        return state["sum"].abs()


@dataclass(frozen=True, slots=True)
class Coherent(ByScore):
    """`(mean_t g_t)^2 - mean_t(v_t)/T`: squared mean gradient less the noise floor of the mean. Ours.

    Unbiased for `G^2` when `g_t = G + noise`, with variance `2 v^2/T^2 + 4 v G^2/T` against the energy score's
    `2 v^2/T + 4 v G^2/T`.
    """

    name: str = "coherent"

    def init(self, dimension: int) -> RankingState:
        """Zeros."""
        return {"sum": _zeros(dimension), "variance": _zeros(dimension), "steps": _count()}

    def update(self, state: RankingState, seen: NoisyGradient) -> RankingState:
        """Add `g` and `v`."""
        return {
            "sum": state["sum"] + seen.gradient,
            "variance": state["variance"] + seen.noise_variance,
            "steps": state["steps"] + 1,
        }

    def scores(self, state: RankingState) -> Tensor:
        """`(sum g)^2/T^2 - (sum v)/T^2`."""
        return (state["sum"] ** 2 - state["variance"]) / state["steps"] ** 2


def _zeros(dimension: int) -> Tensor:
    return torch.zeros(dimension, dtype=torch.float64)


def _count() -> Tensor:
    return torch.zeros((), dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class RandomOrder(Ranking):
    """A fresh public random permutation each time (TP-Rand; RS, Alg. 1 line 5)."""

    name: str = "random"

    def order(self, state: RankingState, place: RankingContext) -> Order:
        """A permutation that the period and the public seed fix."""
        layout, granularity = place.parts.layout, place.granularity
        return Order(
            place.parts.among_ranked(random_order(place.public, (place.period,), layout, granularity))
        )


@dataclass(frozen=True, slots=True)
class Frequency(Ranking):
    """Rows of embedding tables by how many units touch them, counted once with noise (DP-FEST, arXiv 2311.08357).

    A unit's touched rows weigh one over the root of their number, so that its vector has norm one: a unit that
    touches many rows says less about each.
    """

    name: str = "frequency"
    source: ClassVar[ScoreSource] = ScoreSource.TOUCHED_ROWS

    def update(self, state: RankingState, seen: NoisyGradient) -> RankingState:
        """Keep the counts; there is one number for each row."""
        return {"counts": seen.gradient}

    def order(self, state: RankingState, place: RankingContext) -> Order:
        """By falling count; ties go to the lower row."""
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
        if not isinstance(self.share, Real) or not 0 < self.share < 1:
            raise SparseDPError(
                f"contributions: share is {self.share!r}, expected a number in (0, 1), such as 0.1"
            )
        if not isinstance(self.threshold, Real) or not self.threshold >= 0:
            raise SparseDPError(
                f"contributions: threshold is {self.threshold!r}, expected a number >= 0, such as 2.0"
            )

    def update(self, state: RankingState, seen: NoisyGradient) -> RankingState:
        """Keep this step's counts, one for each row, and their noise."""
        return {"counts": seen.gradient, "variance": seen.noise_variance}

    def order(self, state: RankingState, place: RankingContext) -> Order:
        """The rows that reach the threshold, by falling count; ties go to the lower row."""
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

    def check(self, known: Knowledge) -> None:
        """Refuse other scores than those that were planned with.

        Raises:
            SparseDPError: there are none, some too many, or others.
        """
        found = "" if known.scores is None else known.scores.checksum
        if found != self.checksum:
            raise SparseDPError(
                f"public_scores: got {found[:12] or 'none'}, and the plan names {self.checksum[:12] or 'none'} "
                "(SHA-256); give the scores it was planned with"
            )

    def order(self, state: RankingState, place: RankingContext) -> Order:
        """By falling score; ties go to the lower index, and what has the score -inf is left out."""
        found = self._found(place)
        if not found.items.numel() and place.parts.ranked and not place.parts.always:
            raise SparseDPError("public_scores: every score is -inf or false, so nothing would be trained")
        return found

    def _found(self, place: RankingContext) -> Order:
        layout, ranked, scores = place.parts.layout, place.parts.ranked, place.known.scores
        if scores is None:
            return place.by_score(place.known.magnitudes())
        if place.granularity is Granularity.ROWS:
            best = torch.sort(scores.by_row(layout, ranked), descending=True, stable=True)
            return Order(best.indices[best.values > NEVER], TableRows(ranked))
        values = scores.by_coordinate(layout)
        order = place.by_score(values).items
        return Order(order[values[order] > NEVER])


_RANKINGS: Registry[Ranking] = Registry("ranking", "register_ranking")
register_ranking, get_ranking = _RANKINGS.register, _RANKINGS.get
"""Make a ranking known by name, to `get_method(name, ranking=...)` and to plans read from their files; find it."""
for _one in (
    RandomOrder(),
    Frequency(),
    Energy(),
    Magnitude(),
    Ranked(),
    Coherent(),
    Contributions(),
    Given(),
):
    register_ranking(_one)
