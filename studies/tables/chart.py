"""A picture of an experiment: lines with intervals over one axis, one panel for each choice on the others. SVG."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparsedp.experiments.table import Row
from sparsedp.report.colours import method_style
from sparsedp.report.frame import LETTER, Frame
from sparsedp.report.markup import Attributes, Html, plain, tag
from sparsedp.report.metric import metric_named
from sparsedp.report.scale import Axis, linear_axis
from studies.svg import svg_document
from studies.tables import words
from studies.tables.paper import number_for
from studies.tables.study import Cell, Study

PANEL_WIDTH, PANEL_HEIGHT, LINE = 420, 270, 20
MOST_PANELS, LEAST_POINTS = 12, 3
_COLOURS = (
    "#59636f", "#2f5fd0", "#b9430b", "#9a1a63", "#0d7068", "#6d3fc0",
    "#6a6400", "#85491f", "#1a7a48", "#b3261e", "#0b6c93", "#3d4855",
)  # fmt: skip
_STYLE = """
text { font: 12px system-ui, "Helvetica Neue", Arial, sans-serif; fill: #59636f; }
.name { fill: #1b2027; } .axis { font-weight: 600; } .middle { text-anchor: middle; } .end { text-anchor: end; }
.grid { stroke: #dfe3e8; } .floor { stroke: #59636f; }
"""


@dataclass(frozen=True, slots=True)
class Layout:
    """Which axis goes where."""

    x: str
    lines: str | None
    panels: tuple[str, ...]


def layout_of(study: Study) -> Layout | None:
    """The axes of a picture: along the contrast if it is numeric and long, else along the longest numeric axis.

    None where there is no axis of three numbers, or too many panels.
    """
    axes = study.axes
    numeric = [
        name for name, labels in axes.items() if len(labels) >= LEAST_POINTS and all(map(_is_number, labels))
    ]
    if not numeric:
        return None
    contrast = study.experiment.contrast.axis
    x = contrast if contrast in numeric else max(numeric, key=lambda name: len(axes[name]))
    others = [name for name in axes if name != x]
    lines = contrast if contrast in others else (others[0] if others else None)
    panels = tuple(name for name in others if name != lines)
    count = 1
    for name in panels:
        count *= len(axes[name])
    return Layout(x, lines, panels) if count <= MOST_PANELS else None


def picture(study: Study) -> str | None:
    """The SVG document of an experiment with results; None where a picture says nothing."""
    layout = layout_of(study)
    if layout is None or not study.rows:
        return None
    axes = study.axes
    names = axes[layout.lines] if layout.lines else [study.name]
    styles = {name: _colour(layout.lines, name, i) for i, name in enumerate(names)}
    places = [
        dict(zip(layout.panels, labels, strict=True))
        for labels in itertools.product(*(axes[name] for name in layout.panels))
    ]
    filled = [(place, rows) for place in places if (rows := _rows_at(study, place))]
    if not any(len(rows) > 1 for _, rows in filled):
        return None
    columns = min(2, len(filled))
    width = PANEL_WIDTH * columns
    titles = _titles(study, width)
    legend = _legend(layout.lines, styles, width, LINE * len(titles))
    top = LINE * (len(titles) + len(legend)) + 10
    parts = [
        tag("text", {"x": 12, "y": LINE * i + 16, "class": look}, line)
        for i, (look, line) in enumerate(titles)
    ]
    parts += itertools.chain(*legend)
    for i, (place, rows) in enumerate(filled):
        corner = {"x": PANEL_WIDTH * (i % columns), "y": top + PANEL_HEIGHT * (i // columns)}
        parts.append(tag("svg", corner, _panel(study, layout, axes[layout.x], place, rows, styles)))
    height = top + PANEL_HEIGHT * -(-len(filled) // columns)
    ground = tag("rect", {"width": width, "height": height, "fill": "#ffffff"})
    return svg_document(study.experiment.title, width, height, _STYLE, ground, *parts)


def _panel(
    study: Study,
    layout: Layout,
    labels: Sequence[str],
    place: Cell,
    rows: Sequence[Row],
    styles: Mapping[str, str],
) -> list[Html]:
    metric = metric_named(study.experiment.metric)
    numbers = {
        id(row): number_for(study.name, row.cell, study.settings_of(row.cell), study.experiment.metric)
        for row in rows
    }
    ends = [v for row in rows for v in (row.score.mean, row.score.low, row.score.high) if v is not None]
    means = [row.score.mean for row in rows] + [n.value for n in numbers.values() if n is not None]
    span = max(means) - min(means) or abs(means[0]) * 0.02 or 0.01
    low, high = max(min(ends + means), min(means) - span), min(max(ends + means), max(means) + span)
    y = linear_axis(metric.title, low, high, text=metric.tick)
    x = Axis(
        layout.x, -0.4, len(labels) - 0.6, tuple(map(float, range(len(labels)))), lambda v: labels[round(v)]
    )
    left = 18 + LETTER * max(len(y.text(v)) for v in y.ticks)
    frame = Frame(PANEL_WIDTH, PANEL_HEIGHT, left, x, y)
    said = ", ".join(f"{axis} {found}" for axis, found in place.items())
    parts = [
        tag("text", {"x": left, "y": 12, "class": "name"}, said),
        *frame.vertical_axis(),
        *frame.horizontal_axis(),
    ]
    for i, (name, colour) in enumerate(styles.items()):
        own = [row for row in rows if layout.lines is None or row.cell[layout.lines] == name]
        shift = (i - (len(styles) - 1) / 2) * min(0.08, 0.5 / len(styles))
        points = [(labels.index(row.cell[layout.x]) + shift, row) for row in own]
        parts += _line(frame, points, colour, name)
        theirs = [(at - shift, found.value) for at, row in points if (found := numbers[id(row)]) is not None]
        parts += _dashes(frame, theirs, colour, name)
    return parts


def _line(frame: Frame, points: Sequence[tuple[float, Row]], colour: str, name: str) -> list[Html]:
    """A line through the means, a bar for each interval."""
    parts = [
        _polyline(frame, [(x, row.score.mean) for x, row in points], {"stroke": colour, "stroke-width": 2})
    ]
    for x, row in points:
        across, score = frame.across(x), row.score
        if score.low is not None and score.high is not None:
            ends = [min(max(frame.down(v), frame.top), frame.floor) for v in (score.low, score.high)]
            bar: Attributes = {"x1": across, "x2": across, "y1": ends[0], "y2": ends[1], "stroke": colour}
            parts.append(tag("line", bar))
        said = tag("title", None, f"{name}: {frame.y.text(score.mean)}, {score.count} seeds")
        dot: Attributes = {"cx": across, "cy": frame.down(score.mean), "r": 3, "fill": colour}
        parts.append(tag("circle", dot, said))
    return parts


def _dashes(frame: Frame, points: Sequence[tuple[float, float]], colour: str, name: str) -> list[Html]:
    """The paper's numbers: a dashed line and rings."""
    if not points:
        return []
    parts = [_polyline(frame, points, {"stroke": colour, "stroke-dasharray": "5 4", "opacity": "0.7"})]
    for x, value in points:
        ring: Attributes = {
            "cx": frame.across(x), "cy": frame.down(value), "r": 3, "fill": "#ffffff", "stroke": colour,
        }  # fmt: skip
        parts.append(tag("circle", ring, tag("title", None, f"{name} in the paper: {frame.y.text(value)}")))
    return parts


def _polyline(frame: Frame, points: Sequence[tuple[float, float]], look: Attributes) -> Html:
    places = [frame.at(x, y) for x, y in points]
    drawn = " ".join(f"{plain(x)},{plain(y)}" for x, y in places)
    return tag("polyline", {"points": drawn, "fill": "none", **look})


def _rows_at(study: Study, place: Cell) -> list[Row]:
    return [row for row in study.rows if all(row.cell[axis] == found for axis, found in place.items())]


def _legend(axis: str | None, styles: Mapping[str, str], width: int, top: int) -> list[list[Html]]:
    """Names with their colours, in as many rows as they need; none for a single line."""
    if axis is None:
        return []
    rows: list[list[Html]] = [[]]
    x = 12.0
    for label, colour in styles.items():
        name = label if any(map(str.isalpha, label)) else f"{axis} {label}"
        need = 30 + LETTER * len(name) + 14
        if x + need > width and rows[-1]:
            rows.append([])
            x = 12.0
        y = top + LINE * (len(rows) - 1) + 12
        key: Attributes = {"x1": x, "x2": x + 20, "y1": y, "y2": y, "stroke": colour, "stroke-width": 3}
        rows[-1] += [tag("line", key), tag("text", {"x": x + 26, "y": y + 4, "class": "name"}, name)]
        x += need
    return rows


def _titles(study: Study, width: int) -> list[tuple[str, str]]:
    """Lines above the picture, each with its style: what it is, how to read it, what must be said."""
    numbers = (
        number_for(study.name, row.cell, study.settings_of(row.cell), study.experiment.metric)
        for row in study.rows
    )
    theirs = "; dashed: the paper" if any(number is not None for number in numbers) else ""
    reading = f"{words.metric_title(study.experiment.metric)}, final epoch, bars are 95 % intervals{theirs}"
    room = int((width - 24) / LETTER)
    lines = [("name axis", line) for line in textwrap.wrap(study.experiment.title, room)]
    lines += [("", line) for line in textwrap.wrap(reading, room)]
    return lines + ([("", words.JPEG)] if words.is_cifar(study) else [])


def _colour(axis: str | None, name: str, place: int) -> str:
    number = int(method_style(name)[1:]) if axis == "method" else (place + 1) % len(_COLOURS)
    return _COLOURS[number]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
