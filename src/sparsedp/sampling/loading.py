"""How rows become batches: whose they are, and how they are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sparsedp.sampling.fetching import Collate


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loading:
    """How rows become batches.

    Attributes:
        units: the unit each row belongs to; without it each row is one.
        rows_per_unit: how many rows of a sampled unit are drawn; their mean gradient is clipped once.
        max_physical_batch: most rows loaded at once; changes nothing but memory.
        workers: loading processes. What a random augmentation draws for a row is the same with any number.
        collate: makes a batch of items of the data set, as in a `DataLoader`. Each row from its own item alone: pad
            to one fixed length, never to the longest of the batch.
        sharded: in a run of several processes, each gives its own rows, and no other process has them. Without it
            each gives all rows. How many units all have together is public.
    """

    units: Tensor | Sequence[int] | None = None
    rows_per_unit: int = 1
    max_physical_batch: int | None = None
    workers: int = 0
    collate: Collate | None = None
    sharded: bool = False
