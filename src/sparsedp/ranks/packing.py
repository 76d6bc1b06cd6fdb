"""Float64 sums whose addition is exact in any order: for the ablations, which have no grid."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from sparsedp.errors import SparseDPError

STEPS = (2.0**-20, 2.0**-70, 2.0**-120)
"""A number is cut into three whole ones, of these steps: exact up to 2^40, and down to 2^-120."""
_LARGEST = 2.0**40


def packed(parts: Iterable[Tensor]) -> Tensor:
    """The sum of float64 vectors as int64 numbers, three for each coordinate.

    Raises:
        SparseDPError: a number is not finite, or too large.
    """
    total: Tensor | None = None
    for part in parts:
        rest = part.to(torch.float64)
        if not bool((rest.abs() < _LARGEST).all()):
            raise SparseDPError(
                "the sum of gradients is not finite or too large to add up over ranks; use a smaller learning rate"
            )
        pieces = []
        for step in STEPS:
            whole = torch.round(rest / step)
            rest = rest - whole * step
            pieces.append(whole.to(torch.int64))
        piece = torch.cat(pieces)
        total = piece if total is None else total.add_(piece)
    if total is None:
        raise SparseDPError("a sum without parts has no size; give at least one part, of zeros if need be")
    return total


def unpacked(total: Tensor) -> Tensor:
    """The float64 vector that the integers stand for; the smallest pieces are added first."""
    large, middle, small = (
        piece.to(torch.float64) * step for piece, step in zip(total.view(3, -1), STEPS, strict=True)
    )
    value: Tensor = (small + middle) + large
    return value
