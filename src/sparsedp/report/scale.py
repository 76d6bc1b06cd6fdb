"""From values to places on the page: linear and symmetric-logarithmic axes with round ticks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

from sparsedp.report.numbers import significant


@final
@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: what it shows, from where to where, and how its ticks read.

    Attributes:
        label: what the numbers are.
        low: value at its start.
        high: value at its end, above `low`.
        ticks: values marked on it.
        text: writes a tick.
        unit: None for a linear axis; else it is linear up to about `unit` and logarithmic beyond.
    """

    label: str
    low: float
    high: float
    ticks: tuple[float, ...]
    text: Callable[[float], str] = field(default=significant)
    unit: float | None = None

    def place(self, value: float, start: float, end: float) -> float:
        """Where a value lies between two places on the page."""
        low, high, here = (self._bent(number) for number in (self.low, self.high, value))
        return start + (here - low) / (high - low) * (end - start)

    def _bent(self, value: float) -> float:
        return value if self.unit is None else math.asinh(value / self.unit)


def linear_axis(
    label: str,
    low: float,
    high: float,
    *,
    text: Callable[[float], str] = significant,
    ticks: int = 5,
    whole: bool = False,
) -> Axis:
    """A linear axis that covers low..high and ends on round numbers; with `whole`, ticks are whole numbers."""
    if not high > low:
        half = abs(low) * 0.1 or 0.5
        low, high = low - half, high + half
    step = round_step((high - low) / ticks)
    if whole:
        step = max(1.0, float(round(step)))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    marks = tuple(step * i for i in range(first, max(last, first + 1) + 1))
    return Axis(label, marks[0], marks[-1], marks, text)


def symmetric_log_axis(label: str, low: float, high: float, unit: float) -> Axis:
    """An axis through zero, linear within about `unit` of it and logarithmic beyond: for scores of both signs."""
    decades = range(-3, 40)
    marks = [0.0] + [sign * unit * 10.0**e for e in decades[3:] for sign in (-1, 1)]
    inside = sorted(mark for mark in marks if low <= mark <= high)
    return Axis(label, low, high, tuple(inside), lambda value: significant(value, 1) if value else "0", unit)


def round_step(rough: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * nice for nice in (1.0, 2.0, 2.5, 5.0, 10.0) if power * nice >= rough * (1 - 1e-9))
