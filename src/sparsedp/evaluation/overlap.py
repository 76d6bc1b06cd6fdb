"""Held-out rows that are training rows are refused, as far as it shows: the same objects, the same memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from sparsedp.errors import PrivacyError

_MOST_WORK = 1_000_000
"""How long `np.shares_memory` may search among strides that are hard to tell apart."""


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
                raise _in_both("eval_dataset", "train_dataset")


def refuse_training_arrays(
    train: Sequence[Any],
    held_out: Sequence[Any],
    *,
    names: tuple[str, str] = ("eval_dataset", "train_dataset"),
) -> None:
    """Refuse arrays or frames that are training data, or views of it, as they were given: a conversion copies them.

    **Edge cases.** Frames are compared column by column, sparse matrices by what they store; of lists only the same
    object is found, and copies of rows are not.

    Args:
        train: what is trained on, such as X and y.
        held_out: what is evaluated on.
        names: what the caller calls the two, held-out first.

    Raises:
        PrivacyError: some of it is in both.
    """
    same = {id(one) for one in train} & {id(one) for one in held_out}
    if same or _share_memory(_memory_of_all(train), _memory_of_all(held_out)):
        raise _in_both(*names)


def _in_both(held_out: str, train: str) -> PrivacyError:
    own = "; to evaluate on training rows nevertheless, pass an evaluate= of your own"
    return PrivacyError(
        f"{held_out} holds rows of {train}: what is evaluated is outside the guarantee, and exact metrics of the "
        "training rows would be saved with the run. Give rows that are not trained on, or leave it out"
        f"{own if held_out == 'eval_dataset' else ''}"
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
                    _storage_of(tensor),
                    tensor.data_ptr() + indices * tensor.stride(0) * tensor.element_size(),
                )


def _storage_of(tensor: Tensor) -> object:
    return str(tensor.device), tensor.untyped_storage().data_ptr()


def _memory_of_all(given: Iterable[Any]) -> list[npt.NDArray[Any]]:
    """Arrays over the memory of what was given, without constants that are spread over all rows."""
    found = [array for one in given for array in _memory_of(one)]
    return [array for array in found if array.size and array.ndim and array.strides[0]]


def _memory_of(given: Any) -> Iterator[npt.NDArray[Any]]:
    if isinstance(given, np.ndarray):
        yield given
    elif isinstance(given, Tensor):
        # What NumPy cannot see is not converted either, so that `refuse_training_rows` finds its rows.
        with suppress(TypeError, RuntimeError):
            yield given.detach().numpy()
    elif hasattr(given, "columns") and hasattr(given, "to_numpy"):
        yield from (np.asarray(given[name].to_numpy()) for name in dict.fromkeys(given.columns))
    elif hasattr(given, "to_numpy"):
        yield np.asarray(given.to_numpy())
    elif isinstance(getattr(given, "data", None), np.ndarray):
        yield given.data


def _share_memory(mine: list[npt.NDArray[Any]], theirs: list[npt.NDArray[Any]]) -> bool:
    bounds = np.array([_bounds(array) for array in theirs], dtype=np.int64).reshape(-1, 2)
    for array in mine:
        low, high = _bounds(array)
        near = np.flatnonzero((bounds[:, 0] < high) & (bounds[:, 1] > low))
        if any(_overlap(array, theirs[place]) for place in near):
            return True
    return False


def _bounds(array: npt.NDArray[Any]) -> tuple[int, int]:
    """The first address of an array, and the one after its last."""
    reach = [stride * (size - 1) for stride, size in zip(array.strides, array.shape, strict=True)]
    low = array.ctypes.data + sum(one for one in reach if one < 0)
    return low, low + sum(map(abs, reach)) + array.itemsize


def _overlap(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    try:
        return np.shares_memory(one, other, max_work=_MOST_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return False
