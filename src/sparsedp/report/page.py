"""The page around the sections: one self-contained file that loads nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import final

from sparsedp.report.markup import Attributes, Child, Html, join, tag


@final
@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page with its own heading and place in the table of contents."""

    key: str
    title: str
    content: Child
    lead: Child = None


@final
@dataclass(frozen=True, slots=True)
class Page:
    """A whole report.

    Attributes:
        title: of the page.
        subtitle: one line under it.
        head: badges, statement and headline numbers.
        sections: in order.
        footer: what made it.
    """

    title: str
    subtitle: str
    head: Child
    sections: Sequence[Section]
    footer: str

    def html(self) -> str:
        """The file's text."""
        keys = [section.key for section in self.sections]
        assert len(set(keys)) == len(keys)
        body = tag(
            "body",
            None,
            tag("a", {"class": "skip", "href": "#content"}, "Skip to the content"),
            self._header(),
            tag("main", {"id": "content"}, [_section(section) for section in self.sections]),
            tag("footer", None, tag("p", None, self.footer)),
            tag("script", None, Html(_asset("report.js"))),
        )
        document = tag("html", {"lang": "en"}, self._head(), body)
        return f"<!doctype html>\n{document.text}\n"

    def _head(self) -> Html:
        return tag(
            "head",
            None,
            tag("meta", {"charset": "utf-8"}),
            tag("meta", {"http-equiv": "Content-Security-Policy", "content": _policy()}),
            tag("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
            tag("meta", {"name": "color-scheme", "content": "light dark"}),
            tag("title", None, f"{self.title} · sparsedp report"),
            tag("style", None, Html(_asset("report.css"))),
        )

    def _header(self) -> Html:
        links = [tag("li", None, tag("a", {"href": f"#{s.key}"}, s.title)) for s in self.sections]
        button: Attributes = {"type": "button", "id": "theme", "class": "theme", "hidden": True}
        return tag(
            "header",
            None,
            tag(
                "div",
                {"class": "bar"},
                tag("span", {"class": "mark"}, "sparsedp"),
                tag("button", button, "Theme"),
            ),
            tag("h1", None, self.title),
            tag("p", {"class": "subtitle"}, self.subtitle),
            self.head,
            tag("nav", {"aria-label": "Contents"}, tag("ul", None, links)),
        )


def _section(section: Section) -> Html:
    lead = tag("p", {"class": "lead"}, section.lead) if section.lead else None
    heading = {"id": section.key, "tabindex": "-1"}
    return tag("section", None, join(tag("h2", heading, section.title), lead, section.content))


def _policy() -> str:
    """Nothing is fetched, and only this page's own script runs."""
    digest = base64.b64encode(hashlib.sha256(_asset("report.js").encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"


@cache
def _asset(name: str) -> str:
    return files("sparsedp.report").joinpath("assets", name).read_text(encoding="utf-8")
