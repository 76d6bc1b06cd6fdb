"""The page around the sections: one self-contained file that loads nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import final

from sparsedp.report.markup import Child, Html
from sparsedp.report.rendering import render


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
        return render(
            "page.html",
            page=self,
            policy=_policy(),
            style=Html(_asset("report.css")),
            script=Html(_asset("report.js")),
        )


def _policy() -> str:
    """Nothing is fetched, and only this page's own script runs."""
    digest = base64.b64encode(hashlib.sha256(_asset("report.js").encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"


@cache
def _asset(name: str) -> str:
    return files("sparsedp.report").joinpath("assets", name).read_text(encoding="utf-8")
