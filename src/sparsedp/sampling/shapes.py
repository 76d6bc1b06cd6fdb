"""One shape for every batch of a run, so that no row's shape depends on the rows beside it."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor
from torch.utils import _pytree as pytree

from sparsedp.batch import Rows, row_count
from sparsedp.errors import DataError, PrivacyError

Signature = tuple[Any, ...]


@final
class FixedShapes:
    """Remembers what the first batch looks like, and refuses a batch that looks different.

    **Privacy.** Rows padded to the longest of their batch make a sample's gradient depend on its neighbours: one long
    record changes all the others' gradients, and clipping each bounds nothing. Lengths are private, so no message
    tells one.
    """

    def __init__(self) -> None:
        self._signature: Signature | None = None

    def check(self, rows: Rows, count: int) -> None:
        """Refuse a batch made of `count` items that has another number of rows, or other shapes than the first.

        Raises:
            DataError: not one row for each item.
            PrivacyError: the shapes differ.
        """
        if row_count(rows) != count:
            raise DataError(
                "a batch has another number of rows than items were asked for, and each row is clipped on its own; "
                "make exactly one row of each item"
            )
        signature = signature_of(rows)
        if self._signature is None:
            self._signature = signature
        elif signature != self._signature:
            raise PrivacyError(
                "the shape of a row changes from batch to batch, so what a row looks like depends on the rows beside "
                "it and clipping protects nobody; pad every row to one declared fixed length (in the data set or in "
                "`collate`), never to the longest of the batch, and give numbers of single rows as tensors"
            )


def signature_of(rows: Rows) -> Signature:
    """Shape of a row and type of every tensor, and every plain number, which would be common to all rows."""
    leaves = pytree.tree_leaves(rows)
    return tuple(
        (tuple(leaf.shape[1:]), leaf.dtype) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
        if isinstance(leaf, (Tensor, bool, int, float))
    )
