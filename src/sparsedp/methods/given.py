"""A ranking by public knowledge alone: it is ready before the first step, and costs nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsedp.errors import SparseDPError
from sparsedp.methods.granularity import Granularity
from sparsedp.methods.knowledge import NEVER, Knowledge
from sparsedp.methods.order import Order, TableRows
from sparsedp.methods.rankings import Place, RankedBy, RankingState, WithoutScores, register_ranking


@dataclass(frozen=True, slots=True)
class Given(WithoutScores):
    """By the user's public scores, or by the weights' magnitude where there are none.

    `checksum` names the scores, so that a plan says which they were; it is empty for the weights' magnitude.
    """

    checksum: str = ""
    name: str = "given"

    @property
    def source(self) -> RankedBy:
        """Public knowledge."""
        return RankedBy.PUBLIC

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

    def order(self, state: RankingState, place: Place) -> Order:
        """By falling score; ties go to the lower index, and what has the score -inf is left out."""
        found = self._found(place)
        if not found.items.numel() and place.parts.ranked and not place.parts.always:
            raise SparseDPError("public_scores: every score is -inf or false, so nothing would be trained")
        return found

    def _found(self, place: Place) -> Order:
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
