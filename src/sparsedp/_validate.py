"""Checks and exact conversions of single values: shares of a count, numbers as printed, ids of privacy units."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Context, Decimal
from fractions import Fraction
from numbers import Integral, Real
from typing import Any

import numpy as np
import numpy.typing as npt

from sparsedp.errors import DataError, PrivacyError, SparseDPError

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


def rounded_up(bound: float, digits: int = 4) -> str:
    """A number to some significant digits, never less than itself.

    >>> rounded_up(0.99451), rounded_up(3.0), rounded_up(1.1), rounded_up(12345.6)
    ('0.9946', '3', '1.1', '12350')
    """
    if not math.isfinite(bound):
        return f"{bound:g}"
    up = Context(prec=digits, rounding=ROUND_CEILING).plus(Decimal(repr(bound)))
    return f"{float(up):.{max(digits, 6)}g}"


NONE = "–"
"""No number, as printed."""


def count(value: float) -> str:
    return f"{round(value):,}"


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f}\u00a0%"


def significant(value: float, digits: int = 3) -> str:
    """A number to some significant digits; small and large ones with a short exponent.

    >>> significant(0.00001), significant(1.36449), significant(20480.0)
    ('1e-5', '1.36', '20,480')
    """
    if not math.isfinite(value):
        return "∞" if value > 0 else "-∞"
    if value and not 1e-3 <= abs(value) < 1e6:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def epsilon_text(value: float | None) -> str:
    """An epsilon, never less than it is; None is no bound at all."""
    return "∞" if value is None or not math.isfinite(value) else rounded_up(value)


_MISSING = ("", "nan", "NaN", "None", "NaT", "<NA>")
"""A missing id as text; the words are those of Python, NumPy and pandas."""


def refuse_missing_ids(ids: npt.NDArray[Any], name: str) -> None:
    """Refuse ids of which some are missing, also where that was turned into text.

    Formal guarantees: All missing ids would be one unit, and a person with ids on some rows only would be in two.
    """
    if ids.dtype.kind in "iub":
        return
    texts = np.char.decode(ids, "latin-1") if ids.dtype.kind == "S" else ids.astype(str)
    missing = int(np.isin(np.char.strip(texts), _MISSING).sum())
    if missing:
        raise DataError(
            f"{name}: {missing} ids are missing; every row needs one (give each unknown its own, if unknown rows "
            "belong to different people)"
        )


def text(value: object, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise PrivacyError(f"{what}: got {value!r}, expected a text that is not empty")
    return value


def whole(value: object, what: str, *, at_least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < at_least:
        raise PrivacyError(f"{what}: got {value!r}, expected a whole number >= {at_least}")
    return int(value)


def number(value: object, what: str, *, above: float | None = None, at_least: float | None = None) -> float:
    bound = f" > {above:g}" if above is not None else f" >= {at_least:g}" if at_least is not None else ""
    given = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    low = (above is not None and given <= above) or (at_least is not None and given < at_least)
    if low or not math.isfinite(given):
        raise PrivacyError(f"{what}: got {value!r}, expected a finite number{bound}")
    return given


def probability(value: object, what: str) -> float:
    """A sampling rate in (0, 1]."""
    given = number(value, what)
    if not 0 < given <= 1:
        raise PrivacyError(
            f"{what}: got {value!r}, expected a probability in (0, 1]; "
            "the expected batch size must not exceed the number of units"
        )
    return given


def delta_in_range(value: object) -> float:
    given = number(value, "delta")
    if not 0 < given < 1:
        raise PrivacyError(
            f"delta: got {value!r}, expected a number in (0, 1), well below 1 / the number of units"
        )
    return given


def positive_epsilon(value: object) -> float:
    return number(value, "epsilon", above=0.0)
