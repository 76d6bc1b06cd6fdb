"""What the warm-up shows: how much energy the best coordinates hold, by steps that did not rank them.

From what every run keeps of its warm-up; released values only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsedp.report.chart import Series, line_chart
from sparsedp.report.figure import Legend, Table, figure, remark
from sparsedp.report.markup import Html
from sparsedp.report.numbers import percent
from sparsedp.report.run import ReportedRun
from sparsedp.report.scale import linear_axis

TITLE = "What the warm-up shows"
STYLES = ("main", "second", "third")
_REACH = 1.96
"""Standard deviations on each side of a 95 % interval."""


def warmup_figure(run: ReportedRun) -> Html | None:
    """The split curve of each ranking; nothing if the run kept none."""
    if run.warmup is None:
        return None
    curves = [curve for curve in run.warmup["curves"] if curve["ratio"]]
    if not curves:
        return remark(
            TITLE, "The gradient's energy does not stand out from the noise, so nothing can be said of it."
        )
    series = [line for curve, style in zip(curves, STYLES, strict=False) for line in _lines(curve, style)]
    series.append(Series("random", ((0.0, 0.0), (1.0, 1.0)), "quiet", dots=False))
    heights = [y for line in series for _, y in line.points]
    x = linear_axis("share of coordinates, best first", 0, 1, text=lambda value: percent(value, 0))
    y = linear_axis("share of energy", min(heights), max(heights), text=lambda value: percent(value, 0))
    steps, planned = run.warmup["steps"], run.warmup["planned"]
    return figure(
        TITLE,
        lambda width: line_chart(width, x, y, series, f"{y.label} against {x.label}, by ranking."),
        f"Ranked by the first half of {planned} steps, measured by the second ({steps} seen), so noise does "
        "not pass for signal. Dashed: 95 % intervals. From released values alone.",
        Table(("ranking", "coordinates", "share of energy", "95 %"), tuple(_rows(curves))),
        Legend(tuple((line.name, line.style) for line in series if not line.dashed)),
    )


def _lines(curve: Mapping[str, Any], style: str) -> list[Series]:
    """The estimate, and its interval on both sides."""
    places = list(zip(curve["ratio"], curve["share"], curve["std"], strict=True))
    middle = Series(str(curve["ranking"]), tuple((x, y) for x, y, _ in places), style)
    edges = (tuple((x, y + side * _REACH * std) for x, y, std in places) for side in (-1, 1))
    return [middle, *(Series(f"{middle.name}, 95 %", edge, style, dashed=True, dots=False) for edge in edges)]


def _rows(curves: list[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    return [
        (
            str(curve["ranking"]),
            percent(x),
            percent(y),
            f"{percent(y - _REACH * std)} to {percent(y + _REACH * std)}",
        )
        for curve in curves
        for x, y, std in zip(curve["ratio"], curve["share"], curve["std"], strict=True)
    ]
