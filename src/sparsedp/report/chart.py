"""Lines, histograms and strips as inline SVG. Colours and fonts come from the page's style sheet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from sparsedp.report.frame import LETTER, Frame, Point, outline
from sparsedp.report.markup import Attributes, Child, Html, plain, tag
from sparsedp.report.scale import Axis


@final
@dataclass(frozen=True, slots=True)
class Series:
    """One line, or a cloud of points that are not joined: its name, its points, and the class that colours it.

    `intervals` are an upright bar through each point, or None for a point without; empty for none at all.
    """

    name: str
    points: tuple[Point, ...]
    style: str
    filled: bool = False
    dashed: bool = False
    dots: bool = True
    joined: bool = True
    intervals: tuple[tuple[float, float] | None, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class Band:
    """A stretch of the horizontal axis with a name, such as the warm-up."""

    start: float
    stop: float
    label: str


@final
@dataclass(frozen=True, slots=True)
class Level:
    """A horizontal line with a name, such as the target."""

    value: float
    label: str


@final
@dataclass(frozen=True, slots=True)
class Bars:
    """A histogram: edges of the bins, and in each bin a part below (coloured) and a part above (grey)."""

    edges: tuple[float, ...]
    below: tuple[int, ...]
    above: tuple[int, ...]


def line_chart(
    width: int,
    x: Axis,
    y: Axis,
    series: Sequence[Series],
    alt: str,
    *,
    bands: Sequence[Band] = (),
    levels: Sequence[Level] = (),
    height: int = 250,
) -> Html:
    """Lines over a common horizontal axis."""
    frame = Frame(width, height, 16 + LETTER * max(len(y.text(v)) for v in y.ticks), x, y)
    return frame.picture(
        alt,
        [_band(frame, band) for band in bands],
        frame.vertical_axis(),
        frame.horizontal_axis(),
        [_area(frame, line) for line in series if line.filled],
        [_level(frame, level) for level in levels],
        [_line(frame, line) for line in series],
    )


def histogram(width: int, x: Axis, y: Axis, bars: Bars, alt: str, *, threshold: float | None = None) -> Html:
    """A histogram of two stacked parts; a threshold is a vertical line between them."""
    frame = Frame(width, 250, 16 + LETTER * max(len(y.text(v)) for v in y.ticks), x, y)
    drawn = []
    for i, (below, above) in enumerate(zip(bars.below, bars.above, strict=True)):
        left, right = frame.across(bars.edges[i]), frame.across(bars.edges[i + 1])
        for low, high, style in ((0, below, "bar kept"), (below, below + above, "bar frozen")):
            if high > low:
                top, floor = frame.down(high), frame.down(low)
                place: Attributes = {
                    "x": left + 0.4,
                    "y": top,
                    "width": max(right - left - 0.8, 0.4),
                    "height": floor - top,
                }
                drawn.append(tag("rect", {**place, "class": style}))
    parts: list[Child] = [frame.vertical_axis(), drawn, frame.horizontal_axis()]
    if threshold is not None:
        place_x = frame.across(threshold)
        line: Attributes = {
            "x1": place_x,
            "x2": place_x,
            "y1": frame.top,
            "y2": frame.floor,
            "class": "level",
        }
        near_end = place_x > width * 0.6
        text = {"x": place_x + (-6 if near_end else 6), "y": frame.top + 10}
        parts += [
            tag("line", line),
            tag("text", {**text, "class": "note end" if near_end else "note"}, "kept from here on"),
        ]
    return frame.picture(alt, *parts)


def strip(shares: Sequence[float], alt: str, style: str = "strip") -> Html:
    """A row of cells, each as opaque as its share; stretches to any width."""
    cells, start = [], 0
    for end in range(1, len(shares) + 1):
        if end == len(shares) or shares[end] != shares[start]:
            if shares[start] > 0:
                place: Attributes = {"x": start, "y": 0, "width": end - start, "height": 1}
                cells.append(tag("rect", {**place, "fill-opacity": plain(max(shares[start], 0.06))}))
            start = end
    box = {"viewBox": f"0 0 {len(shares)} 1", "preserveAspectRatio": "none", "shape-rendering": "crispEdges"}
    return tag("svg", {**box, "role": "img", "aria-label": alt, "class": style}, *cells)


def _line(frame: Frame, series: Series) -> list[Html]:
    places = [frame.at(*point) for point in series.points]
    shape: Attributes = {"points": " ".join(f"{plain(x)},{plain(y)}" for x, y in places), "fill": "none"}
    style = f"stroke {series.style}{' dashed' if series.dashed else ''}"
    parts = [tag("polyline", {**shape, "class": style})] if series.joined and len(places) > 1 else []
    for (x, _), interval in zip(places, series.intervals, strict=False):
        if interval is not None:
            parts += _upright_interval(frame, x, interval, series.style)
    if series.dots:
        for (value_x, value_y), (x, y) in zip(series.points, places, strict=True):
            said = f"{series.name}: {frame.y.text(value_y)} at {frame.x.text(value_x)}"
            dot: Attributes = {
                "cx": x,
                "cy": y,
                "r": 3 if len(places) <= 40 else 1.6,
                "class": f"dot {series.style}",
            }
            parts.append(tag("circle", dot, tag("title", None, said)))
    return parts


def _upright_interval(frame: Frame, x: float, interval: tuple[float, float], style: str) -> list[Html]:
    low, high = (frame.down(end) for end in interval)
    bar: Attributes = {"x1": x, "x2": x, "y1": low, "y2": high, "class": f"whisker {style}"}
    caps = [
        tag("line", {"x1": x - 4, "x2": x + 4, "y1": y, "y2": y, "class": f"cap {style}"})
        for y in (low, high)
    ]
    return [tag("line", bar), *caps]


def _area(frame: Frame, series: Series) -> Html:
    places = [frame.at(*point) for point in series.points]
    floor = frame.floor
    corners = [(places[0][0], floor), *places, (places[-1][0], floor)]
    return tag("path", {"d": outline(corners), "class": f"area {series.style}"})


def _band(frame: Frame, band: Band) -> list[Html]:
    start, stop = frame.across(band.start), frame.across(band.stop)
    place: Attributes = {
        "x": start,
        "y": frame.top,
        "width": stop - start,
        "height": frame.floor - frame.top,
    }
    label: Attributes = {"x": start + 1, "y": frame.top - 5, "class": "note"}
    fits = LETTER * len(band.label) + 8 <= stop - start
    return [tag("rect", {**place, "class": "band"}), *([tag("text", label, band.label)] if fits else [])]


def _level(frame: Frame, level: Level) -> list[Html]:
    y = frame.down(level.value)
    line: Attributes = {"x1": frame.left, "x2": frame.width - frame.right, "y1": y, "y2": y, "class": "level"}
    return [
        tag("line", line),
        tag("text", {"x": frame.left + 5, "y": y - 5, "class": "note"}, level.label),
    ]
