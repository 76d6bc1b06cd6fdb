"""Pieces of methods by name: the library's own, and those that users make known."""

from __future__ import annotations

import difflib
from typing import TypeVar

from sparsedp.errors import SparseDPError

T = TypeVar("T")


def add_named(known: dict[str, T], name: str, one: T, what: str) -> T:
    """Make one known by its name."""
    if known.setdefault(name, one) != one:
        raise SparseDPError(f"{what}: the name {name!r} is taken; choose another")
    return one


def find_named(known: dict[str, T], name: str, what: str) -> T:
    """The one of that name."""
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"Did you mean {near[0]!r}? One" if near else "One"
        raise SparseDPError(
            f"{what}: got {name!r}, expected one of {', '.join(sorted(known))}. {hint} of your own is made known by "
            f"register_{what}"
        )
    return known[name]
