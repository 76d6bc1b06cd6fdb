"""HTML and SVG as values: text is escaped unless it is already markup."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from typing import final


@final
@dataclass(frozen=True, slots=True)
class Html:
    """Finished markup."""

    text: str

    def __html__(self) -> str:
        """What templates ask markup for, in the place of escaping it."""
        return self.text


Child = Html | str | int | None | Iterable["Child"]
Attributes = Mapping[str, str | int | float | bool | None]

_VOID = frozenset({"meta", "hr", "br", "rect", "line", "path", "circle", "polyline"})
"""Elements written without an end tag when they have no children."""


def tag(name: str, attributes: Attributes | None = None, *children: Child) -> Html:
    """One element. Attributes that are None or False are left out, True ones have no value.

    >>> tag("p", {"class": "note"}, "a < b", None, tag("br")).text
    '<p class="note">a &lt; b<br/></p>'
    """
    inside = "".join(map(_text, children))
    opening = f"<{name}{''.join(map(_attribute, (attributes or {}).items()))}"
    if not inside and name in _VOID:
        return Html(f"{opening}/>")
    return Html(f"{opening}>{inside}</{name}>")


def join(*parts: Child) -> Html:
    """Several pieces, one after the other."""
    return Html("".join(map(_text, parts)))


def plain(value: float) -> str:
    """A number for SVG: at most two decimals, the same on every machine."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def _text(child: Child) -> str:
    if child is None:
        return ""
    if hasattr(child, "__html__"):  # `Html`, or what a template made, which is a string too
        return str(child.__html__())
    if isinstance(child, (str, int)):
        return escape(str(child), quote=False)
    return "".join(map(_text, child))


def _attribute(item: tuple[str, str | int | float | bool | None]) -> str:
    name, value = item
    if value is None or value is False:
        return ""
    if value is True:
        return f" {name}"
    return f' {name}="{plain(value) if isinstance(value, float) else escape(str(value))}"'
