"""Data sets and collates that mix units are refused, before anything is charged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, TensorDataset

from sparsedp.batch import Batch, slice_batch, tensors_of
from sparsedp.errors import DataError, PrivacyError
from sparsedp.loading import BatchFetch, Collate, RowLoader, ShapeValidator
from sparsedp.randomness import SEED_BYTES, GeneratorMonitor, StepKey, fork_generators
from sparsedp.validation.reads import Reads, Source

logger = logging.getLogger("sparsedp")

PROBE_ROWS = 8
PROBE_SEEDS = 8
"""How often a data set that draws random numbers is asked for an item."""
TOLERANCE = 1e-5
"""Relative difference between a row made alone and beside others that rounding does not explain."""
_CPU = torch.device("cpu")
_TRIAL, _OTHER = StepKey(bytes(SEED_BYTES)), StepKey(bytes([1] * SEED_BYTES))
"""Of trials whose rows go nowhere; no step has them."""


def validate_items(dataset: Dataset[Any], unit_ids: Any = None) -> None:
    """Refuse a data set that makes an item from another unit's rows: mixup, random negatives, nearest neighbours.

    Watched are attributes of the data set with one row for each item (tensors, arrays, memory maps, lists, tuples,
    dicts keyed by index, pandas frames; also inside short lists and dicts), its own `__getitem__` called again, and
    data sets inside it (`Subset`, `ConcatDataset`, Hugging Face), whose rows must be the same at every call and serve
    one unit alone.

    Formal guarantees: indices are noted, never values, so nothing but a refusal itself can depend on the data.
    Edge cases: what has another length than the data set is no table of its rows (vocabularies, class names, offsets
    of length N + 1) and is not watched; nor are transforms, files, globals, C code that takes an array's memory, and
    items that mix rarely. `docs/privacy.md` says so.
    """
    if type(dataset) is TensorDataset:
        return
    length = len(cast("Any", dataset))
    ids = None if unit_ids is None else np.asarray(unit_ids)
    reads = Reads()
    watched = reads.watch_data_set(dataset, type(dataset).__name__, length, inner=False)
    starts = np.linspace(0, max(length - 2, 0), min(PROBE_ROWS, length)).astype(int).tolist()
    probes = sorted({i for start in starts for i in (start, start + 1) if i < length})
    served: dict[tuple[Source, int], int] = {}
    for index in probes:
        own = {index} if ids is None else set(np.flatnonzero(ids == ids[index]).tolist())
        first: dict[Source, set[int]] = {}
        for seed in range(PROBE_SEEDS):
            with fork_generators(_OTHER.seed(seed), _CPU), reads.tensors:
                drawn = GeneratorMonitor(_CPU)
                try:
                    _item(watched, index)
                except Exception as error:
                    logger.info(
                        "the data set's reads are not checked: watched, it raises %s", type(error).__name__
                    )
                    return
                found = reads.taken()
                random = drawn.moved() is not None
            for source, rows in found.items():
                if not source.inner or (source.length == length and rows <= own):
                    foreign = len(rows - own)
                else:
                    others = {served.setdefault((source, row), index) for row in rows} - own
                    foreign = max(1, len(rows) - 1) if others or rows != first.setdefault(source, rows) else 0
                if foreign:
                    raise _foreign(source, foreign)
            if not random:
                break


def _item(dataset: Any, index: int) -> object:
    if isinstance(dataset, BatchFetch):
        return dataset.rows_at(torch.tensor([index]))
    return dataset[index]


def _foreign(source: Source, count: int) -> PrivacyError:
    where = (
        "one other row" if count == 1 else f"{'all' if count >= source.length - 1 else 'several'} other rows"
    )
    return PrivacyError(
        f"for one item of the data set, {source.name} was read at {where}, which belong to other units: an item made "
        "from them tells of them however it is clipped. Make each item from its own row alone (no mixup, no pairs, "
        "negatives or neighbours of other people), or name who each row belongs to in unit_ids. What is public and "
        "just as long belongs in a transform; an order of rows in torch.utils.data.Subset"
    )


def validate_collate(dataset: Dataset[Any], collate: Collate | None, shapes: ShapeValidator) -> None:
    """Make the first rows together and one by one, and refuse items that change and a `collate` that mixes them.

    The shapes found here are those that every batch must have.

    Edge cases: A few rows cannot show all that a function might do; shapes are compared in every batch. A random
    `collate` is refused, for nothing tells random augmentation of single rows from a random mixture of them (mixup).
    A random data set is welcome: its rows are made one by one, each under its own numbers.
    """
    if collate is None and type(dataset) is TensorDataset:
        return
    everything = list(range(min(PROBE_ROWS, len(cast("Any", dataset)))))
    gathers = collate is None and isinstance(dataset, BatchFetch)
    items = _repeatable(partial(_item, dataset) if gathers else cast("Any", dataset).__getitem__, everything)
    if collate is None and not gathers:
        return
    fetch = RowLoader(dataset, None)

    def make(indices: list[int], secret: StepKey) -> Batch:
        with fork_generators(secret.seed(), _CPU):
            chosen = [deepcopy(items[i]) for i in indices]
            return fetch(np.array(indices), secret) if collate is None else collate(chosen)

    together, again = (make(everything, secret) for secret in (_TRIAL, _TRIAL if collate is None else _OTHER))
    alone = [make([index], _TRIAL) for index in everything]
    shapes.check(together, len(everything))
    for row in alone:
        shapes.check(row, 1)
    if not _alike(together, again):
        raise PrivacyError(
            "collate makes something else of the same rows each time, so it cannot be checked that it keeps them "
            "apart; move what is random (augmentation, masking) into the data set, where a row is made by itself"
        )
    if not all(_alike(slice_batch(together, slice(i, i + 1)), alone[i]) for i in everything):
        raise PrivacyError(
            f"{'rows_at' if collate is None else 'collate'} makes something else of a row when other rows are in the "
            "batch, so clipping protects nobody; compute each row from its own item alone"
        )


def _repeatable(get: Callable[[int], Any], indices: list[int]) -> dict[int, Any]:
    """Items made again, in another order, under the same random numbers, or a `PrivacyError`."""
    first: dict[int, Any] = {}
    for i in [*indices, *reversed(indices), *reversed(indices)]:
        with fork_generators(_TRIAL.seed(i), _CPU):
            made = get(i)
        if not _alike(first.setdefault(i, deepcopy(made)), made):
            raise PrivacyError(
                "the data set makes something else of a row under the same random numbers of torch, NumPy and "
                "Python: it draws from a generator of its own, or remembers what it was asked before, so a row "
                "depends on the others in its batch. Draw from the global generators (torch.rand, np.random, "
                "random), which are seeded for every row"
            )
    return first


def _alike(one: Batch, other: Batch) -> bool:
    """Whether all tensors agree up to rounding; NaN in the same places is no difference."""
    kinds = (Tensor, np.ndarray, np.number, bool, int, float)
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=False)
    numbers = ((a, b) for a, b in pairs if isinstance(a, kinds) and isinstance(b, kinds))
    return all(_close(torch.as_tensor(a), torch.as_tensor(b)) for a, b in numbers)


def _close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or not a.is_floating_point():
        return torch.equal(a, b)
    x, y = a.double(), b.double()
    scale = float(x.nan_to_num(0.0, 0.0, 0.0).abs().max()) if x.numel() else 0.0
    return torch.allclose(x, y, rtol=TOLERANCE, atol=TOLERANCE * scale, equal_nan=True)


def refuse_nothing_finite(rows: Batch) -> None:
    """Refuse rows of which no number is finite: they add nothing, so a run would train on noise alone."""
    floats = [leaf for leaf in tensors_of(rows) if leaf.is_floating_point()]
    if floats and not any(bool(leaf.isfinite().any()) for leaf in floats):
        raise DataError(
            "every feature of every row that was looked at is NaN or infinite: such rows add nothing, so the run "
            "would train on noise alone. Look at how the data was read; fill missing values with a public constant"
        )
