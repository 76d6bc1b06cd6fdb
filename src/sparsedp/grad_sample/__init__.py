"""Gradient engines: the clipped sum of per-unit gradients on a support."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from sparsedp.batch import LossFunction
from sparsedp.errors import SparseDPError
from sparsedp.grad_sample import batching as _batching  # noqa: F401  registers its rules
from sparsedp.grad_sample.bookkeeping import BookKeepingEngine
from sparsedp.grad_sample.query import ClippedSumEngine, ClippedSumQuery
from sparsedp.grad_sample.reference import ReferenceEngine

ENGINES: dict[str, Callable[[nn.Module, LossFunction], ClippedSumEngine]] = {
    "bookkeeping": BookKeepingEngine,
    "reference": ReferenceEngine,
}


def make_engine(model: nn.Module, loss: LossFunction, kind: str = "bookkeeping") -> ClippedSumEngine:
    """The engine of a kind: `bookkeeping` (fast, the default) or `reference` (the specification)."""
    if kind not in ENGINES:
        raise SparseDPError(f"engine: got {kind!r}, expected one of {sorted(ENGINES)}")
    return ENGINES[kind](model, loss)


__all__ = [
    "ENGINES",
    "BookKeepingEngine",
    "ClippedSumEngine",
    "ClippedSumQuery",
    "ReferenceEngine",
    "make_engine",
]
