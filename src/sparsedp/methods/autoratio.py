"""The automatic ratio: keep a coordinate when the energy it carries exceeds the noise it costs.

TP-TopK's Prop. 5.1 gives the one-step error of a support A of size k as `sum_{p not in A} G_p^2 + k nu_2^2`. A run
takes T2 such steps, and their mean has the error `sum_{p not in A} G_p^2 + k nu_2^2 / T2`: noise averages out, what a
support leaves out does not. The first half of the warm-up ranks the coordinates; the second half estimates their
energies `G_p^2` as the product of two means, over its even and its odd steps: independent noise and independent
batches, so the product is unbiased and may be negative. The k with the smallest estimated error wins. All of it is
post-processing of released gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsedp.core.errors import SparseDPError
from sparsedp.methods.observation import Observation
from sparsedp.methods.rankings import ByScore

MINIMUM_WARMUP = 3
"""One step to rank by and two to estimate with."""


@dataclass(frozen=True, slots=True)
class AutoRatio:
    """The accumulator behind the automatic ratio, for a warm-up of `steps` steps ranked by `score`."""

    score: ByScore
    steps: int

    def __post_init__(self) -> None:
        if self.steps < MINIMUM_WARMUP:
            raise SparseDPError(
                f"active_ratio='auto': got a warm-up of {self.steps} steps, expected at least {MINIMUM_WARMUP}; "
                "lengthen it (warmup_fraction) or give a number"
            )

    def init(self, dimension: int) -> dict[str, Tensor]:
        """The state before any step."""
        empty = {name: torch.zeros(dimension, dtype=torch.float64) for name in ("even_sum", "odd_sum")}
        counts = {
            name: torch.zeros((), dtype=torch.int64) for name in ("rank_steps", "even_steps", "odd_steps")
        }
        ranking = {f"rank.{name}": value for name, value in self.score.init(dimension).items()}
        return {**ranking, **empty, **counts}

    def update(self, state: Mapping[str, Tensor], step: int, seen: Observation) -> dict[str, Tensor]:
        """The state after the warm-up's step `step` (from 0)."""
        if step < self.steps // 2:
            ranking = self.score.update(_ranking_part(state), seen)
            moved = {f"rank.{name}": value for name, value in ranking.items()}
            return {**state, **moved, "rank_steps": state["rank_steps"] + 1}
        part = "even" if step % 2 == 0 else "odd"
        total, count = state[f"{part}_sum"] + seen.gradient, state[f"{part}_steps"] + 1
        return {**state, f"{part}_sum": total, f"{part}_steps": count}

    def is_complete(self, state: Mapping[str, Tensor]) -> bool:
        """Whether every part has seen a step; a run that lost steps may lack one."""
        return all(int(state[name]) > 0 for name in ("rank_steps", "even_steps", "odd_steps"))

    def ranking_scores(self, state: Mapping[str, Tensor]) -> Tensor:
        """The scores of the first half."""
        return self.score.scores(_ranking_part(state))

    def energies(self, state: Mapping[str, Tensor]) -> Tensor:
        """The unbiased energy estimates of the second half."""
        even = state["even_sum"] / state["even_steps"]
        return even * (state["odd_sum"] / state["odd_steps"])


def best_count(order: Tensor, energies: Tensor, noise_variance: float) -> int:
    """The k in 1..d that minimises `sum of energies not among the first k of order + k * noise_variance`.

    **Edge cases.** Ties go to the smaller k. The order may come from any ranking; the smallest support has one
    coordinate.
    """
    kept = torch.cumsum(energies[order], dim=0)
    counts = torch.arange(1, order.numel() + 1, dtype=torch.float64)
    errors = (kept[-1] - kept) + counts * noise_variance
    return int(torch.argmin(errors)) + 1


def _ranking_part(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("rank."): value for name, value in state.items() if name.startswith("rank.")}
