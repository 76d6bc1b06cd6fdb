"""Templates of pages and their parts: text is escaped, and a name that is missing is an error."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from jinja2.ext import Extension

from sparsedp.report.markup import Html, join


class _LineBreaksAreLayout(Extension):
    """Drops line breaks and the spaces around them from templates: pages hold no white space nobody meant."""

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        """The template in one line."""
        return re.sub(r"\s*\n\s*", "", source)


def render(template: str, **values: Any) -> str:
    """A whole template filled in."""
    return _environment().get_template(template).render(values)


def part(macro: str, *values: Any) -> Html:
    """A macro of `parts.html` filled in."""
    return Html(str(getattr(_parts(), macro)(*values)))


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("sparsedp.report"),
        autoescape=True,
        undefined=StrictUndefined,
        extensions=[_LineBreaksAreLayout],
    )
    environment.filters["markup"] = join
    return environment


@cache
def _parts() -> Any:
    return _environment().get_template("parts.html").module
