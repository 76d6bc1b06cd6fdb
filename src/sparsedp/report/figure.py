"""Figures, tables and cards: what a section of a report is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from sparsedp.report.markup import Child, Html, join, tag

WIDE, NARROW = 520, 340
"""Pixels a chart is drawn for: half a screen, and a phone. The style sheet shows the one that fits."""


@final
@dataclass(frozen=True, slots=True)
class Table:
    """Rows under headings; columns from the second on are numbers and stand to the right, unless `text` says not."""

    headings: tuple[str, ...]
    rows: tuple[tuple[Child, ...], ...]
    text: frozenset[int] = frozenset({0})

    def html(self, caption: str) -> Html:
        """The table, in a box that scrolls sideways where it does not fit."""
        head = [tag("th", {"scope": "col", "class": self._side(i)}, h) for i, h in enumerate(self.headings)]
        body = [tag("tr", None, [self._cell(i, cell) for i, cell in enumerate(row)]) for row in self.rows]
        table = tag(
            "table",
            None,
            tag("caption", {"class": "unseen"}, caption),
            tag("thead", None, tag("tr", None, head)),
            tag("tbody", None, body),
        )
        return tag(
            "div", {"class": "scroll", "tabindex": "0", "role": "region", "aria-label": caption}, table
        )

    def _cell(self, place: int, cell: Child) -> Html:
        if place == 0:
            return tag("th", {"scope": "row", "class": self._side(place)}, cell)
        return tag("td", {"class": self._side(place)}, cell)

    def _side(self, place: int) -> str | None:
        return None if place in self.text else "number"


@final
@dataclass(frozen=True, slots=True)
class Legend:
    """The lines of a chart by name, with the style-sheet class of each."""

    entries: tuple[tuple[str, str], ...]

    def html(self) -> Html:
        """A list of names with their colours."""
        items = [
            tag("li", None, tag("span", {"class": f"key {style}"}), name) for name, style in self.entries
        ]
        return tag("ul", {"class": "legend"}, items)


def figure(
    title: str,
    draw: Callable[[int], Html],
    caption: Child,
    table: Table,
    legend: Legend | None = None,
) -> Html:
    """A chart at two sizes, a caption that says what to see, and its numbers as a table."""
    return tag(
        "figure",
        {"class": "card"},
        tag("h3", None, title),
        legend.html() if legend else None,
        tag("div", {"class": "wide"}, draw(WIDE)),
        tag("div", {"class": "narrow"}, draw(NARROW)),
        tag("figcaption", None, caption),
        numbers(title, table),
    )


def numbers(title: str, table: Table) -> Html:
    """A table folded away under its figure."""
    return tag("details", None, tag("summary", None, "Numbers"), table.html(f"Numbers of: {title}"))


def card(title: str | None, *content: Child) -> Html:
    """A box with a heading."""
    return tag("div", {"class": "card"}, tag("h3", None, title) if title else None, *content)


def tile(label: str, value: str, note: str) -> Html:
    """One headline number."""
    return tag(
        "div",
        {"class": "tile"},
        tag("span", {"class": "label"}, label),
        tag("strong", None, value),
        tag("span", {"class": "note"}, note),
    )


def badge(text: str, kind: str) -> Html:
    """A short mark: `good`, `warn`, `bad` or `plain`."""
    return tag("span", {"class": f"badge {kind}"}, text)


def bullets(items: Sequence[Child]) -> Html:
    """A list."""
    return tag("ul", None, [tag("li", None, item) for item in items])


def grid(*cards: Child) -> Html:
    """Cards side by side where there is room."""
    return tag("div", {"class": "cards"}, *cards)


def pair(term: str, value: Child) -> Html:
    """One line of a description list."""
    return join(tag("dt", None, term), tag("dd", None, value))
