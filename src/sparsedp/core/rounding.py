"""Bounds as people read them: rounded away from what would flatter."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Context, Decimal


def rounded_up(bound: float, digits: int = 4) -> str:
    """A number to some significant digits, never less than itself.

    >>> rounded_up(0.99451), rounded_up(3.0), rounded_up(1.1), rounded_up(12345.6)
    ('0.9946', '3', '1.1', '12350')
    """
    if not math.isfinite(bound):
        return f"{bound:g}"
    up = Context(prec=digits, rounding=ROUND_CEILING).plus(Decimal(repr(bound)))
    return f"{float(up):.{max(digits, 6)}g}"
