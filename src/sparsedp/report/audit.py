"""An audit in a report: a card beside the run's guarantee, and a page of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sparsedp._files import write_atomically
from sparsedp.report.chart import Bars, histogram
from sparsedp.report.figure import Legend, Table, badge, badges, banner, bullets, card, figure, tile, tiles
from sparsedp.report.markup import Child, Html, join
from sparsedp.report.numbers import count, significant
from sparsedp.report.page import Page, Section
from sparsedp.report.scale import linear_axis

PAGE = "audit.html"
BINS = 30
WARNING = (
    "Not for release. An audit looks at private records without noise; this page is for whoever answers for the "
    "guarantee."
)
Audit = Mapping[str, Any]


def audit_card(found: Audit) -> Html:
    """What an audit of the run said."""
    return card(
        "Attacked from outside",
        badges(_verdict(found)),
        bullets([str(line) for line in found["words"]]),
    )


def audit_page(found: Audit) -> Page:
    """All there is to say about one audit."""
    headline = [
        tile("claimed epsilon", _number(found["claimed_epsilon"]), f"per {found['unit']}"),
        tile("shown by attack", _number(found["lower_bound"]), f"at confidence {found['confidence']:.7g}"),
        tile("one step, claimed", _number(found["one_step"]["claimed_epsilon"]), "the step that costs most"),
        tile("one step, shown", _number(found["one_step"]["lower_bound"]), "by attack"),
    ]
    checks = Table(
        ("tried", "", "what was found"),
        tuple((c["what"], badge(*_mark(c["passed"])), c["problem"] or "") for c in found["checks"]),
        frozenset({0, 1, 2}),
    )
    sections = [
        Section("words", "In words", bullets([str(line) for line in found["words"]])),
        Section("checks", "What was tried", checks.html("What was tried")),
    ]
    if found.get("model"):
        sections.insert(1, Section("models", "What trained models tell", _losses_figure(found["model"])))
    head: Child = join(
        badges(_verdict(found)),
        banner(WARNING, "bad"),
        tiles(headline),
    )
    return Page(
        title=f"Audit of {found['method']}",
        subtitle=f"{count(found['canaries'])} canaries, {count(found['steps'])} of {count(found['planned_steps'])} "
        f"steps, {count(found['dimension'])} trainable numbers, delta {significant(found['delta'])}",
        head=head,
        sections=sections,
        footer="Made by sparsedp audit. This page loads nothing from the network.",
    )


def _losses_figure(found: Audit) -> Html:
    """How far the losses of planted records fell, for those that were in the data and those that were not."""
    inside, outside = (np.asarray(found[side]) for side in ("inside", "outside"))
    x = linear_axis(
        "fall of the loss in training", *(float(f(np.append(inside, outside))) for f in (np.min, np.max))
    )
    edges = np.linspace(x.low, x.high, BINS + 1)
    below, above = (np.histogram(side, edges)[0] for side in (inside, outside))
    bars = Bars(tuple(map(float, edges)), tuple(map(int, below)), tuple(map(int, above)))
    y = linear_axis("records", 0, int((below + above).max()), text=count)
    rows = tuple(
        (significant(low), significant(high), count(a), count(b))
        for low, high, a, b in zip(edges, edges[1:], below, above, strict=False)
    )
    return figure(
        "Planted records",
        lambda width: histogram(
            width, x, y, bars, f"Histogram of {count(found['canaries'])} falls of the loss."
        ),
        f"Wrongly labelled records, planted by fair coins in the data of {count(found['trainings'])} models. The "
        "more the two parts differ, the more a model tells of who was in its data. Shown by guesses alone: epsilon "
        f"of at least {_number(found['lower_bound'])}; if scores were normal and independent it would be "
        f"{_number(found['estimate'])}.",
        Table(("from", "to", "in the data", "not in it"), rows, frozenset()),
        Legend((("in the data", "kept"), ("not in it", "frozen"))),
    )


def write_audit_page(found: Audit, folder: Path) -> Path:
    """Write the page into an audit's folder."""
    file = folder / PAGE
    write_atomically(file, audit_page(found).html().encode())
    return file


def _verdict(found: Audit) -> Html:
    return badge("no leak found", "good") if found["passed"] else badge("leak found", "bad")


def _mark(passed: bool) -> tuple[str, str]:
    return ("ok", "good") if passed else ("leak", "bad")


def _number(value: float | str) -> str:
    return "∞" if isinstance(value, str) else significant(value, 4)
