"""Scores: how much a coordinate matters, judged from released gradients alone.

A score is three pure functions over a state of named tensors: `init`, `update` with one step's observation, and
`scores`, the d numbers to rank by, larger is better. Everything is float64. Below, `g_t` is the released gradient of
step t, `v_t` the variance of its noise, coordinate by coordinate, and T the number of steps seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sparsedp.core.errors import SparseDPError
from sparsedp.methods.observation import Observation

ScoreState = Mapping[str, Tensor]


class Score(Protocol):
    """An accumulator over observations. `scores` is asked for only after at least one `update`."""

    @property
    def name(self) -> str:
        """What options and reports call it."""
        ...

    def init(self, dimension: int) -> ScoreState:
        """The state before any step."""
        ...

    def update(self, state: ScoreState, seen: Observation) -> ScoreState:
        """The state after one more step; the old one is left as it is."""
        ...

    def scores(self, state: ScoreState) -> Tensor:
        """One number per coordinate, larger is better."""
        ...


@dataclass(frozen=True, slots=True)
class Energy:
    """`mean_t(g_t^2 - v_t)`: squared gradient less the noise floor (TP-TopK, Sec. 3.2 and Alg. 1 line 14).

    Unbiased for `G^2` when `g_t = G + noise` (Lemma 5.2). May be negative; only the order counts.
    """

    name: str = "energy"

    def init(self, dimension: int) -> ScoreState:
        """Zeros."""
        return {"sum": _zeros(dimension), "steps": _count()}

    def update(self, state: ScoreState, seen: Observation) -> ScoreState:
        """Add `g^2 - v`."""
        return {"sum": state["sum"] + (seen.gradient**2 - seen.noise_variance), "steps": state["steps"] + 1}

    def scores(self, state: ScoreState) -> Tensor:
        """The mean over steps."""
        return state["sum"] / state["steps"]


@dataclass(frozen=True, slots=True)
class Magnitude:
    """`mean_t |g_t|` (AdaDPIGU, Alg. 1 lines 6 and 9).

    **Deviations.** The paper's text takes the clipped gradient before the noise, which leaks; this takes the released
    one.
    """

    name: str = "magnitude"

    def init(self, dimension: int) -> ScoreState:
        """Zeros."""
        return {"sum": _zeros(dimension), "steps": _count()}

    def update(self, state: ScoreState, seen: Observation) -> ScoreState:
        """Add `|g|`."""
        return {"sum": state["sum"] + seen.gradient.abs(), "steps": state["steps"] + 1}

    def scores(self, state: ScoreState) -> Tensor:
        """The mean over steps."""
        return state["sum"] / state["steps"]


@dataclass(frozen=True, slots=True)
class Ranked:
    """`|sum_t g_t|` (RS, Alg. 4 lines 9 and 22; App. I)."""

    name: str = "ranked"

    def init(self, dimension: int) -> ScoreState:
        """Zeros."""
        return {"sum": _zeros(dimension)}

    def update(self, state: ScoreState, seen: Observation) -> ScoreState:
        """Add `g`."""
        return {"sum": state["sum"] + seen.gradient}

    def scores(self, state: ScoreState) -> Tensor:
        """The magnitude of the sum."""
        return state["sum"].abs()


@dataclass(frozen=True, slots=True)
class Coherent:
    """`(mean_t g_t)^2 - mean_t(v_t)/T`: squared mean gradient less the noise floor of the mean. Ours.

    Unbiased for `G^2` when `g_t = G + noise`, with variance `2 v^2/T^2 + 4 v G^2/T` against the energy score's
    `2 v^2/T + 4 v G^2/T`.
    """

    name: str = "coherent"

    def init(self, dimension: int) -> ScoreState:
        """Zeros."""
        return {"sum": _zeros(dimension), "variance": _zeros(dimension), "steps": _count()}

    def update(self, state: ScoreState, seen: Observation) -> ScoreState:
        """Add `g` and `v`."""
        return {
            "sum": state["sum"] + seen.gradient,
            "variance": state["variance"] + seen.noise_variance,
            "steps": state["steps"] + 1,
        }

    def scores(self, state: ScoreState) -> Tensor:
        """`(sum g)^2/T^2 - (sum v)/T^2`."""
        return (state["sum"] ** 2 - state["variance"]) / state["steps"] ** 2


@dataclass(frozen=True, slots=True)
class BlockCoherent:
    """The coherent score of each run of `block` steps, averaged. Ours: for gradients that move slowly.

    Runs are weighted by their length, so a last run that is shorter counts for what it is. `block=1` is the energy
    score, a block as long as the warm-up the coherent score; all are unbiased for `G^2`.
    """

    block: int = 10
    name: str = "block-coherent"

    def __post_init__(self) -> None:
        if self.block < 1:
            raise SparseDPError(f"block_size: got {self.block}, expected a number of steps >= 1")

    def init(self, dimension: int) -> ScoreState:
        """Zeros."""
        return {"done": _zeros(dimension), "steps": _count(), **_open_block(dimension)}

    def update(self, state: ScoreState, seen: Observation) -> ScoreState:
        """Add to the open block, and close it when it is full."""
        total = state["block_sum"] + seen.gradient
        variance = state["block_variance"] + seen.noise_variance
        length = state["block_steps"] + 1
        steps = state["steps"] + 1
        if int(length) < self.block:
            open_block = {"block_sum": total, "block_variance": variance, "block_steps": length}
            return {"done": state["done"], "steps": steps, **open_block}
        closed = state["done"] + (total**2 - variance) / length
        return {"done": closed, "steps": steps, **_open_block(total.numel())}

    def scores(self, state: ScoreState) -> Tensor:
        """Closed blocks and the open one: each `length * ((mean g)^2 - mean(v)/length)`, over all steps."""
        open_part = (state["block_sum"] ** 2 - state["block_variance"]) / state["block_steps"].clamp(min=1)
        return (state["done"] + open_part) / state["steps"]


@dataclass(frozen=True, slots=True)
class RandomOrder:
    """No score: a fresh public random permutation at each ranking (TP-Rand; RS, Alg. 1 line 5)."""

    name: str = "random"


Ranking = Score | RandomOrder

_RANKINGS: dict[str, Ranking] = {}


def register_ranking(ranking: Ranking) -> Ranking:
    """Make a ranking available by name in `MethodOptions(ranking=...)`."""
    if ranking.name in _RANKINGS and _RANKINGS[ranking.name] != ranking:
        raise SparseDPError(f"ranking: the name {ranking.name!r} is taken; choose another")
    _RANKINGS[ranking.name] = ranking
    return ranking


def get_ranking(name: str) -> Ranking:
    """The ranking of that name."""
    if name not in _RANKINGS:
        raise SparseDPError(f"ranking: got {name!r}, expected one of {ranking_names()}")
    return _RANKINGS[name]


def ranking_names() -> list[str]:
    """The names of all rankings."""
    return sorted(_RANKINGS)


for _ranking in (Energy(), Magnitude(), Ranked(), Coherent(), BlockCoherent(), RandomOrder()):
    register_ranking(_ranking)


def _zeros(dimension: int) -> Tensor:
    return torch.zeros(dimension, dtype=torch.float64)


def _count() -> Tensor:
    return torch.zeros((), dtype=torch.int64)


def _open_block(dimension: int) -> dict[str, Tensor]:
    return {
        "block_sum": _zeros(dimension),
        "block_variance": _zeros(dimension),
        "block_steps": _count(),
    }
