"""A picture of an experiment: lines with intervals over one axis, one panel for each choice on the others. SVG."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from sparsedp_experiments.comparison.colours import method_style
from sparsedp_experiments.comparison.metric import metric_named
from sparsedp_experiments.figures.canvas import DASHED, GROUND, LETTER, key, legend, sheet, written
from sparsedp_experiments.pages import words
from sparsedp_experiments.pages.paper import number_for
from sparsedp_experiments.pages.study import Cell, Study
from sparsedp_experiments.runs.table import Row

PANEL_WIDTH, PANEL_HEIGHT = 420, 270
MOST_PANELS, LEAST_POINTS = 12, 3
_COLOURS = (
    "#59636f", "#2f5fd0", "#b9430b", "#9a1a63", "#0d7068", "#6d3fc0",
    "#6a6400", "#85491f", "#1a7a48", "#b3261e", "#0b6c93", "#3d4855",
)  # fmt: skip


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


def panels_of(study: Study) -> list[tuple[Cell, list[Row]]]:
    """The panels of an experiment's picture and the rows in each; none where a picture says nothing."""
    layout = layout_of(study)
    if layout is None:
        return []
    axes = study.axes
    places: list[Cell] = [
        dict(zip(layout.panels, labels, strict=True))
        for labels in itertools.product(*(axes[name] for name in layout.panels))
    ]
    filled = [(place, rows) for place in places if (rows := _rows_at(study, place))]
    return filled if any(len(rows) > 1 for _, rows in filled) else []


def picture(study: Study) -> str | None:
    """The SVG document of an experiment with results; None where a picture says nothing."""
    layout, filled = layout_of(study), panels_of(study)
    if layout is None or not filled:
        return None
    names = study.axes[layout.lines] if layout.lines else [study.name]
    styles = {name: _colour(layout.lines, name, i) for i, name in enumerate(names)}
    columns = min(2, len(filled))
    figure, panels = sheet(len(filled), columns, PANEL_WIDTH, PANEL_HEIGHT)
    for (place, rows), axes in zip(filled, panels, strict=True):
        axes.set_title(", ".join(f"{axis} {found}" for axis, found in place.items()), weight="normal")
        _panel(axes, study, layout, rows, styles)
    keys = (
        [key(_name(layout.lines, label), colour) for label, colour in styles.items()] if layout.lines else []
    )
    legend(figure, keys, _titles(study, PANEL_WIDTH * columns))
    return written(figure, study.experiment.title)


def _panel(axes: Axes, study: Study, layout: Layout, rows: Sequence[Row], styles: Mapping[str, str]) -> None:
    metric, labels = metric_named(study.experiment.metric), study.axes[layout.x]
    numbers = {
        id(row): number_for(study.name, row.cell, study.settings_of(row.cell), study.experiment.metric)
        for row in rows
    }
    ends = [v for row in rows for v in (row.score.mean, row.score.low, row.score.high) if v is not None]
    means = [row.score.mean for row in rows] + [n.value for n in numbers.values() if n is not None]
    span = max(means) - min(means) or abs(means[0]) * 0.02 or 0.01
    low, high = max(min(ends + means), min(means) - span), min(max(ends + means), max(means) + span)
    axes.set(
        xlabel=layout.x, ylabel=metric.title, xlim=(-0.4, len(labels) - 0.6),
        ylim=(low - 0.05 * (high - low), high + 0.05 * (high - low)),
    )  # fmt: skip
    axes.set_xticks(range(len(labels)), labels)
    axes.yaxis.set_major_formatter(lambda value, _: metric.tick(value))
    for i, (name, colour) in enumerate(styles.items()):
        own = [row for row in rows if layout.lines is None or row.cell[layout.lines] == name]
        shift = (i - (len(styles) - 1) / 2) * min(0.08, 0.5 / len(styles))
        _line(axes, [(labels.index(row.cell[layout.x]) + shift, row) for row in own], colour, f"line {name}")
        theirs = [(labels.index(row.cell[layout.x]), found) for row in own if (found := numbers[id(row)])]
        axes.plot(
            [x for x, _ in theirs], [found.value for _, found in theirs], color=colour, ls=DASHED, lw=1, marker="o",
            mfc=GROUND, alpha=0.7, gid=f"paper {name}",
        )  # fmt: skip


def _line(axes: Axes, points: Sequence[tuple[float, Row]], colour: str, gid: str) -> None:
    """A line through the means, a bar for each interval."""
    axes.plot(
        [x for x, _ in points], [row.score.mean for _, row in points], color=colour, marker="o", gid=gid
    )
    for x, row in points:
        if row.score.low is not None and row.score.high is not None:
            axes.vlines(x, row.score.low, row.score.high, color=colour, lw=1)


def _rows_at(study: Study, place: Cell) -> list[Row]:
    return [row for row in study.rows if all(row.cell[axis] == found for axis, found in place.items())]


def _name(axis: str | None, label: str) -> str:
    return label if any(map(str.isalpha, label)) else f"{axis} {label}"


def _titles(study: Study, width: int) -> list[str]:
    """Lines above the picture: what it is, how to read it, what must be said."""
    numbers = (
        number_for(study.name, row.cell, study.settings_of(row.cell), study.experiment.metric)
        for row in study.rows
    )
    theirs = "; dashed: the paper" if any(number is not None for number in numbers) else ""
    reading = f"{words.metric_title(study.experiment.metric)}, final epoch, bars are 95 % intervals{theirs}"
    room = int((width - 24) / LETTER)
    lines = [*textwrap.wrap(study.experiment.title, room), *textwrap.wrap(reading, room)]
    return lines + ([words.JPEG] if words.is_cifar(study) else [])


def _colour(axis: str | None, name: str, place: int) -> str:
    number = int(method_style(name)[1:]) if axis == "method" else (place + 1) % len(_COLOURS)
    return _COLOURS[number]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
