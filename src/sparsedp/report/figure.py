"""Figures, tables and cards: what a section of a report is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from sparsedp.report.markup import Child, Html
from sparsedp.report.rendering import part

WIDTH = 520
"""Pixels a chart is drawn for: half a screen. A phone shows it smaller."""


@final
@dataclass(frozen=True, slots=True)
class Table:
    """Rows under headings; columns from the second on are numbers and stand to the right, unless `text` says not."""

    headings: tuple[str, ...]
    rows: tuple[tuple[Child, ...], ...]
    text: frozenset[int] = frozenset({0})

    def html(self, caption: str) -> Html:
        """The table, in a box that scrolls sideways where it does not fit."""
        return part("table", self, caption)


@final
@dataclass(frozen=True, slots=True)
class Legend:
    """The lines of a chart by name, with the style-sheet class of each."""

    entries: tuple[tuple[str, str], ...]


def figure(
    title: str,
    draw: Callable[[int], Html],
    caption: Child,
    table: Table,
    legend: Legend | None = None,
    *,
    unfolded: bool = False,
) -> Html:
    """A chart, a caption that says what to see, and its numbers as a table, folded away or not."""
    return part("figure", title, draw(WIDTH), caption, table, legend, unfolded)


def numbers(title: str, table: Table) -> Html:
    """A table folded away under its figure."""
    return part("numbers", title, table)


def card(title: str | None, *content: Child) -> Html:
    """A box with a heading."""
    return part("card", title, content)


def remark(title: str, text: str) -> Html:
    """A sentence where a figure would stand, as wide as the page: beside a figure it would be an empty box."""
    return part("remark", title, text)


def tile(label: str, value: str, note: str) -> Html:
    """One headline number."""
    return part("tile", label, value, note)


def badge(text: str, kind: str) -> Html:
    """A short mark: `good`, `warn`, `bad` or `plain`."""
    return part("badge", text, kind)


def bullets(items: Sequence[Child]) -> Html:
    """A list."""
    return part("bullets", items)


def grid(*cards: Child) -> Html:
    """Cards side by side where there is room."""
    return part("grid", cards)


def badges(*marks: Child) -> Html:
    """Marks in a row."""
    return part("row", "badges", marks)


def tiles(*numbers: Child) -> Html:
    """Headline numbers in a row."""
    return part("row", "tiles", numbers)


def stack(*cards: Child) -> Html:
    """Cards one below the other."""
    return part("row", "stack", cards)


def folded(summary: str, content: Child, kind: str | None = None) -> Html:
    """Something to open; `kind` is its class in the style sheet."""
    return part("folded", summary, content, kind)


def code(text: str, label: str) -> Html:
    """Lines of code, in a box that scrolls."""
    return part("code", text, label)


def banner(text: str | None, kind: str = "warn") -> Html | None:
    """A remark nobody may overlook."""
    return part("banner", text, kind) if text else None
