"""Panels side by side on a card, with one legend for all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from sparsedp.report.frame import LETTER, Frame
from sparsedp.report.markup import Attributes, Child, Html, tag
from sparsedp.report.scale import Axis
from studies.figures.drawing.marks import Mark
from studies.figures.drawing.style import SHEET
from studies.svg import svg_document

MARGIN, GAP = 16, 10
_LINE = 22
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@final
@dataclass(frozen=True, slots=True)
class Panel:
    """One plotting area."""

    title: str
    x: Axis
    y: Axis
    marks: Sequence[Mark]

    def draw(self, width: int, height: int) -> list[Child]:
        """As markup, with the origin at its upper left corner."""
        left = 14 + LETTER * max((len(self.y.text(v)) for v in self.y.ticks), default=0)
        left += 16 if self.y.label else 0
        frame = Frame(
            width, height, left, self.x, self.y, top=30, right=14, bottom=44 if self.x.label else 26
        )
        parts: list[Child] = [
            tag("text", {"x": left, "y": 14, "class": "title"}, self.title),
            frame.vertical_axis(),
            frame.horizontal_axis(),
        ]
        if self.y.label:
            middle = (frame.top + frame.floor) / 2
            turned = {"transform": f"translate(11 {middle:.1f}) rotate(-90)", "class": "axis middle"}
            parts.append(tag("text", turned, self.y.label))
        return [*parts, *(mark.draw(frame) for mark in self.marks)]


@final
@dataclass(frozen=True, slots=True)
class Key:
    """An entry of the legend."""

    name: str
    colour: str
    line: str = ""
    dot: bool = False


def sheet(
    alt: str,
    panels: Sequence[Panel],
    legend: Sequence[Key] = (),
    *,
    columns: int,
    width: int = 330,
    height: int = 236,
) -> str:
    """A whole figure as the text of an SVG file."""
    rows = math.ceil(len(panels) / columns)
    whole = 2 * MARGIN + columns * width + (columns - 1) * GAP
    keys, legend_height = _legend(legend, whole - 2 * MARGIN)
    body: list[Child] = []
    for place, panel in enumerate(panels):
        x = MARGIN + place % columns * (width + GAP)
        y = MARGIN + legend_height + place // columns * (height + GAP)
        body.append(tag("g", {"transform": f"translate({x} {y})"}, panel.draw(width, height)))
    tall = 2 * MARGIN + legend_height + rows * height + (rows - 1) * GAP
    return card(alt, whole, tall, [keys, body])


def card(alt: str, width: int, height: int, body: Child) -> str:
    """Markup on a card, as the text of an SVG file."""
    edge: Attributes = {
        "x": 0.5,
        "y": 0.5,
        "width": width - 1,
        "height": height - 1,
        "rx": 10,
        "class": "card",
    }
    return svg_document(alt, width, height, SHEET, tag("rect", edge), body)


def _legend(keys: Sequence[Key], room: float) -> tuple[Child, int]:
    if not keys:
        return None, 0
    parts: list[Child] = []
    x, row = 0.0, 0
    for key in keys:
        wide = 34 + LETTER * len(key.name) + 18
        if x and x + wide > room:
            x, row = 0.0, row + 1
        parts.append(_key(key, MARGIN + x, MARGIN + 8 + _LINE * row))
        x += wide
    return parts, _LINE * (row + 1) + 8


def _key(key: Key, x: float, y: float) -> Html:
    style = f"stroke {key.line} {key.colour}".replace("  ", " ")
    sample = (
        tag("circle", {"cx": x + 13, "cy": y, "r": 4.0, "class": f"dot {key.colour}"})
        if key.dot
        else tag("line", {"x1": x, "x2": x + 26, "y1": y, "y2": y, "class": style})
    )
    return tag("g", None, sample, tag("text", {"x": x + 34, "y": y + 4, "class": "key"}, key.name))


def shares(label: str, low: float = 0.01, high: float = 1.0) -> Axis:
    """A logarithmic axis of shares, written in percent; give it logarithms to base 10."""
    marks = [share for share in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if low <= share <= high]
    return Axis(
        label,
        math.log10(low),
        math.log10(high),
        tuple(map(math.log10, marks)),
        lambda v: f"{100 * 10**v:.3g}%",
    )


def fractions(label: str) -> Axis:
    """0 to 1."""
    return Axis(label, 0.0, 1.0, (0.0, 0.2, 0.4, 0.6, 0.8, 1.0), lambda v: f"{v:.1f}")


def powers(label: str, low: int, high: int, step: int = 1) -> Axis:
    """A logarithmic axis between powers of ten; give it logarithms to base 10."""
    ticks = tuple(float(power) for power in range(low, high + 1, step))
    return Axis(label, float(low), float(high), ticks, lambda v: "10" + f"{v:.0f}".translate(_SUPERSCRIPT))


def log10(value: float, least: float = 1e-30) -> float:
    """A logarithm that takes zero."""
    return math.log10(max(value, least))
