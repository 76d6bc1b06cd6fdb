"""Shares of a count, exactly: 0.29 means 29/100, so that 0.29 of 100 is 29 and not, as in floating point, 28."""

from __future__ import annotations

import math
from fractions import Fraction

from sparsedp.core.errors import SparseDPError

_FLOAT_ROUNDING = Fraction(1, 2**52)


def exact_ratio(value: float, what: str = "active_ratio") -> Fraction:
    """A ratio in (0, 1] as the decimal number it was written as."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise SparseDPError(f"{what}: got {value!r}, expected a share of the coordinates in (0, 1]")
    return Fraction(repr(value))


def share_of(ratio: Fraction, count: int) -> int:
    """`floor(ratio * count)`, where a product short of a whole number by no more than a float's rounding is whole.

    So 11/30, which as a float is a little less, is 11 of 30.
    """
    return math.floor((ratio + _FLOAT_ROUNDING) * count)
