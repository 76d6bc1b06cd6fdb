"""A ranking made anew in every step, from a count of the rows that the step's own units touch."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

import torch

from sparsedp.errors import SparseDPError
from sparsedp.methods.observation import Observation
from sparsedp.methods.order import Order, TableRows
from sparsedp.methods.rankings import Place, RankedBy, RankingState, WithoutScores, register_ranking


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
    def source(self) -> RankedBy:
        """A release of its own in every step."""
        return RankedBy.STEP_ROWS

    def update(self, state: RankingState, seen: Observation) -> RankingState:
        """Keep this step's counts, one for each row, and their noise."""
        return {"counts": seen.gradient, "variance": seen.noise_variance}

    def order(self, state: RankingState, place: Place) -> Order:
        """The rows that reach the threshold, by falling count; ties go to the lower row."""
        counts = state["counts"]
        reached = (counts >= self.threshold * state["variance"].sqrt()).nonzero().reshape(-1)
        best = torch.sort(counts[reached], descending=True, stable=True).indices
        return Order(reached[best], TableRows(place.parts.ranked))


register_ranking(Contributions())
