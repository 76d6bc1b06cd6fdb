"""A line chart as inline SVG. Colours and fonts come from the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from markupsafe import Markup

from sparsedp._validate import significant

WIDTH, HEIGHT = 520, 250
TOP, RIGHT, BOTTOM = 20.0, 22.0, 44.0
LETTER = 6.7
"""Width of a letter of the 12-pixel type, about."""

TINY = 1e-290
"""Differences below this are none."""

Point = tuple[float, float]


@final
@dataclass(frozen=True, slots=True)
class Axis:
    """One linear axis: what it shows, its ticks from the first to the last value, and how a value reads."""

    label: str
    ticks: tuple[float, ...]
    text: Callable[[float], str] = significant

    def place(self, value: float, start: float, end: float) -> float:
        """Map a value to a place between two places on the page."""
        low, high = self.ticks[0], self.ticks[-1]
        return start + (value - low) / (high - low) * (end - start)


def round_axis(
    label: str, values: Sequence[float], text: Callable[[float], str] = significant, *, whole: bool = False
) -> Axis:
    """Make an axis that covers all values and has round ticks; whole numbers if `whole`."""
    low, high = min(values), max(values)
    size = max(abs(low), abs(high))
    if high - low <= max(1e-9 * size, TINY):  # all one value, but for rounding
        half = 0.1 * size if size > TINY else 0.5
        low, high = low - half, high + half
    power = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = next(power * nice for nice in (1.0, 2.0, 2.5, 5.0, 10.0) if power * nice >= (high - low) / 5.001)
    if whole:
        step = max(1.0, float(round(step)))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Axis(label, tuple(step * i for i in range(first, max(last, first + 1) + 1)), text)


def line_chart(
    x: Axis,
    y: Axis,
    points: Sequence[Point],
    alt: str,
    *,
    band: tuple[str, float] | None = None,
    level: tuple[str, float] | None = None,
) -> Markup:
    """Draw a line through points, beside a named first part (`band`) and a named height (`level`)."""
    left, floor = 16 + LETTER * max(len(y.text(tick)) for tick in y.ticks), HEIGHT - BOTTOM
    right = WIDTH - RIGHT

    def across(value: float) -> float:
        return x.place(value, left, right)

    def down(value: float) -> float:
        return y.place(value, floor, TOP)

    parts = []
    if band is not None:
        width = across(band[1]) - left
        parts.append(_tag("rect", "band", x=left, y=TOP, width=width, height=floor - TOP))
        if LETTER * len(band[0]) + 8 <= width:
            parts.append(_text(band[0], "note", left + 1, TOP - 5))
    for tick in y.ticks:
        parts.append(_rule("grid", left, down(tick), right, down(tick)))
        parts.append(_text(y.text(tick), "tick end", left - 7, down(tick) + 4))
    parts.append(_rule("floor", left, floor, right, floor))
    parts += [_text(x.text(one), "tick middle", across(one), floor + 18) for one in _spaced(x, right - left)]
    parts.append(_text(x.label, "axis middle", (left + right) / 2, HEIGHT - 6))
    if level is not None:
        named, height = level[0], down(level[1])
        parts.append(_rule("level", left, height, right, height))
        room = height - TOP > 2 * LETTER
        parts.append(_text(named, "note", left + 5, height - 5 if room else height + 2 * LETTER))
    places = [(across(a), down(b)) for a, b in points]
    if len(places) > 1:
        corners = " ".join(f"{_plain(a)},{_plain(b)}" for a, b in places)
        parts.append(Markup('<polyline class="stroke main" points="{}"/>').format(corners))
    radius = 3 if len(places) <= 40 else 1.6
    for (a, b), (across_a, down_b) in zip(points, places, strict=True):
        told = Markup("<title>{}: {} at {}</title>").format(y.label, y.text(b), x.text(a))
        parts.append(_tag("circle", "dot main", told, cx=across_a, cy=down_b, r=radius))
    return Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}" class="chart">{}</svg>').format(
        WIDTH, HEIGHT, alt, Markup("").join(parts)
    )


def _spaced(axis: Axis, room: float) -> tuple[float, ...]:
    """As many ticks as fit beside each other, evenly."""
    width = LETTER * max(len(axis.text(value)) for value in axis.ticks) + 8
    return axis.ticks[:: math.ceil(width * (len(axis.ticks) - 1) / room)]


def _tag(name: str, style: str, content: str = "", **numbers: float) -> Markup:
    attributes = Markup("").join(Markup(' {}="{}"').format(key, _plain(one)) for key, one in numbers.items())
    return Markup('<{} class="{}"{}>{}</{}>').format(name, style, attributes, content, name)


def _rule(style: str, x1: float, y1: float, x2: float, y2: float) -> Markup:
    return _tag("line", style, x1=x1, y1=y1, x2=x2, y2=y2)


def _text(text: str, style: str, x: float, y: float) -> Markup:
    return _tag("text", style, text, x=x, y=y)


def _plain(value: float) -> str:
    """A number with at most two decimals, the same on every machine."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text
