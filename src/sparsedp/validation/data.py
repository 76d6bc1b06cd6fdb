"""Looking at how batches are made: a row must be the same alone and in company."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, TensorDataset

from sparsedp.core.batch import Rows, select_rows
from sparsedp.core.chance import StepSecret
from sparsedp.core.errors import PrivacyError
from sparsedp.core.generators import SEED_BYTES, own_generators
from sparsedp.sampling.fetching import BatchFetch, Collate, Fetcher, fetch_rows
from sparsedp.sampling.shapes import FixedShapes

PROBE_ROWS = 8
TOLERANCE = 1e-5
"""Relative difference between a row made alone and in company that rounding does not explain."""
_TRIAL, _OTHER = StepSecret(bytes(SEED_BYTES)), StepSecret(bytes([1] * SEED_BYTES))
"""Of trials whose rows go nowhere; no step has them."""


def validate_data(dataset: Dataset[Any], collate: Collate | None, shapes: FixedShapes) -> None:
    """Make the first rows together and one by one, and refuse items that change and a `collate` that mixes them.

    The shapes found here are those that every batch must have.

    **Privacy.** Clipping bounds what a row adds to the sum only if the row does not change the others. A few rows
    cannot show all that a function might do; shapes are compared in every batch.
    **Edge cases.** A random `collate` is refused, for nothing tells random augmentation of single rows from a random
    mixture of them (mixup). A random data set is welcome: its rows are made one by one, each under its own numbers.

    Raises:
        PrivacyError: a row depends on those beside it, or on which were made before it.
    """
    if collate is None and type(dataset) is TensorDataset:
        return
    everything = list(range(min(PROBE_ROWS, len(cast("Any", dataset)))))
    make = _maker(dataset, collate, everything)
    if make is None:
        return
    together, again = (make(everything, secret) for secret in (_TRIAL, _TRIAL if collate is None else _OTHER))
    alone = [make([index], _TRIAL) for index in everything]
    shapes.check(together, len(everything))
    for row in alone:
        shapes.check(row, 1)
    if not _alike(together, again):
        raise PrivacyError(
            "collate makes something else of the same rows each time, so it cannot be checked that it keeps them "
            "apart; move what is random (augmentation, masking) into the data set, where a row stands alone"
        )
    if not all(_alike(select_rows(together, slice(i, i + 1)), alone[i]) for i in everything):
        raise PrivacyError(
            f"{'rows_at' if collate is None else 'collate'} makes something else of a row when other rows are in the "
            "batch, so clipping protects nobody; compute each row from its own item alone"
        )


def _maker(
    dataset: Dataset[Any], collate: Collate | None, indices: list[int]
) -> Callable[[list[int], StepSecret], Rows] | None:
    """Makes rows at indices by the user's own function; None if only stacking is done."""
    gathers = collate is None and isinstance(dataset, BatchFetch)

    def get(index: int) -> Any:
        return fetch_rows(dataset, np.array([index]), None) if gathers else dataset[index]

    items = _repeatable(get, indices)
    if collate is not None:
        return lambda chosen, secret: _seeded(secret, lambda: collate([deepcopy(items[i]) for i in chosen]))
    if gathers:
        fetch = Fetcher(dataset, None)
        return lambda chosen, secret: _seeded(secret, lambda: fetch(np.array(chosen), secret))
    return None


def _repeatable(get: Callable[[int], Any], indices: list[int]) -> dict[int, Any]:
    """Items made twice, in another order, under the same random numbers.

    Raises:
        PrivacyError: they differ: the data set draws from a generator of its own, or remembers what it was asked.
    """
    first = {i: _seeded(_TRIAL, partial(_copied, get, i), i) for i in indices}
    for _ in range(2):
        for i in reversed(indices):
            if not _alike(first[i], _seeded(_TRIAL, partial(get, i), i)):
                raise PrivacyError(
                    "the data set makes something else of a row under the same random numbers of torch, NumPy and "
                    "Python: it draws from a generator of its own, or remembers what it was asked before, so a row "
                    "depends on the others in its batch. Draw from the global generators (torch.rand, np.random, "
                    "random), which are seeded for every row"
                )
    return first


def _copied(get: Callable[[int], Any], index: int) -> Any:
    return deepcopy(get(index))


def _seeded(secret: StepSecret, make: Callable[[], Any], row: int | None = None) -> Any:
    with own_generators(secret.seed(row), torch.device("cpu")):
        return make()


def _alike(one: Rows, other: Rows) -> bool:
    """Whether all tensors agree up to rounding; NaN in the same places is no difference."""
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=False)
    return all(_close(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs if _comparable(a, b))


def _comparable(a: object, b: object) -> bool:
    kinds = (Tensor, np.ndarray, np.number, bool, int, float)
    return isinstance(a, kinds) and isinstance(b, kinds)


def _close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    x, y = a.double(), b.double()
    finite = x[x.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(x, y, rtol=TOLERANCE, atol=TOLERANCE * scale, equal_nan=True)
