"""How rows become batches: whose they are, and how they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, TensorDataset, default_collate

from sparsedp.batch import Batch, concat_batches, example_count
from sparsedp.errors import DataError, PrivacyError
from sparsedp.randomness import GeneratorMonitor, PublicRandomness, StepKey, fork_generators, seed_generators

Indices = npt.NDArray[np.int64]

Collate = Callable[[list[Any]], Batch]
"""Makes a batch of items of a data set, as in a `DataLoader`."""

_CPU = torch.device("cpu")


@runtime_checkable
class BatchFetch(Protocol):
    """A data set that can gather many rows at once."""

    def rows_at(self, indices: Tensor) -> Batch:
        """The rows at these indices, already stacked."""
        ...


def fetch_rows(dataset: Dataset[Any], indices: Indices, collate: Collate | None) -> Batch:
    """The rows at these indices as one batch.

    Items go through the user's `collate` if there is one; without it rows are gathered at once where that works.
    """
    if collate is None and isinstance(dataset, BatchFetch):
        return dataset.rows_at(torch.from_numpy(indices))
    if collate is None and type(dataset) is TensorDataset:
        index = torch.from_numpy(indices)
        return tuple(tensor[index] for tensor in dataset.tensors)
    return (collate or default_collate)([dataset[int(i)] for i in indices])


@final
class RowLoader(Dataset[Any]):
    """Fetches rows for training, each with random numbers of its own.

    Rows are fetched together. If that draws from a global generator (of torch, NumPy or Python), they are fetched
    again, from then on always, one by one, with all three seeded by the step's secret and the row's index.

    Formal guarantees:
        What one row draws does not depend on which others are fetched, in what order or by which process.
    """

    def __init__(self, dataset: Dataset[Any], collate: Collate | None) -> None:
        self._dataset, self._collate = dataset, collate
        self._draws = False

    def __call__(self, indices: Indices, secret: StepKey) -> Batch:
        """The rows at these indices as one batch."""
        if not self._draws:
            watch = GeneratorMonitor(_CPU)
            rows = fetch_rows(self._dataset, indices, self._collate)
            if watch.moved() is None:
                return rows
            self._draws = True
        try:
            return self._one_by_one(indices, secret)
        finally:
            seed_generators(secret.seed(), _CPU)

    def __getitem__(self, asked: tuple[Indices, StepKey]) -> Batch:
        """The same, as a `DataLoader`'s worker asks for it."""
        return self(*asked)

    def _one_by_one(self, indices: Indices, secret: StepKey) -> Batch:
        gathers = self._collate is None and isinstance(self._dataset, BatchFetch)
        found = []
        for i in indices:
            seed_generators(secret.seed(int(i)), _CPU)
            found.append(fetch_rows(self._dataset, np.array([i]), None) if gathers else self._dataset[int(i)])
        if gathers:
            return concat_batches(found)
        watch = GeneratorMonitor(_CPU)
        rows = (self._collate or default_collate)(found)
        if watch.moved() is not None:
            raise PrivacyError(
                "collate draws random numbers, so nothing tells that it keeps rows apart; move what is random "
                "(augmentation, masking) into the data set, where a row is made by itself"
            )
        return rows


def rows_in_order(
    dataset: Dataset[Any], size: int, batch_size: int, collate: Collate | None
) -> Iterator[Batch]:
    """The first `size` rows of a data set, batch by batch, without drawing from any generator."""
    for start in range(0, size, batch_size):
        yield fetch_rows(dataset, np.arange(start, min(start + batch_size, size)), collate)


def first_row(dataset: Dataset[Any], collate: Collate | None) -> Batch:
    """A batch of the first row alone, for its shapes: the same whatever the global generators are at."""
    with fork_generators(PublicRandomness(0).generator_seed(()), _CPU):
        return fetch_rows(dataset, np.array([0]), collate)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DataConfig:
    """How rows become batches.

    Attributes:
        unit_ids: the unit each row belongs to; without it each row is one.
        unit_name: what a unit is called in a new plan; "row" or "unit" if not given.
        rows_per_unit: how many rows of a sampled unit are drawn; their mean gradient is clipped once.
        max_physical_batch: most rows loaded at once; changes no distribution, but with dropout a seeded run's bits.
        num_workers: loading processes. What a random augmentation draws for a row is the same with any number.
        collate_fn: makes a batch of items of the data set, as in a `DataLoader`. Each row from its own item alone:
            pad to one fixed length, never to the longest of the batch.
        sharded: in a run of several processes, each gives its own rows, and no other process has them. Without it
            each gives all rows. How many units all have together is public.
    """

    unit_ids: Tensor | Sequence[int] | None = None
    unit_name: str | None = None
    rows_per_unit: int = 1
    max_physical_batch: int | None = None
    num_workers: int = 0
    collate_fn: Collate | None = None
    sharded: bool = False


@final
class ShapeValidator:
    """Remembers what the first batch looks like, and refuses a batch that looks different.

    Formal guarantees:
        Rows padded to the longest of their batch make a sample's gradient depend on its neighbours: one long record
        changes all the others' gradients, and clipping each bounds nothing. Lengths are private, so no message tells
        one.
    """

    def __init__(self) -> None:
        self._signature: tuple[Any, ...] | None = None

    def check(self, rows: Batch, count: int) -> None:
        """Refuse a batch made of `count` items that has another number of rows, or other shapes than the first."""
        if example_count(rows) != count:
            raise DataError(
                "a batch has another number of rows than items were asked for, and each row is clipped on its own; "
                "make exactly one row of each item"
            )
        common = (bool, int, float, str)  # such values would be those of all rows
        signature = tuple(
            (tuple(leaf.shape[1:]), leaf.dtype) if isinstance(leaf, Tensor) else leaf
            for leaf in pytree.tree_leaves(rows)
            if isinstance(leaf, (Tensor, *common))
        )
        self._signature = self._signature or signature
        if signature != self._signature:
            raise PrivacyError(
                "the shape of a row changes from batch to batch, so what a row looks like depends on the rows beside "
                "it and clipping protects nobody; pad every row to one declared fixed length (in the data set or in "
                "`collate`), never to the longest of the batch, and give numbers of single rows as tensors"
            )
