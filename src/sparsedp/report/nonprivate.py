"""Non-private diagnostics: shown only when asked for, under a banner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsedp.report.chart import Series, line_chart
from sparsedp.report.figure import Legend, Table, banner, bullets, card, figure, grid
from sparsedp.report.markup import Html, join, tag
from sparsedp.report.numbers import significant
from sparsedp.report.page import Section
from sparsedp.report.scale import linear_axis
from sparsedp.runs.directory import NONPRIVATE
from sparsedp.runs.nonprivate_file import Diagnostics

WARNING = (
    "Not private. Everything in this section was computed from data without noise. Publishing it, or choosing "
    "anything by it, breaks the guarantee above."
)
STYLES = ("main", "second", "third", "fourth", "fifth", "quiet")


def diagnostics_section(found: Diagnostics) -> Section:
    """The section with its banner, also when there is nothing to show."""
    shown: list[Html] = []
    if found.values:
        rows = tuple(
            (str(v["name"]), significant(float(v["value"]), 4), str(v.get("note", ""))) for v in found.values
        )
        table = Table(("name", "value", "note"), rows, frozenset({0, 2})).html("Values")
        shown.append(tag("div", {"class": "card full"}, tag("h3", None, "Values"), table))
    shown += [_figure(entry) for entry in found.figures]
    if found.remarks:
        shown.append(card("Remarks", bullets(found.remarks)))
    if not shown:
        shown = [card(None, tag("p", None, f"This run kept no non-private diagnostics (no {NONPRIVATE})."))]
    return Section("nonprivate", "Non-private diagnostics", join(banner(WARNING, "bad"), grid(shown)))


def _figure(entry: Mapping[str, Any]) -> Html:
    joined = entry.get("kind", "lines") == "lines"
    series = [
        Series(
            str(line["name"]),
            tuple(zip(map(float, line["x"]), map(float, line["y"]), strict=True)),
            style,
            joined=joined,
        )
        for line, style in zip(entry["series"], STYLES, strict=False)
    ]
    points = [point for line in series for point in line.points]
    x = linear_axis(str(entry["x"]), min(p[0] for p in points), max(p[0] for p in points))
    y = linear_axis(str(entry["y"]), min(p[1] for p in points), max(p[1] for p in points))
    rows = tuple((line.name, significant(a, 4), significant(b, 4)) for line in series for a, b in line.points)
    title = f"{entry['title']} (not private)"
    return figure(
        title,
        lambda width: line_chart(width, x, y, series, f"{title}: {y.label} against {x.label}."),
        str(entry.get("note", "")),
        Table(("line", x.label, y.label), rows),
        Legend(tuple((line.name, line.style) for line in series)),
    )
