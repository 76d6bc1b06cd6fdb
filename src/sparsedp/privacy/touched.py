"""How many units touch each of some rows: a sum bounded unit by unit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from sparsedp.batch import MicroBatch
from sparsedp.core.clip import Clip


@final
@dataclass(frozen=True, slots=True, eq=False)
class TouchedSum:
    """The sum over units of their indicator vectors, each scaled to the clip's norm at most (DP-FEST, Sec. 3.1).

    A unit's vector is 1 for every row that any of its samples touches, however often, and 0 elsewhere.

    **Privacy.** Scaled unit by unit, so adding or removing one moves the sum by at most the clip norm.
    **Edge cases.** A unit that touches nothing, or padding alone, adds zero.

    Attributes:
        batches: the units. Private.
        look: the pairs of unit and row of a batch. Private.
        rows: how many rows there are; public.
        clip: the bound on a unit's vector.
    """

    batches: Iterable[MicroBatch]
    look: Callable[[MicroBatch], tuple[Tensor, Tensor]]
    rows: int
    clip: Clip

    @property
    def size(self) -> int:
        """One number per row."""
        return self.rows

    @property
    def sensitivity(self) -> float:
        """The clip's."""
        return self.clip.sensitivity

    def parts(self, bound: float) -> Iterator[Tensor]:
        """The sum, micro-batch by micro-batch."""
        clip = self.clip.tightened(bound)
        yield torch.zeros(self.rows, dtype=torch.float64)
        for batch in self.batches:
            units, touched = self.look(batch)
            pairs = torch.unique(units * self.rows + touched) if self.rows else touched
            owners, places = pairs // max(1, self.rows), pairs % max(1, self.rows)
            norms = torch.bincount(owners, minlength=1).double().sqrt()
            part = torch.zeros(self.rows, dtype=torch.float64)
            yield part.index_add_(0, places, clip.factors(norms)[owners])
