"""One colour for each method, the same in every report."""

from __future__ import annotations

from sparsedp.methods.catalog import list_methods

_FIXED = (
    "dp-sgd",
    "tp-topk",
    "tp-coherent",
    "tp-rand",
    "on-rand",
    "on-topk",
    "ranked",
    "adadpigu",
    "noisy-sgd",
    "clipped-sgd",
)
OTHER = "m10"
"""Methods registered by users share the last colour; names tell them apart."""


def method_style(name: str) -> str:
    """The style-sheet class of a method."""
    return f"m{_FIXED.index(name)}" if name in _FIXED else OTHER


def method_rank(name: str) -> int:
    """Where a method stands in lists: the table's order, unknown ones last."""
    known = [*_FIXED, *(method.name for method in list_methods() if method.name not in _FIXED)]
    return known.index(name) if name in known else len(known)
