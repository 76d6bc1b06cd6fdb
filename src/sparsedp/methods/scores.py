"""Scores: how much a coordinate matters, judged from released gradients alone.

A score is a ranking of three pure functions over a state of named tensors: `init`, `update` with one step's
observation, and `scores`, the d numbers to rank by, larger is better. Everything is float64. Below, `g_t` is the
released gradient of step t, `v_t` the variance of its noise, coordinate by coordinate, and T the steps seen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsedp.core.errors import SparseDPError
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


@dataclass(frozen=True, slots=True)
class BlockCoherent(ByScore):
    """The coherent score of each run of `block` steps, averaged. Ours: for gradients that move slowly.

    Runs are weighted by their length, so a last run that is shorter counts for what it is. `block=1` is the energy
    score, a block as long as the warm-up the coherent score; all are unbiased for `G^2`.
    """

    block: int = 10
    name: str = "block-coherent"

    def __post_init__(self) -> None:
        if self.block < 1:
            raise SparseDPError(f"block_size: got {self.block}, expected a number of steps >= 1")

    def init(self, dimension: int) -> RankingState:
        """Zeros."""
        return {"done": _zeros(dimension), "steps": _count(), **_open_block(dimension)}

    def update(self, state: RankingState, seen: Observation) -> RankingState:
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

    def scores(self, state: RankingState) -> Tensor:
        """Closed blocks and the open one: each `length * ((mean g)^2 - mean(v)/length)`, over all steps."""
        open_part = (state["block_sum"] ** 2 - state["block_variance"]) / state["block_steps"].clamp(min=1)
        return (state["done"] + open_part) / state["steps"]


for _ranking in (Energy(), Magnitude(), Ranked(), Coherent(), BlockCoherent()):
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
