"""Looking at how batches are made: a row must be the same alone and in company."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

from sparsedp.core.batch import Rows, select_rows
from sparsedp.core.errors import PrivacyError
from sparsedp.data.sampling import BatchFetch, Collate
from sparsedp.data.shapes import FixedShapes
from sparsedp.training.state import own_generators

PROBE_ROWS = 8
TOLERANCE = 1e-5
"""Relative difference between a row made alone and in company that rounding does not explain."""


def check_rows_stand_alone(dataset: Dataset[Any], collate: Collate | None, shapes: FixedShapes) -> None:
    """Make the first rows together and one by one, and refuse a `collate` or `rows_at` that mixes them.

    The shapes found here are those that every batch must have.

    **Privacy.** Clipping bounds what a row adds to the sum only if the row does not change the others. A few rows
    cannot show all that a function might do; shapes are compared in every batch.
    **Edge cases.** A random `collate` is refused, for nothing tells random augmentation of single rows from a random
    mixture of them (mixup). Of a random `rows_at` only the shapes are compared.

    Raises:
        PrivacyError: a row depends on those beside it.
    """
    make = _maker(dataset, collate)
    if make is None:
        return
    everything = list(range(min(PROBE_ROWS, len(cast("Any", dataset)))))
    together, again = (_seeded(make, everything, seed) for seed in (0, 1))
    alone = [_seeded(make, [index], 0) for index in everything]
    shapes.check(together, len(everything))
    for row in alone:
        shapes.check(row, 1)
    if not _alike(together, again):
        if collate is None:
            return
        raise PrivacyError(
            "collate makes something else of the same rows each time, so it cannot be checked that it keeps them "
            "apart; move what is random (augmentation, masking) into the data set, where a row stands alone"
        )
    if not all(_alike(select_rows(together, slice(i, i + 1)), alone[i]) for i in everything):
        raise PrivacyError(
            f"{'rows_at' if collate is None else 'collate'} makes something else of a row when other rows are in the "
            "batch, so clipping protects nobody; compute each row from its own item alone"
        )


def _maker(dataset: Dataset[Any], collate: Collate | None) -> Callable[[list[int]], Rows] | None:
    """Makes rows at indices by the user's own function; None if only stacking is done."""
    if collate is not None:
        with own_generators(0, torch.device("cpu")):
            items = [dataset[i] for i in range(min(PROBE_ROWS, len(cast("Any", dataset))))]
        return lambda indices: collate([deepcopy(items[i]) for i in indices])
    if isinstance(dataset, BatchFetch):
        return lambda indices: dataset.rows_at(torch.tensor(indices))
    return None


def _seeded(make: Callable[[list[int]], Rows], indices: list[int], seed: int) -> Rows:
    with own_generators(seed, torch.device("cpu")):
        return make(indices)


def _alike(one: Rows, other: Rows) -> bool:
    """Whether all tensors agree up to rounding; NaN in the same places is no difference."""
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=False)
    return all(_close(a, b) for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor))


def _close(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    x, y = a.double(), b.double()
    finite = x[x.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(x, y, rtol=TOLERANCE, atol=TOLERANCE * scale, equal_nan=True)
