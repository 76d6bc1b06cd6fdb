"""Which methods a slow test tries every day; `make nightly` tries the others."""

from collections.abc import Iterable
from typing import Any

import pytest

OFTEN = frozenset({"dp-sgd", "tp-topk", "on-rand", "adadpigu", "fest"})
"""One of each kind: dense, learned once, renewed, standardized, by a count."""


def by_method(names: Iterable[str]) -> list[Any]:
    """The names, as parameters of a test."""
    return [name if name in OFTEN else pytest.param(name, marks=pytest.mark.nightly) for name in names]
