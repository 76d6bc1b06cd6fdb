"""From row indices to rows: many at once, and one by one under generators of their own where chance plays a part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, final, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

from sparsedp.batch import Rows, join_rows
from sparsedp.errors import PrivacyError
from sparsedp.randomness import GeneratorWatch, StepSecret, seed_generators

Indices = npt.NDArray[np.int64]

Collate = Callable[[list[Any]], Rows]
"""Makes a batch of items of a data set, as in a `DataLoader`."""

_CPU = torch.device("cpu")


@runtime_checkable
class BatchFetch(Protocol):
    """A data set that can gather many rows at once."""

    def rows_at(self, indices: Tensor) -> Rows:
        """The rows at these indices, already stacked."""
        ...


def fetch_rows(dataset: Dataset[Any], indices: Indices, collate: Collate | None) -> Rows:
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
class Fetcher:
    """Fetches rows for training, each with random numbers of its own.

    Rows are fetched together. If that draws from a global generator (of torch, NumPy or Python), they are fetched
    again, from then on always, one by one, with all three seeded by the step's secret and the row's index.

    **Privacy.** What one row draws does not depend on which others are fetched, in what order or by which process.
    """

    def __init__(self, dataset: Dataset[Any], collate: Collate | None) -> None:
        self._dataset, self._collate = dataset, collate
        self._draws = False

    def __call__(self, indices: Indices, secret: StepSecret) -> Rows:
        """The rows at these indices as one batch.

        Raises:
            PrivacyError: `collate` draws random numbers.
        """
        if not self._draws:
            watch = GeneratorWatch(_CPU)
            rows = fetch_rows(self._dataset, indices, self._collate)
            if watch.moved() is None:
                return rows
            self._draws = True
        try:
            return self._one_by_one(indices, secret)
        finally:
            seed_generators(secret.seed(), _CPU)

    def _one_by_one(self, indices: Indices, secret: StepSecret) -> Rows:
        gathers = self._collate is None and isinstance(self._dataset, BatchFetch)
        found = []
        for i in indices:
            seed_generators(secret.seed(int(i)), _CPU)
            found.append(fetch_rows(self._dataset, np.array([i]), None) if gathers else self._dataset[int(i)])
        if gathers:
            return join_rows(found)
        watch = GeneratorWatch(_CPU)
        rows = (self._collate or default_collate)(found)
        if watch.moved() is not None:
            raise PrivacyError(
                "collate draws random numbers, so nothing tells that it keeps rows apart; move what is random "
                "(augmentation, masking) into the data set, where a row stands alone"
            )
        return rows


def rows_in_order(
    dataset: Dataset[Any], size: int, batch_size: int, collate: Collate | None
) -> Iterator[Rows]:
    """The first `size` rows of a data set, batch by batch, without drawing from any generator."""
    for start in range(0, size, batch_size):
        yield fetch_rows(dataset, np.arange(start, min(start + batch_size, size)), collate)
