"""Whether shards are apart: a unit on two ranks would be drawn twice, and bounded on each by itself."""

from __future__ import annotations

import secrets
from hashlib import blake2b
from itertools import combinations
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, TensorDataset

from sparsedp.batch import Rows
from sparsedp.errors import DataError
from sparsedp.loading import BatchFetch, Collate, rows_in_order
from sparsedp.randomness import PublicRandomness, own_generators
from sparsedp.ranks.one import Ranks

IN_MEMORY, LOADED = 1 << 18, 256
"""Rows of a shard that are looked at, from its first on: of data that can be gathered at once, and of other data."""

_AT_ONCE = 4096

Digests = npt.NDArray[np.uint64]


def refuse_shared_units(ranks: Ranks, units: npt.NDArray[Any]) -> None:
    """See that no two ranks have rows of one unit.

    Raises:
        DataError: on every rank, naming two that do.
    """
    held = ranks.gather(units)
    for one, other in combinations(range(len(held)), 2):
        if len(np.intersect1d(held[one], held[other])):
            raise DataError(
                f"ranks {one} and {other} both hold rows of one unit, which would be drawn twice; put all rows "
                "of a unit on one rank"
            )


def refuse_shared_rows(ranks: Ranks, dataset: Dataset[Any], collate: Collate | None) -> None:
    """See that shards whose rows are the units are not copies of each other.

    Ranks compare digests under a key that is drawn for this and kept nowhere.

    **Edge cases.** Two rows that are equal may be two people. So two shards are refused if all their rows are the
    same, in whatever order, or if of those that a shard has only once more than half of its rows are in another.

    Raises:
        DataError: on every rank, naming two that hold the same rows.
    """
    if ranks.count == 1:
        return
    key = ranks.from_leader(lambda: secrets.token_bytes(32))
    held = ranks.gather(ranks.jointly(lambda: _digests(dataset, collate, key)))
    for one, other in combinations(range(len(held)), 2):
        if _are_copies(held[one], held[other]):
            raise DataError(
                f"ranks {one} and {other} hold the same rows, which would be drawn twice; with sharded=True each "
                "rank gives its own rows alone. Cut the data first, or give all on every rank and leave sharded out"
            )


def _digests(dataset: Dataset[Any], collate: Collate | None, key: bytes) -> Digests:
    """Of the first rows of a shard. Private."""
    at_once = collate is None and (isinstance(dataset, BatchFetch) or type(dataset) is TensorDataset)
    size = min(len(cast("Any", dataset)), IN_MEMORY if at_once else LOADED)
    found: list[bytes] = []
    with own_generators(PublicRandomness(0).generator_seed(()), torch.device("cpu")):
        for rows in rows_in_order(dataset, size, _AT_ONCE, collate):
            found += _row_by_row(rows, key)
    return np.frombuffer(b"".join(found), dtype=np.uint64)


def _row_by_row(rows: Rows, key: bytes) -> list[bytes]:
    leaves = [leaf for leaf in pytree.tree_leaves(rows) if isinstance(leaf, Tensor) and leaf.numel()]
    tables = [_as_bytes(leaf) for leaf in leaves]
    return [
        blake2b(b"".join(row.tobytes() for row in parts), key=key, digest_size=8).digest()
        for parts in zip(*tables, strict=True)
    ]


def _as_bytes(leaf: Tensor) -> npt.NDArray[np.uint8]:
    plain = leaf.detach().to_dense() if leaf.layout is not torch.strided else leaf.detach()
    table: npt.NDArray[np.uint8] = plain.cpu().contiguous().reshape(len(plain), -1).view(torch.uint8).numpy()
    return table


def _are_copies(one: Digests, other: Digests) -> bool:
    if not len(one) or not len(other):
        return False
    if np.array_equal(np.sort(one), np.sort(other)):
        return True
    shared = np.intersect1d(_only_once(one), _only_once(other), assume_unique=True)
    return 2 * len(shared) > min(len(one), len(other))


def _only_once(digests: Digests) -> Digests:
    values, counts = np.unique(digests, return_counts=True)
    once: Digests = values[counts == 1]
    return once
