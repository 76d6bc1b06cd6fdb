"""Checks on the numbers a privacy guarantee is made of: the value in its plain Python type, or a clear error."""

from __future__ import annotations

import math
from numbers import Integral, Real

from sparsedp.errors import PrivacyError


def text(value: object, what: str) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value:
        raise PrivacyError(f"{what}: got {value!r}, expected a text that is not empty")
    return value


def whole(value: object, what: str, *, at_least: int) -> int:
    """A whole number with a lower bound."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < at_least:
        raise PrivacyError(f"{what}: got {value!r}, expected a whole number >= {at_least}")
    return int(value)


def number(value: object, what: str, *, above: float | None = None, at_least: float | None = None) -> float:
    """A finite number, above a bound or not below one."""
    bound = f" > {above:g}" if above is not None else f" >= {at_least:g}" if at_least is not None else ""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise PrivacyError(f"{what}: got {value!r}, expected a finite number{bound}")
    given = float(value)
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
    """A delta strictly between 0 and 1."""
    given = number(value, "delta")
    if not 0 < given < 1:
        raise PrivacyError(
            f"delta: got {value!r}, expected a number in (0, 1), well below 1 / the number of units"
        )
    return given


def positive_epsilon(value: object) -> float:
    """A finite epsilon above 0."""
    return number(value, "epsilon", above=0.0)
