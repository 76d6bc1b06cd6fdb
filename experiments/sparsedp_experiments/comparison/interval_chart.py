"""Dots, means and intervals as inline SVG, one row for each name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from sparsedp.report.frame import LETTER, Frame, outline, ticks_that_fit
from sparsedp.report.markup import Attributes, Child, Html, tag
from sparsedp.report.scale import Axis

ROW = 30
"""Height of a row."""


@final
@dataclass(frozen=True, slots=True)
class Interval:
    """One row of an interval chart: single values as dots, their mean, and an interval around it if there is one."""

    name: str
    dots: tuple[float, ...]
    mean: float
    low: float | None
    high: float | None
    style: str
    text: str


def interval_chart(
    width: int, x: Axis, rows: Sequence[Interval], alt: str, *, reference: float | None = None
) -> Html:
    """One row per name: a dot for each value, a diamond for the mean, a bar for the interval.

    Names stand on the left, or above their rows where they are too long for that. An interval that reaches beyond the
    axis is cut there, without an end mark.
    """
    left = 14 + LETTER * max(len(row.name) for row in rows)
    above = left > 0.42 * width
    row_height = ROW + 18 if above else ROW
    frame = Frame(width, row_height * len(rows) + 64, 16 if above else left, x, Axis("", 0, 1, ()))
    parts: list[Child] = []
    for value in ticks_that_fit(x, width - frame.left - frame.right):
        parts.append(_upright(frame, value, "grid"))
    if reference is not None:
        parts.append(_upright(frame, reference, "level"))
    parts.append(frame.horizontal_axis())
    for i, row in enumerate(rows):
        bottom = frame.top + row_height * (i + 1)
        place: Attributes = {"x": 4.0, "y": bottom - ROW - 1, "class": "name"}
        if not above:
            place = {"x": frame.left - 8, "y": bottom - ROW / 2 + 4, "class": "name end"}
        parts.append(_interval(frame, row, bottom - ROW / 2, tag("text", place, row.name)))
    return frame.picture(alt, *parts)


def _upright(frame: Frame, value: float, style: str) -> Html:
    at = frame.across(value)
    return tag("line", {"x1": at, "x2": at, "y1": frame.top, "y2": frame.floor, "class": style})


def _interval(frame: Frame, row: Interval, y: float, name: Html) -> Html:
    parts: list[Child] = [name]
    if row.low is not None and row.high is not None:
        axis = frame.x
        start, stop = frame.across(max(row.low, axis.low)), frame.across(min(row.high, axis.high))
        parts.append(
            tag("line", {"x1": start, "x2": stop, "y1": y, "y2": y, "class": f"whisker {row.style}"})
        )
        for end in (row.low, row.high):
            if axis.low <= end <= axis.high:
                at = frame.across(end)
                cap: Attributes = {"x1": at, "x2": at, "y1": y - 5, "y2": y + 5, "class": f"cap {row.style}"}
                parts.append(tag("line", cap))
    for value in row.dots:
        dot: Attributes = {"cx": frame.across(value), "cy": y + 10, "r": 2.4, "class": f"seed {row.style}"}
        parts.append(tag("circle", dot))
    x = frame.across(row.mean)
    corners = [(x - 6, y), (x, y - 6), (x + 6, y), (x, y + 6)]
    parts.append(tag("path", {"d": outline(corners), "class": f"mean {row.style}"}))
    return tag("g", None, tag("title", None, f"{row.name}: {row.text}"), *parts)
