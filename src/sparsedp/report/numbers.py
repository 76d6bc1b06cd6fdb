"""Numbers as people read them."""

from __future__ import annotations

import math

from sparsedp._validate import rounded_up

NONE = "–"


def count(value: float) -> str:
    """A whole number with thousands apart."""
    return f"{round(value):,}"


def percent(share: float, digits: int = 1) -> str:
    """A share as a percentage."""
    return f"{100 * share:.{digits}f}\u00a0%"


def significant(value: float, digits: int = 3) -> str:
    """A number to some significant digits, small and large ones with a short exponent.

    >>> significant(0.00001), significant(1.36449), significant(20480.0)
    ('1e-5', '1.36', '20,480')
    """
    if not math.isfinite(value):
        return "∞" if value > 0 else "-∞"
    if value and not 1e-3 <= abs(value) < 1e6:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def epsilon_text(value: float | None) -> str:
    """An epsilon, never less than it is; None is none at all."""
    return "∞" if value is None or not math.isfinite(value) else rounded_up(value)
