"""A witness of one step: a few rows of a random chunk, as the engine used them, must be what they are alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsedp.batch import MicroBatch
from sparsedp.errors import PrivacyError
from sparsedp.grad_sample.alone import RowsAlone, distances, single_row
from sparsedp.grad_sample.bookkeeping import BookkeepingEngine
from sparsedp.grad_sample.query import Query
from sparsedp.grad_sample.reference import ReferenceEngine
from sparsedp.parameters import Layout

LOOKED_AT, KEPT, ROOM = 2, 8, 1 << 22
"""Rows compared at first, and rows kept to compare when one of them differs, as long as they have room (numbers)."""
SHARE_OF_CLIP = 1e-5
"""A difference below this share of the clip norm is of no account."""

Draw = Callable[[int], int]
"""A secret number below a bound."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """Some rows of a chunk, their gradients on the support and, where known, the norms they were clipped by."""

    rows: list[MicroBatch]
    gradients: Tensor
    norms: Tensor | None


class Witness:
    """Sees every chunk of a step, keeps some rows of one of them, all chunks being equally likely. Private.

    **Privacy.** Which chunk and which rows is drawn from secret randomness: no model can behave just when looked at.
    What is seen lives as long as the step; nothing of it is written or said.
    """

    def __init__(self, alone: RowsAlone, query: Query, draw: Draw) -> None:
        self._alone, self._query, self._draw = alone, query, draw
        self._chunks = 0
        self._kept: _Kept | None = None

    def see(self, chunk: MicroBatch, in_company: Callable[[int], Tensor], norms: Tensor | None) -> None:
        """One chunk: its rows, the gradient the engine has for each of them, and the norms it clips them by."""
        self._chunks += 1
        if self._query.support.size == 0 or self._draw(self._chunks) != 0:
            return
        most = min(KEPT, max(LOOKED_AT, ROOM // self._query.support.size), chunk.row_count)
        places = _distinct(chunk.row_count, most, self._draw)
        self._kept = _Kept(
            [single_row(chunk, i) for i in places],
            torch.stack([in_company(i) for i in places]),
            None if norms is None else norms[places],
        )

    def agrees(self) -> bool:
        """Whether the rows kept were used as they are alone; a single one may differ, by a jump in the model.

        Returns whether all that were compared agree.

        Raises:
            PrivacyError: two rows differ, or all there are.
        """
        if self._kept is None:
            return True
        differing = 0
        for number in range(len(self._kept.rows)):
            differing += self._differs(self._kept, number)
            if differing >= min(2, len(self._kept.rows)):
                raise PrivacyError(
                    "rows have another gradient in their batch than alone, so clipping protects nobody. The model or "
                    "the loss mixes samples, or moves, remembers or counts them, in a way that the check before "
                    "training could not see; write it so that each row stands alone. Nothing of this step is released"
                )
            if number + 1 >= LOOKED_AT and differing == 0:
                break
        return differing == 0

    def _differs(self, kept: _Kept, number: int) -> bool:
        alone = self._measured(self._alone.gradient(kept.rows[number]))
        company = self._query.geometry.forward(kept.gradients[number].double())
        size = float(torch.linalg.vector_norm(alone))
        apart = float(distances(company, alone))
        allowed = self._alone.tolerance * size + SHARE_OF_CLIP * self._clip_norm
        if kept.norms is not None and math.isfinite(used := float(kept.norms[number])) and apart < math.inf:
            apart = max(apart, abs(used - float(torch.linalg.vector_norm(company))))
        if apart <= allowed or (math.isinf(apart) and not math.isfinite(size)):
            return False
        again = self._measured(self._alone.gradient(kept.rows[number]))
        if float(distances(again, alone)) > allowed:
            return True  # it remembers: what jitter does would say nothing
        moved = [self._measured(g) for g in self._alone.jittered(kept.rows[number])]
        rounding = max((float(distances(g, alone)) for g in moved), default=0.0)
        return apart > allowed + 4 * rounding

    def _measured(self, gradient: Tensor) -> Tensor:
        return self._query.geometry.forward(self._query.support.gather(gradient).double())

    @property
    def _clip_norm(self) -> float:
        bound = self._query.clip.sensitivity
        return bound if math.isfinite(bound) else 0.0


class WatchedEngine:
    """An engine that computes its next sum before a witness. Made for one step.

    Attributes:
        agreed: after the sum, whether every row that was compared agreed.
    """

    def __init__(self, engine: BookkeepingEngine | ReferenceEngine, alone: RowsAlone, draw: Draw) -> None:
        self._engine, self._alone, self._draw = engine, alone, draw
        self.agreed = True

    @property
    def layout(self) -> Layout:
        """The flat coordinates of the model's trainable parameters."""
        return self._engine.layout

    def clipped_sum(self, batches: Iterable[MicroBatch], query: Query) -> Tensor:
        """The engine's sum, once the witness has found nothing wrong with it.

        Raises:
            PrivacyError: rows were used that are not what they are alone.
        """
        witness = Witness(self._alone, query, self._draw)
        total = self._engine.clipped_sum(batches, query, witness.see)
        self.agreed = witness.agrees()
        return total


def _distinct(count: int, most: int, draw: Draw) -> list[int]:
    """`most` different numbers below `count`."""
    chosen: list[int] = []
    while len(chosen) < most:
        if (place := draw(count)) not in chosen:
            chosen.append(place)
    return chosen
