"""Figures by matplotlib, as SVG files: the same bytes from the same records, readable in light and dark."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from io import StringIO
from types import MappingProxyType
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from sparsedp_experiments.runs.results import estimate

GROUND, _RULE, _INK, _SOFT = "#ffffff", "#dfe3e8", "#1b2027", "#59636f"
GREY, BLUE, ORANGE, TEAL = "#6d7783", "#2f5fd0", "#c2500c", "#0d7068"
VIOLET, PINK, GOLD = "#7a45c9", "#b01d70", "#8a6d00"
_DARK: Mapping[str, str] = MappingProxyType(
    {
        GROUND: "#181c22", _RULE: "#2b323b", _INK: "#e8ebef", _SOFT: "#a5afbb", GREY: "#98a3b0", BLUE: "#86a9ff",
        ORANGE: "#ff9f6b", TEAL: "#57d5c7", VIOLET: "#c0a2ff", PINK: "#f78dc7", GOLD: "#e0c95a",
        "#b9430b": "#ff9f6b", "#9a1a63": "#f78dc7", "#6d3fc0": "#c0a2ff", "#6a6400": "#d6cf57",
        "#85491f": "#e2ab7c", "#1a7a48": "#62d49b", "#b3261e": "#ff8f86", "#0b6c93": "#66c8ee",
        "#3d4855": "#ccd3db",
    }
)  # fmt: skip
"""Every colour of a figure, and what it is in the dark."""
SOLID, DASHED, DOTTED = "-", (0, (3, 2.5)), (0, (0.8, 2))
LineStyle = str | tuple[float, tuple[float, ...]]

_INCH = 72
LEFT, _RIGHT, _TOP, _BOTTOM, _LINE = 64, 14, 28, 46, 16
LETTER = 6.6
"""Width of a letter of a legend, about."""
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
mpl.rcParams.update(  # for the whole process: ticks, titles and paths read it when they are made, not when drawn
    {
        "svg.hashsalt": "sparsedp", "svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": 11,
        "text.color": _INK, "axes.labelcolor": _SOFT, "axes.labelsize": 11, "axes.titlesize": 12,
        "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.edgecolor": _SOFT, "axes.axisbelow": True,
        "axes.spines.left": False, "axes.spines.right": False, "axes.spines.top": False, "axes.grid": True,
        "axes.grid.axis": "y", "grid.color": _RULE, "xtick.color": _SOFT, "ytick.color": _SOFT,
        "xtick.labelsize": 10, "ytick.labelsize": 10, "xtick.major.size": 0, "ytick.major.size": 0,
        "xtick.minor.size": 0, "ytick.minor.size": 0, "lines.linewidth": 2, "lines.markersize": 5,
        "legend.frameon": False, "legend.fontsize": 11, "figure.facecolor": GROUND, "axes.facecolor": "none",
        "axes.xmargin": 0, "path.simplify": False,
    }
)  # fmt: skip


def sheet(
    panels: int,
    columns: int,
    width: int = 330,
    height: int = 236,
    *,
    left: int = LEFT,
    widths: Sequence[float] | None = None,
) -> tuple[Figure, list[Axes]]:
    """A figure of panels in rows, each of so many pixels, `left` for its ticks; `widths` are a row's shares."""
    rows = math.ceil(panels / columns)
    figure = Figure((columns * width / _INCH, rows * height / _INCH), dpi=_INCH)
    places = figure.subplots(rows, columns, squeeze=False, width_ratios=widths).ravel()
    for spare in places[panels:]:
        spare.set_axis_off()
    _arrange(figure, left)
    return figure, list(places[:panels])


def _arrange(figure: Figure, left: int = LEFT, above: int = 0) -> None:
    """Margins by number, not by measured text: fast, and the same wherever it is drawn."""
    grid = figure.axes[0].get_gridspec()
    assert grid is not None
    wide, tall = (float(side) * _INCH for side in figure.get_size_inches())
    width, height, high = wide / grid.ncols, tall / grid.nrows, tall + above
    figure.set_size_inches(wide / _INCH, high / _INCH)
    figure.subplots_adjust(
        left=left / wide, right=1 - _RIGHT / wide, bottom=_BOTTOM / high, top=1 - (above + _TOP) / high,
        wspace=(left + _RIGHT) / (width - left - _RIGHT), hspace=(_TOP + _BOTTOM) / (height - _TOP - _BOTTOM),
    )  # fmt: skip


def written(figure: Figure, alt: str) -> str:
    """The text of an SVG file, with a sentence for those who do not see it.

    **Edge cases.** Colours become variables, so that the reader's choice of light or dark decides them.
    """
    file = StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(file, format="svg", metadata=nothing)
    text = file.getvalue()
    text = text[text.index("<svg") :].replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")
    light, dark = [], []
    for number, (colour, other) in enumerate(_DARK.items()):
        if colour in text:
            text = text.replace(colour, f"var(--c{number})")
            light.append(f"--c{number}:{colour}")
            dark.append(f"--c{number}:{other}")
    style = f":root{{{';'.join(light)}}}@media (prefers-color-scheme:dark){{:root{{{';'.join(dark)}}}}}"
    text = text.replace("<svg ", f'<svg role="img" aria-label="{escape(alt)}" ', 1)
    text = text.replace("<defs>", f"<style>{style}</style>\n <defs>", 1)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def key(name: str, colour: str, line: LineStyle = SOLID, *, dot: bool = False) -> Line2D:
    """An entry of a legend."""
    look: dict[str, Any] = (
        {"marker": "o", "linestyle": "none"} if dot else {"linestyle": line, "linewidth": 2}
    )
    return Line2D([], [], color=colour, label=name, **look)


def _in_columns(names: Sequence[float], rows: int) -> list[Sequence[float]]:
    return [names[first : first + rows] for first in range(0, len(names), rows)]


def legend(figure: Figure, keys: Sequence[Line2D], title: Sequence[str] = ()) -> None:
    """One legend above all panels, in as few rows as fit, under lines of a title."""
    room = figure.get_size_inches()[0] * _INCH
    names = [LETTER * len(str(one.get_label())) + 50 for one in keys]
    rows = next(
        (rows for rows in range(1, len(keys)) if sum(map(max, _in_columns(names, rows))) <= room), len(keys)
    )
    columns = math.ceil(len(keys) / rows) if keys else 1
    figure.legend(
        handles=list(keys), loc="upper left", ncols=columns, title="\n".join(title) or None, alignment="left",
        borderaxespad=0.3, labelspacing=0.3,
    )  # fmt: skip
    _arrange(figure, above=_LINE * (rows + len(title)) + 12)


def seeded(
    axes: Axes,
    x: Sequence[float],
    columns: Sequence[Sequence[float]],
    colour: str,
    line: LineStyle = SOLID,
    *,
    dots: bool = False,
    band: bool = True,
) -> None:
    """The mean over seeds with its 95 % interval shaded; one column of values per seed."""
    found = [estimate([column[place] for column in columns]) for place in range(len(x))]
    axes.plot(x, [one.mean for one in found], color=colour, ls=line, marker="o" if dots else None)
    low, high = [one.low for one in found], [one.high for one in found]
    if band and None not in low and None not in high:
        axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)  # type: ignore[arg-type]


def level(axes: Axes, value: float, label: str = "") -> None:
    """A dotted line across, with a name on it at its end."""
    axes.axhline(value, color=_SOFT, lw=1.3, ls=DOTTED)
    axes.annotate(
        label,
        (1, value),
        (-4, 4),
        axes.get_yaxis_transform(),
        "offset points",
        ha="right",
        color=_SOFT,
        size=10,
    )


def upright(axes: Axes, value: float, label: str, row: int) -> None:
    """A dotted line from top to bottom with a name beside it, `row` lines above the floor."""
    axes.axvline(value, color=_SOFT, lw=1.3, ls=DOTTED)
    low, high = axes.get_xaxis().get_transform().transform(axes.get_xlim())
    right = axes.get_xaxis().get_transform().transform(value) > low + 0.6 * (high - low)
    axes.annotate(
        label,
        (value, 0),
        (-5 if right else 5, 8 + 14 * row),
        axes.get_xaxis_transform(),
        "offset points",
        ha="right" if right else "left",
        color=_SOFT,
        size=10,
    )


def whisker(axes: Axes, x: float, y: float, low: float, high: float, colour: str) -> None:
    """A dot with an interval above and below."""
    axes.errorbar(x, y, [[y - low], [high - y]], color=colour, marker="o", elinewidth=1.5)


def powers(axes: Axes, which: str, low: float, high: float) -> None:
    """A logarithmic axis ("x" or "y") between two powers of ten, given by their exponents."""
    marks = range(math.ceil(low), math.floor(high) + 1)
    _logarithmic(
        axes, which, 10.0**low, 10.0**high, {10.0**e: f"10{str(e).translate(_RAISED)}" for e in marks}
    )


def shares(axes: Axes, which: str, low: float, high: float, marks: Sequence[float]) -> None:
    """A logarithmic axis ("x" or "y") of shares, written in percent."""
    _logarithmic(axes, which, low, high, {mark: f"{100 * mark:.3g}%" for mark in marks})


def _logarithmic(axes: Axes, which: str, low: float, high: float, marks: Mapping[float, str]) -> None:
    axes.set(**{f"{which}scale": "log", f"{which}lim": (low, high)})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_ticks(list(marks), list(marks.values()))
    axis.set_minor_locator(NullLocator())
