"""Whether data for evaluation is training data by another name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from sparsedp.core.errors import PrivacyError


def refuse_training_rows(train: Dataset[Any], held_out: Dataset[Any]) -> None:
    """Refuse to evaluate on rows that are trained on, as far as it shows.

    **Privacy.** Metrics are exact and saved with the run: on training rows they are a release without noise.
    **Edge cases.** Found are the same object, parts of it (`Subset`) that share an index, and `TensorDataset`s with a
    row at the same place in memory. Copies of rows are not found.

    Raises:
        PrivacyError: a row is in both.
    """
    mine, theirs = list(_rows_of(train)), list(_rows_of(held_out))
    for one, places in mine:
        for other, others in theirs:
            if one == other and np.intersect1d(places, others).size:
                raise PrivacyError(
                    "eval_dataset holds rows of train_dataset: what is evaluated is outside the guarantee, and exact "
                    "metrics of the training rows would be saved with the run. Give rows that are not trained on, or "
                    "leave it out; to evaluate on training rows nevertheless, pass an evaluate= of your own"
                )


def _rows_of(dataset: Dataset[Any]) -> Iterator[tuple[object, npt.NDArray[np.int64]]]:
    """Ways to tell rows apart: index in the underlying data set, and address of every tensor's row."""
    indices = np.arange(len(cast("Any", dataset)), dtype=np.int64)
    while isinstance(dataset, Subset):
        indices = np.asarray(dataset.indices, dtype=np.int64)[indices]
        dataset = dataset.dataset
    yield id(dataset), indices
    if isinstance(dataset, TensorDataset):
        for tensor in dataset.tensors:
            if tensor.numel() and tensor.stride(0):
                yield (
                    _memory_of(tensor),
                    tensor.data_ptr() + indices * tensor.stride(0) * tensor.element_size(),
                )


def _memory_of(tensor: Tensor) -> object:
    return str(tensor.device), tensor.untyped_storage().data_ptr()
