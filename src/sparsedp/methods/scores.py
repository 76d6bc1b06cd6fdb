"""Scores: how much a coordinate matters, judged from released gradients alone.

A score is a ranking of three pure functions over a state of named tensors: `init`, `update` with one step's
observation, and `scores`, the d numbers to rank by, larger is better. Everything is float64. Below, `g_t` is the
released gradient of step t, `v_t` the variance of its noise, coordinate by coordinate, and T the steps seen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsedp.methods.observation import Observation
from sparsedp.methods.rankings import ByScore, RankingState, register_ranking


@dataclass(frozen=True, slots=True)
class Energy(ByScore):
    """`mean_t(g_t^2 - v_t)`: squared gradient less the noise floor (TP-TopK, Sec. 3.2 and Alg. 1 line 14).

    Unbiased for `G^2` when `g_t = G + noise` (Lemma 5.2). May be negative; only the order counts.
    """

    name: str = "energy"

    def init(self, dimension: int) -> RankingState:
        """Zeros."""
        return {"sum": _zeros(dimension), "steps": _count()}

    def update(self, state: RankingState, seen: Observation) -> RankingState:
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

    def update(self, state: RankingState, seen: Observation) -> RankingState:
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

    def update(self, state: RankingState, seen: Observation) -> RankingState:
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

    def update(self, state: RankingState, seen: Observation) -> RankingState:
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
