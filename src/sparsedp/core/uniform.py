"""Coins and whole numbers of exactly the law they are said to have, from uniform 64-bit words."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from sparsedp.core.errors import SparseDPError

Words = Callable[[int], npt.NDArray[np.uint64]]
"""Gives that many fresh, independent, uniform 64-bit words."""

_ALL = 2**64


def coins(probability: float, size: int, words: Words) -> npt.NDArray[np.bool_]:
    """`size` coins, each true with probability exactly the rational number that the float `probability` is.

    A coin is a comparison of a uniform number in [0, 1) with it, 64 binary digits after 64 until they differ.
    """
    if not 0 <= probability <= 1:
        raise SparseDPError(f"probability: got {probability}, expected a number in [0, 1]")
    drawn = words(size)
    if probability == 1:
        return np.ones(size, dtype=np.bool_)
    digits, rest = divmod(Fraction(probability) * _ALL, 1)
    result: npt.NDArray[np.bool_] = drawn < np.uint64(digits)
    if rest:
        tied = np.flatnonzero(drawn == np.uint64(digits))
        result[tied] = coins(float(rest), len(tied), words)
    return result


def below(bounds: npt.NDArray[np.int64], words: Words) -> npt.NDArray[np.int64]:
    """One whole number for each bound, exactly uniform in 0..bound-1; words past the last full round are redrawn."""
    if len(bounds) and int(bounds.min()) < 1:
        raise SparseDPError(f"bounds: got {int(bounds.min())}, expected whole numbers >= 1")
    wide = bounds.astype(np.uint64)
    too_high = (np.uint64(_ALL - 1) - wide + np.uint64(1)) % wide  # 2^64 mod bound
    drawn = words(len(bounds)).copy()
    while len(again := np.flatnonzero(drawn > np.uint64(_ALL - 1) - too_high)):
        drawn[again] = words(len(again))
    return (drawn % wide).astype(np.int64)
