"""A ranking by one vote of all units."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsedp.core.errors import SparseDPError
from sparsedp.methods.observation import Observation
from sparsedp.methods.order import Order
from sparsedp.methods.rankings import Place, RankedBy, RankingState, WithoutScores, register_ranking


@dataclass(frozen=True, slots=True)
class Votes(WithoutScores):
    """Rows or tensors by how many units they carry most of the gradient of, at the weights of that time. Ours.

    A unit votes for the `most` rows (or tensors) with the largest share of its squared gradient; each vote weighs one
    over the root of their number, so that its vector has norm one.
    """

    most: int = 16
    name: str = "votes"

    def __post_init__(self) -> None:
        if isinstance(self.most, bool) or not isinstance(self.most, int) or self.most < 1:
            raise SparseDPError(f"votes: most is {self.most!r}, expected a whole number >= 1")

    @property
    def source(self) -> RankedBy:
        """A release of its own."""
        return RankedBy.VOTES

    def update(self, state: RankingState, seen: Observation) -> RankingState:
        """Keep the votes; there is one number for each row or tensor."""
        return {"votes": seen.gradient}

    def order(self, state: RankingState, place: Place) -> Order:
        """By falling number of votes; ties go to the lower row."""
        best = torch.sort(state["votes"], descending=True, stable=True).indices
        return Order(best, place.parts.ranked_groups(place.granularity))


register_ranking(Votes())
