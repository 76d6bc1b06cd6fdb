"""What can be drawn in a panel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from sparsedp.report.frame import Frame, Point, outline
from sparsedp.report.markup import Attributes, Child, Html, plain, tag
from sparsedp.report.statistics import estimate

SOLID, DASHED, DOTTED = "", "dashed", "dotted"


@final
@dataclass(frozen=True, slots=True)
class Curve:
    """A line through points; `low` and `high` shade an interval around it.

    **Edge cases.** What lies outside the axes is cut off.
    """

    points: Sequence[Point]
    colour: str
    line: str = SOLID
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    dots: bool = False

    def draw(self, frame: Frame) -> list[Child]:
        """As markup."""
        places = [_inside(frame, x, y) for x, y in self.points]
        parts: list[Child] = []
        if self.low:
            upper = [_inside(frame, x, high) for (x, _), high in zip(self.points, self.high, strict=True)]
            lower = [_inside(frame, x, low) for (x, _), low in zip(self.points, self.low, strict=True)]
            shape: Attributes = {"d": outline([*upper, *reversed(lower)]), "class": f"band {self.colour}"}
            parts.append(tag("path", shape))
        path = " ".join(f"{plain(x)},{plain(y)}" for x, y in places)
        style = f"stroke {self.line} {self.colour}".replace("  ", " ")
        parts.append(tag("polyline", {"points": path, "fill": "none", "class": style}))
        if self.dots:
            parts += [_dot(x, y, 3.0, f"dot {self.colour}") for x, y in places]
        return parts


def seeded(
    x: Sequence[float],
    columns: Sequence[Sequence[float]],
    colour: str,
    line: str = SOLID,
    *,
    dots: bool = False,
) -> Curve:
    """The mean over seeds with its 95 % interval; one column of values per seed."""
    found = [estimate([column[place] for column in columns]) for place in range(len(x))]
    points = [(at, one.mean) for at, one in zip(x, found, strict=True)]
    if len(columns) < 2:
        return Curve(points, colour, line, dots=dots)
    low = [one.mean if one.low is None else one.low for one in found]
    high = [one.mean if one.high is None else one.high for one in found]
    return Curve(points, colour, line, low, high, dots)


@final
@dataclass(frozen=True, slots=True)
class Cloud:
    """Many small dots."""

    points: Sequence[Point]
    colour: str

    def draw(self, frame: Frame) -> list[Child]:
        """As markup, one path for all; dots outside the axes are left out."""
        x, y = frame.x, frame.y
        kept = [frame.at(*p) for p in self.points if x.low <= p[0] <= x.high and y.low <= p[1] <= y.high]
        path = "".join(f"M{plain(across)} {plain(down)}h0" for across, down in kept)
        return [tag("path", {"d": path, "class": f"cloud {self.colour}"})]


@final
@dataclass(frozen=True, slots=True)
class Whisker:
    """A dot with an interval above and below."""

    x: float
    y: float
    low: float
    high: float
    colour: str

    def draw(self, frame: Frame) -> list[Child]:
        """As markup."""
        x, y = _inside(frame, self.x, self.y)
        top, floor = _inside(frame, self.x, self.high)[1], _inside(frame, self.x, self.low)[1]
        line: Attributes = {"x1": x, "x2": x, "y1": top, "y2": floor, "class": f"whisker {self.colour}"}
        return [tag("line", line), _dot(x, y, 3.2, f"dot {self.colour}")]


@final
@dataclass(frozen=True, slots=True)
class Level:
    """A dashed line across with a name on it."""

    value: float
    label: str = ""
    at_end: bool = False

    def draw(self, frame: Frame) -> list[Child]:
        """As markup."""
        y = _inside(frame, frame.x.low, self.value)[1]
        right = frame.width - frame.right
        line: Attributes = {"x1": frame.left, "x2": right, "y1": y, "y2": y, "class": "level"}
        place: Attributes = {"x": frame.left + 5, "y": y - 5, "class": "note"}
        if self.at_end:
            place = {"x": right - 5, "y": y - 5, "class": "note end"}
        return [tag("line", line), tag("text", place, self.label) if self.label else None]


@final
@dataclass(frozen=True, slots=True)
class Upright:
    """A dashed line from top to bottom with a name beside it, `row` lines above the floor."""

    value: float
    label: str
    row: int = 0

    def draw(self, frame: Frame) -> list[Child]:
        """As markup."""
        x = _inside(frame, self.value, frame.y.low)[0]
        line: Attributes = {"x1": x, "x2": x, "y1": frame.top, "y2": frame.floor, "class": "level"}
        near_end = x > frame.left + 0.6 * (frame.width - frame.left - frame.right)
        place: Attributes = {
            "x": x + (-5 if near_end else 5),
            "y": frame.floor - 8 - 14 * self.row,
            "class": "note end" if near_end else "note",
        }
        return [tag("line", line), tag("text", place, self.label)]


@final
@dataclass(frozen=True, slots=True)
class Bar:
    """A bar from the bottom of the panel up to a value, around a place."""

    x: float
    width: float
    value: float
    colour: str
    label: str = ""

    def draw(self, frame: Frame) -> list[Child]:
        """As markup."""
        left, top = _inside(frame, self.x - self.width / 2, self.value)
        right = frame.across(self.x + self.width / 2)
        shape: Attributes = {
            "x": left,
            "y": top,
            "width": right - left,
            "height": max(0.0, frame.floor - top),
            "class": f"bar {self.colour}",
        }
        text = tag("text", {"x": (left + right) / 2, "y": top - 5, "class": "note middle"}, self.label)
        return [tag("rect", shape), text if self.label else None]


Mark = Curve | Cloud | Whisker | Level | Upright | Bar


def _inside(frame: Frame, x: float, y: float) -> Point:
    return frame.at(min(max(x, frame.x.low), frame.x.high), min(max(y, frame.y.low), frame.y.high))


def _dot(x: float, y: float, radius: float, style: str) -> Html:
    return tag("circle", {"cx": x, "cy": y, "r": radius, "class": style})
