"""Scores: what orders the coordinates, from releases or by chance. Pure functions of public values."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from numbers import Real
from typing import Any, Protocol, final

import torch
from torch import Tensor

from sparsedp.errors import SparseDPError
from sparsedp.methods.ranking import Granularity, Order, Parts, TableRows, find, order_by_score, random_order
from sparsedp.methods.registry import Registry
from sparsedp.parameters import ParameterLayout, ParameterSlice
from sparsedp.privacy.mechanism import Release
from sparsedp.randomness import PublicRandomness

NEVER = float("-inf")
"""The score of what is never active."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class PublicScores:
    """Scores that a user knows without looking at the data: counts of a public corpus, magnitudes, names, a mask.

    Built by `of`: a value for each pattern of parameter names or word for structure (`methods.scope`), which is one
    number for whole parameters, one number for each row, or one for each entry. Larger is better. A mask counts as 1
    where it is true; where it is false, where a score is -inf, and what no name means is never active.

    Formal guarantees: Not charged: scores must not come from the protected records.
    """

    values: Mapping[str, Tensor] = field(repr=False)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> PublicScores:
        """Scores from numbers, tensors or arrays.

        Raises:
            SparseDPError: no score at all, one that is no real number, or scores without the names of parameters.
        """
        _check_names(given)
        if not given:
            raise SparseDPError("public_scores: got nothing, expected a score for some parameters")
        return cls({name: _as_scores(name, value) for name, value in given.items()})

    @property
    def checksum(self) -> str:
        """SHA-256 of names, shapes and values: plan and record name the scores by it."""
        digest = hashlib.sha256()
        for name in sorted(self.values):
            value = self.values[name].contiguous()
            digest.update(f"{name} {list(value.shape)} ".encode())
            digest.update(value.numpy().astype("<f8").tobytes())
        return digest.hexdigest()

    def by_row(self, layout: ParameterLayout, slots: tuple[ParameterSlice, ...]) -> Tensor:
        """One score for each row of some parameters, numbered through: the mean over the row's entries.

        Raises:
            SparseDPError: some entries of a row are never active, and others are.
        """
        found = self._by_slot(layout)
        return torch.cat([torch.empty(0, dtype=torch.float64), *(_rows(slot, found) for slot in slots)])

    def by_coordinate(self, layout: ParameterLayout) -> Tensor:
        """One score for each of the d coordinates."""
        found = self._by_slot(layout)
        return torch.cat([_entries(slot, found) for slot in layout])

    def _by_slot(self, layout: ParameterLayout) -> dict[str, Tensor]:
        """The score of each parameter that some name means; of several names the last counts."""
        return dict(self._pairs(layout))

    def _pairs(self, layout: ParameterLayout) -> Iterator[tuple[str, Tensor]]:
        for name, value in self.values.items():
            for slot in find(layout, (name,), "public_scores"):
                if value.dim() and value.shape not in (slot.shape, slot.shape[:1]):
                    raise SparseDPError(
                        f"public_scores: got shape {tuple(value.shape)} for {name!r}, expected one number, one for "
                        f"each row of {slot.name!r} ({slot.shape[:1]}) or one for each entry ({slot.shape})"
                    )
                yield slot.name, value


@final
@dataclass(frozen=True, slots=True, eq=False)
class Knowledge:
    """What is public when a ranking is made.

    Attributes:
        weights: gives the d weights as they are now: the initial ones, or what releases alone have made of them.
        scores: the user's, if any.
    """

    weights: Callable[[], Tensor] | None = None
    scores: PublicScores | None = None

    def magnitudes(self) -> Tensor:
        """The size of each weight as it is now.

        Raises:
            SparseDPError: nobody gave the weights.
        """
        if self.weights is None:
            raise SparseDPError(
                "a ranking by the weights' magnitude needs them: give SupportScheduler(..., "
                "known=Knowledge(weights=...))"
            )
        return self.weights().detach().abs().to("cpu", torch.float64)


def _check_names(given: object) -> None:
    example = '{"embedding.weight": counts} or {"bias": 1.0}'
    if not isinstance(given, Mapping):
        raise SparseDPError(
            f"public_scores: got {type(given).__name__}, expected a mapping from names of parameters to scores, "
            f"such as {example}"
        )
    for name in given:
        if not isinstance(name, str):
            raise SparseDPError(
                f"public_scores: got the key {name!r} of type {type(name).__name__}, expected the name of a "
                f"parameter as text, such as {example}"
            )


def _as_scores(name: str, value: Any) -> Tensor:
    try:
        scores = torch.as_tensor(value).detach().to("cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise SparseDPError(
            f"public_scores: got {type(value).__name__} for {name!r}, expected numbers"
        ) from error
    if scores.is_complex():
        raise SparseDPError(
            f"public_scores: got complex numbers for {name!r}, expected real ones; give their sizes, scores.abs()"
        )
    wide = torch.where(scores, 1.0, NEVER).double() if scores.dtype == torch.bool else scores.double()
    if bool(wide.isnan().any()):
        raise SparseDPError(f"public_scores: a score for {name!r} is NaN, expected numbers")
    return wide


def _rows(slot: ParameterSlice, found: Mapping[str, Tensor]) -> Tensor:
    count = slot.shape[0] if slot.shape else 1
    value = found.get(slot.name)
    if value is None or value.dim() == 0:
        return torch.full((count,), NEVER if value is None else float(value), dtype=torch.float64)
    if value.dim() == 1:
        return value
    by_row = value.reshape(count, -1)
    never = by_row == NEVER
    partly = int((never.any(1) & ~never.all(1)).sum())
    if partly:
        raise SparseDPError(
            f"public_scores: {partly} of the {count} rows of {slot.name!r} are false or -inf in some entries and not "
            "in others, and rows are ranked whole; mask whole rows, or use granularity=Granularity.COORDINATES"
        )
    return by_row.mean(1)


def _entries(slot: ParameterSlice, found: Mapping[str, Tensor]) -> Tensor:
    value = found.get(slot.name, torch.tensor(NEVER, dtype=torch.float64))
    by_row = value.dim() == 1 and len(slot.shape) > 1
    shaped = value.reshape(-1, *[1] * (len(slot.shape) - 1)) if by_row else value
    return shaped.expand(slot.shape).reshape(-1)


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

    @property
    def selects(self) -> bool:
        """Whether it takes one release of its own, in a stage that selects."""
        return self is ScoreSource.TOUCHED_ROWS


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


class Ranking(Protocol):
    """Gives an order of the coordinates from a state that observations have moved."""

    @property
    def name(self) -> str:
        """What options and reports call it."""
        ...

    @property
    def source(self) -> ScoreSource:
        """What it goes by."""
        ...

    def init(self, dimension: int) -> RankingState:
        """The state before any observation."""
        ...

    def update(self, state: RankingState, seen: NoisyGradient) -> RankingState:
        """The state after one more step; the old one is left as it is."""
        ...

    def scores(self, state: RankingState) -> Tensor | None:
        """One number per coordinate, larger is better; None for an order without numbers."""
        ...

    def order(self, state: RankingState, place: RankingContext) -> Order:
        """What is ranked, best first."""
        ...


class ByScore(ABC):
    """A ranking by one number per coordinate, from released gradients: a subclass says `init`, `update`, `scores`.

    `scores` is asked for only after at least one `update`.
    """

    __slots__ = ()

    name: str

    @property
    def source(self) -> ScoreSource:
        """Released gradients."""
        return ScoreSource.GRADIENTS

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


class WithoutScores(ABC):
    """A ranking without a number per coordinate, which learns nothing from gradients; a subclass says `order`."""

    __slots__ = ()

    name: str

    def init(self, dimension: int) -> RankingState:
        """Nothing."""
        return {}

    def update(self, state: RankingState, seen: NoisyGradient) -> RankingState:
        """Nothing is learned."""
        return state

    def scores(self, state: RankingState) -> None:
        """Coordinates have none."""
        return

    @abstractmethod
    def order(self, state: RankingState, place: RankingContext) -> Order:
        """What is ranked, best first."""


@dataclass(frozen=True, slots=True)
class RandomOrder(WithoutScores):
    """A fresh public random permutation each time (TP-Rand; RS, Alg. 1 line 5)."""

    name: str = "random"

    @property
    def source(self) -> ScoreSource:
        """Chance."""
        return ScoreSource.PUBLIC

    def order(self, state: RankingState, place: RankingContext) -> Order:
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
    def source(self) -> ScoreSource:
        """A release of its own."""
        return ScoreSource.TOUCHED_ROWS

    def update(self, state: RankingState, seen: NoisyGradient) -> RankingState:
        """Keep the counts; there is one number for each row."""
        return {"counts": seen.gradient}

    def order(self, state: RankingState, place: RankingContext) -> Order:
        """By falling count; ties go to the lower row."""
        counts = state["counts"]
        return Order(torch.sort(counts, descending=True, stable=True).indices, TableRows(place.parts.ranked))


_RANKINGS: Registry[Ranking] = Registry("ranking", "register_ranking")


def register_ranking(ranking: Ranking) -> Ranking:
    """Make a ranking available by name: to `get_method(name, ranking=...)`, and to plans read from their files."""
    return _RANKINGS.register(ranking)


def get_ranking(name: str) -> Ranking:
    """The ranking of that name."""
    return _RANKINGS.get(name)


def ranking_names() -> list[str]:
    """The names of all rankings."""
    return _RANKINGS.names()


register_ranking(RandomOrder())
register_ranking(Frequency())


@dataclass(frozen=True, slots=True)
class Energy(ByScore):
    """`mean_t(g_t^2 - v_t)`: squared gradient less the noise floor (TP-TopK, Sec. 3.2 and Alg. 1 line 14).

    Unbiased for `G^2` when `g_t = G + noise` (Lemma 5.2). May be negative; only the order counts.
    """

    name: str = "energy"

    def init(self, dimension: int) -> RankingState:
        """Zeros."""
        return {"sum": _zeros(dimension), "steps": _count()}

    def update(self, state: RankingState, seen: NoisyGradient) -> RankingState:
        """Add `g^2 - v`."""
        more = seen.gradient.square().sub_(seen.noise_variance)
        return {"sum": more.add_(state["sum"]), "steps": state["steps"] + 1}

    def scores(self, state: RankingState) -> Tensor:
        """The mean over steps."""
        return state["sum"] / state["steps"]


@dataclass(frozen=True, slots=True)
class Magnitude(ByScore):
    """`mean_t |g_t|` (AdaDPIGU, Alg. 1 lines 6 and 9).

    **Deviations.** The paper's text takes the clipped gradient before the noise, which leaks; this takes the released
    one.
    """

    name: str = "magnitude"

    def init(self, dimension: int) -> RankingState:
        """Zeros."""
        return {"sum": _zeros(dimension), "steps": _count()}

    def update(self, state: RankingState, seen: NoisyGradient) -> RankingState:
        """Add `|g|`."""
        return {"sum": state["sum"] + seen.gradient.abs(), "steps": state["steps"] + 1}

    def scores(self, state: RankingState) -> Tensor:
        """The mean over steps."""
        return state["sum"] / state["steps"]


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


for _ranking in (Energy(), Magnitude(), Ranked(), Coherent()):
    register_ranking(_ranking)


def _zeros(dimension: int) -> Tensor:
    return torch.zeros(dimension, dtype=torch.float64)


def _count() -> Tensor:
    return torch.zeros((), dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class Contributions(WithoutScores):
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

    def __post_init__(self) -> None:
        if not isinstance(self.share, Real) or not 0 < self.share < 1:
            raise SparseDPError(
                f"contributions: share is {self.share!r}, expected a number in (0, 1), such as 0.1"
            )
        if not isinstance(self.threshold, Real) or not self.threshold >= 0:
            raise SparseDPError(
                f"contributions: threshold is {self.threshold!r}, expected a number >= 0, such as 2.0"
            )

    @property
    def source(self) -> ScoreSource:
        """A release of its own in every step."""
        return ScoreSource.STEP_ROWS

    def update(self, state: RankingState, seen: NoisyGradient) -> RankingState:
        """Keep this step's counts, one for each row, and their noise."""
        return {"counts": seen.gradient, "variance": seen.noise_variance}

    def order(self, state: RankingState, place: RankingContext) -> Order:
        """The rows that reach the threshold, by falling count; ties go to the lower row."""
        counts = state["counts"]
        reached = (counts >= self.threshold * state["variance"].sqrt()).nonzero().reshape(-1)
        best = torch.sort(counts[reached], descending=True, stable=True).indices
        return Order(reached[best], TableRows(place.parts.ranked))


register_ranking(Contributions())


@dataclass(frozen=True, slots=True)
class Given(WithoutScores):
    """By the user's public scores, or by the weights' magnitude where there are none.

    `checksum` names the scores, so that a plan says which they were; it is empty for the weights' magnitude.
    """

    checksum: str = ""
    name: str = "given"

    @property
    def source(self) -> ScoreSource:
        """Public knowledge."""
        return ScoreSource.PUBLIC

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


register_ranking(Given())
