"""The plotting area of a chart, its axes, and the SVG around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from sparsedp.report.markup import Attributes, Child, Html, plain, tag
from sparsedp.report.scale import Axis

LETTER = 6.7
"""Width of a letter of the charts' 12-pixel type, about."""

Point = tuple[float, float]


@final
@dataclass(frozen=True, slots=True)
class Frame:
    """The plotting area of a chart and its two axes."""

    width: int
    height: int
    left: float
    x: Axis
    y: Axis
    top: float = 20
    right: float = 22
    bottom: float = 44

    @property
    def floor(self) -> float:
        """Where the plotting area ends at the bottom."""
        return self.height - self.bottom

    def at(self, x: float, y: float) -> Point:
        """The place of a point."""
        return self.across(x), self.down(y)

    def across(self, x: float) -> float:
        """The place of a horizontal value."""
        return self.x.place(x, self.left, self.width - self.right)

    def down(self, y: float) -> float:
        """The place of a vertical value."""
        return self.y.place(y, self.floor, self.top)

    def horizontal_axis(self) -> list[Html]:
        """The line below, with as many ticks as fit, and what it shows."""
        floor = self.floor
        marks = [
            tag("text", {"x": self.across(v), "y": floor + 18, "class": "tick middle"}, self.x.text(v))
            for v in ticks_that_fit(self.x, self.width - self.left - self.right)
        ]
        middle = (self.left + self.width - self.right) / 2
        title = tag("text", {"x": middle, "y": self.height - 6, "class": "axis middle"}, self.x.label)
        line: Attributes = {
            "x1": self.left,
            "x2": self.width - self.right,
            "y1": floor,
            "y2": floor,
            "class": "floor",
        }
        return [tag("line", line), *marks, title]

    def vertical_axis(self) -> list[Html]:
        """The grid and its numbers."""
        parts: list[Html] = []
        for value in self.y.ticks:
            y = self.down(value)
            line: Attributes = {
                "x1": self.left,
                "x2": self.width - self.right,
                "y1": y,
                "y2": y,
                "class": "grid",
            }
            parts.append(tag("line", line))
            parts.append(
                tag("text", {"x": self.left - 7, "y": y + 4, "class": "tick end"}, self.y.text(value))
            )
        return parts

    def picture(self, alt: str, *parts: Child) -> Html:
        """The whole as SVG, with a text for those who do not see it."""
        box = f"0 0 {self.width} {self.height}"
        return tag("svg", {"viewBox": box, "role": "img", "aria-label": alt, "class": "chart"}, *parts)


def ticks_that_fit(axis: Axis, room: float) -> list[float]:
    """As many ticks as fit beside each other, those nearest to zero first."""
    kept: list[tuple[float, float, float]] = []
    for value in sorted(axis.ticks, key=abs):
        half = LETTER * len(axis.text(value)) / 2 + 4
        place = axis.place(value, 0, room)
        if all(place + half <= start or place - half >= stop for _, start, stop in kept):
            kept.append((value, place - half, place + half))
    return sorted(value for value, _, _ in kept)


def outline(corners: Sequence[Point]) -> str:
    """A closed path."""
    return "M" + "L".join(f"{plain(x)},{plain(y)}" for x, y in corners) + "Z"
