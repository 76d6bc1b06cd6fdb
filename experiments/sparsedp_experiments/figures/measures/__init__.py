"""The kinds of measurement, by the name a study gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from sparsedp_experiments.figures.config import Point, Study
from sparsedp_experiments.figures.measures import (
    bounds,
    freezing,
    inversion,
    leastsquares,
    misranking,
    symmetry,
    warmup,
    wire,
)

KINDS: Mapping[str, Callable[[Study, Point], dict[str, Any]]] = MappingProxyType(
    {
        "warmup": warmup.measure,
        "freezing": freezing.measure,
        "symmetry": symmetry.measure,
        "least-squares": leastsquares.measure,
        "inversion": inversion.measure,
        "misranking": misranking.measure,
        "wire": wire.measure,
        "bounds": bounds.measure,
    }
)
"""A measurement takes a study and one of its points and gives JSON values."""
