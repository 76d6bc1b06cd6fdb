"""For the documentation site: show the doctests of docstrings as blocks of code."""

from __future__ import annotations

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


class DoctestBlocks(griffe.Extension):
    """Put a fence around every doctest outside of an `Examples` section, and leave its flags out."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of a module, class or function that griffe has read."""
        if obj.docstring is not None:
            obj.docstring.value = _DOCTEST.sub(_fenced, obj.docstring.value)


def _fenced(found: re.Match[str]) -> str:
    code = re.sub(r"\s*# doctest:.*", "", found.group())
    return f"```pycon\n{code}\n```"
