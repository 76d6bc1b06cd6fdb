"""How many rows go through the model at once: by shapes alone, so that a seeded run is the same everywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from sparsedp.batch import MicroBatch
from sparsedp.core.geometry import Identity
from sparsedp.grad_sample.blocks import Metric, Metrics
from sparsedp.grad_sample.forward import Forward
from sparsedp.grad_sample.layers.linear import Outer
from sparsedp.grad_sample.layers.shared import Use
from sparsedp.grad_sample.layers.source import Closed, Source, is_closed, is_mergeable
from sparsedp.grad_sample.query import Query

CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 1 << 30}
"""Activations and explicit gradients of one chunk aim at this size: the last-level cache, or a share of a GPU."""
CALLS_PER_CHUNK = 3
"""Every so many layer calls a chunk grows by its size again: with many small layers, overhead outweighs the cache."""
MOST_GROWTH = 8
"""Times a chunk grows so at most: beyond the cache, larger chunks cost memory and win little."""
FIRST_CHUNK, LEAST_CHUNK, MOST_CHUNK = 16, 8, 4096
"""Samples in the measuring chunk, and the bounds on all others."""


@dataclass(frozen=True, slots=True)
class RowKind:
    """What the cost of a sample depends on, besides the support."""

    shapes: tuple[torch.Size, ...]
    keeps_largest: bool
    by_unit: bool
    as_it_is: bool

    @classmethod
    def of(cls, leaves: Sequence[object], batch: MicroBatch, query: Query) -> RowKind:
        """That of a batch with these leaves."""
        return cls(
            tuple(leaf.shape[1:] for leaf in leaves if isinstance(leaf, Tensor)),
            query.kept_per_unit < query.support.size,
            batch.units is not None,
            isinstance(query.geometry, Identity),
        )


def chunk_bytes(device: torch.device) -> int:
    """What a chunk may hold on a device."""
    return CHUNK_BYTES.get(device.type, CHUNK_BYTES["cuda"])


def chunk_rows(
    forward: Forward,
    uses: Sequence[Use],
    sources: Mapping[str, Sequence[Source]],
    kind: RowKind,
    plain: Metrics,
    query: Query,
    device: torch.device,
) -> int:
    """Rows of a chunk, a power of two, from what a few rows hold: activations, gradients, explicit gradients.

    `plain` are the metrics of gradients that are measured as they are.
    """
    calls, seen = forward.tape.calls, 0
    for call in calls:
        seen += call.input.numel() + (0 if call.output_gradient is None else call.output_gradient.numel())
    for use in uses:
        seen += 2 * sum(gradient.numel() for gradient in use.gradients.values())
    explicit = sum(
        source.block_size
        for name, many in sources.items()
        for source in many
        if _is_formed(source, kind, plain.of(name), alone=len(many) == 1)
    )
    if kind.keeps_largest:
        explicit += 4 * query.support.size
    each = 4 * (seen // forward.samples + explicit)
    work = len(calls) + sum(use.steps for use in uses)
    room = chunk_bytes(device) * min(max(1, work // CALLS_PER_CHUNK), MOST_GROWTH)
    rows = min(max(room // max(each, 1), LEAST_CHUNK), MOST_CHUNK)
    return 1 << (rows.bit_length() - 1)


def _is_formed(source: Source, kind: RowKind, plain: Metric, *, alone: bool) -> bool:
    """Whether explicit gradients are made of a source.

    Single outer products are not counted even where units or other calls have them formed: recorded runs were cut so.
    """
    if isinstance(source, Outer) or is_mergeable(type(source)):
        return False
    if not is_closed(type(source)) or kind.by_unit or not kind.as_it_is or not alone:
        return True
    return not cast(Closed, source).holds(plain)
