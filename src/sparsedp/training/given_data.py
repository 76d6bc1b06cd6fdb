"""What people give as a data set, taken for what it is: a loader, a pair of arrays, or a data set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from sparsedp._validate import refuse_missing_ids
from sparsedp.batch import Rows
from sparsedp.errors import DataError

_SOME_ROWS = "For some of the rows give Subset(dataset, indices); processes that train together share them"


@dataclass(frozen=True, slots=True, eq=False)
class GivenData:
    """A map-style data set, and what a loader said besides; `arrays` are X and y as they came, before conversion."""

    dataset: Dataset[Any]
    arrays: tuple[Any, ...] = ()
    from_loader: bool = False
    batch_size: int | None = None
    collate: Callable[[list[Any]], Rows] | None = None


def given_data(given: object, name: str) -> GivenData:
    """The data set in what was given.

    A `DataLoader` gives its data set, batch size and collate: batches are drawn anew, as the guarantee needs.

    Raises:
        DataError: it has no rows that could be drawn by number, or a loader picks among them; and what to do.
    """
    if isinstance(given, DataLoader):
        inner = given_data(given.dataset, name)
        refuse_picked_rows(given, name)
        collate = None if given.collate_fn is default_collate else given.collate_fn
        return GivenData(inner.dataset, inner.arrays, True, given.batch_size, collate)
    if isinstance(given, IterableDataset):
        raise DataError(
            f"{name}: got the IterableDataset {type(given).__name__}, expected rows that can be drawn by number: the "
            "guarantee counts on every row joining a batch with the planned chance. Give it __len__ and __getitem__, "
            "or list(it) if it fits in memory"
        )
    if isinstance(given, tuple) and len(given) != 2 and any(_is_array(part) for part in given):
        raise DataError(
            f"{name}: got a tuple of {len(given)} arrays, expected two, (X, y); for more give TensorDataset(*arrays) "
            "and loss_fn=PerExampleLoss(lambda model, rows: ...)"
        )
    if isinstance(given, (tuple, list)) and len(given) == 2 and all(_is_array(part) for part in given):
        return GivenData(_pair(given[0], given[1], name), tuple(given))
    if _is_array(given):
        raise DataError(f"{name}: got one array, expected (X, y), or a data set of (input, target) rows")
    if not hasattr(given, "__len__") or not hasattr(given, "__getitem__"):
        raise DataError(
            f"{name}: got {type(given).__name__}, expected a map-style data set (with __len__ and __getitem__), a "
            "DataLoader, or a pair (X, y) of arrays"
        )
    return GivenData(given, given.tensors if isinstance(given, TensorDataset) else ())  # type: ignore[arg-type]


def refuse_picked_rows(loader: DataLoader[Any], name: str) -> None:
    """Refuse a loader whose sampler leaves rows out, or takes some more often: here it has no say.

    Raises:
        DataError: its sampler is not a plain one over all rows, or makes whole batches.
    """
    if loader.batch_size is None:
        raise DataError(
            f"{name}: got no batch_size, or a batch_sampler, expected a number: all rows are taken, in batches of "
            f"that size; in training it is the expected one. {_SOME_ROWS}"
        )
    sampler: Any = loader.sampler
    plain = type(sampler) in (RandomSampler, SequentialSampler)
    if not plain or len(sampler.data_source) != len(cast("Any", loader.dataset)):
        raise DataError(
            f"{name}: got the sampler {type(sampler).__name__}, expected a plain one (shuffle=True or False) over "
            "all rows: every row is drawn with the same chance, which the guarantee is computed from, and every "
            f"held-out one is evaluated. {_SOME_ROWS}"
        )


def given_units(units: Any) -> Any:
    """The id of each row's unit, as given.

    Raises:
        DataError: ids are missing, or of types that cannot be compared.
    """
    if units is None or (isinstance(units, Tensor) and not units.is_floating_point()):
        return units
    ids = np.asarray(units)
    refuse_missing_ids(ids, "units")
    try:
        np.unique(ids)
    except TypeError as error:
        raise DataError(f"units: ids of mixed types cannot be compared ({error}); use one type") from error
    return units


def _is_array(value: object) -> bool:
    return isinstance(value, (Tensor, np.ndarray)) or hasattr(value, "to_numpy")


def _pair(features: Any, targets: Any, name: str) -> TensorDataset:
    rows, wanted = _tensor(features), _tensor(targets)
    if rows.dim() == 0 or wanted.dim() == 0 or len(rows) != len(wanted):
        raise DataError(
            f"{name}: got arrays of shapes {tuple(rows.shape)} and {tuple(wanted.shape)}, expected as many targets "
            "as rows"
        )
    return TensorDataset(rows, wanted)


def _tensor(value: Any) -> Tensor:
    """Single precision where it was double, as models are; whole numbers as int64, as losses take them, but bytes."""
    array = value.to_numpy() if hasattr(value, "to_numpy") else value
    if isinstance(array, np.ndarray):
        if array.dtype.kind not in "fiub":
            raise DataError(f"got an array of {array.dtype}, expected numbers; encode names as numbers first")
        array = torch.from_numpy(np.require(array, requirements=["C", "W"]))
    tensor: Tensor = array
    if tensor.dtype in (torch.int8, torch.int16, torch.int32):
        return tensor.long()
    return tensor.float() if tensor.dtype == torch.float64 else tensor
