"""One chunk's clipped sum from its layers' sources: norms, factors, sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsedp.gradients.blocks import Block, Metrics
from sparsedp.gradients.layers.source import ClosedNorm, Source
from sparsedp.gradients.query import Query, sum_clipped_rows


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """The per-sample gradients of one chunk, by parameter; a parameter the loss ignores is absent. Private.

    A parameter used by several calls has several sources, to be added sample by sample. With `units`, samples of one
    unit are added too (their losses were already divided by the unit's size).
    """

    samples: int
    units: Tensor | None
    sources: Mapping[str, list[Source]]
    device: torch.device

    @property
    def unit_count(self) -> int:
        """Contributions that are clipped."""
        return self.samples if self.units is None else int(self.units[-1]) + 1

    def explicit(self, name: str, span: slice) -> Tensor:
        """One parameter's gradients for some samples, or per unit for all, [planes, contributions, scalars]."""
        first, *others = self.sources[name]
        if others:
            gradients = _in_block_order(first, span)
            for source in others:
                gradients += _in_block_order(source, span)
        else:
            gradients = first.explicit(span)
        if self.units is None:
            return gradients
        merged = gradients.new_zeros(gradients.shape[0], self.unit_count, gradients.shape[2])
        return merged.index_add_(1, self.units, gradients)


def clipped_chunk_sum(
    chunk: Chunk, blocks: Mapping[str, Block], metrics: Metrics, query: Query, keep: int
) -> Tensor:
    """The chunk's share of the clipped sum, a float64 k-vector.

    Explicit gradients of a parameter are kept between the norm and the sum when they fit in `keep` bytes; otherwise
    they are formed a few samples at a time for the norm, and the sum is an ordinary weight gradient.
    """
    if query.kept_per_unit < query.support.size:
        return sum_clipped_rows(_restricted_rows(chunk, blocks, query.support.size), query)
    squared, kept = _squared_norms(chunk, blocks, metrics, keep)
    factors = query.clip.factors(squared.sqrt())
    per_sample = factors if chunk.units is None else factors[chunk.units]
    total = torch.empty(query.support.size, dtype=torch.float64, device=chunk.device)
    for name, block in blocks.items():
        if name in kept:
            summed = _sum_kept(chunk, name, kept.pop(name), factors)
        else:
            raw = torch.zeros(block.size, dtype=torch.float64, device=chunk.device)
            for source in chunk.sources.get(name, ()):
                raw += source.weighted_sum(per_sample).reshape(-1)
            summed = metrics.of(name).apply_to_sum(raw, factors.sum())
        total[block.span] = summed.to(torch.float64)[block.places]
    return total


def _squared_norms(
    chunk: Chunk, blocks: Mapping[str, Block], metrics: Metrics, keep: int
) -> tuple[Tensor, dict[str, Tensor]]:
    squared = torch.zeros(chunk.unit_count, dtype=torch.float64, device=chunk.device)
    kept: dict[str, Tensor] = {}
    for name in blocks:
        sources = chunk.sources.get(name, [])
        if not sources:
            squared += metrics.of(name).squared_constant()
            continue
        if len(sources) == 1 and chunk.units is None and isinstance(sources[0], ClosedNorm):
            squared += sources[0].squared_norms(metrics.of(name))
            continue
        bytes_each = 4 * sources[0].block_size
        if chunk.units is not None or bytes_each * chunk.samples <= keep:
            kept[name] = _measured(chunk, name, metrics, slice(None))
            squared += _row_squares(kept[name])
        else:
            rows = max(1, keep // bytes_each)
            for start in range(0, chunk.samples, rows):
                span = slice(start, start + rows)
                squared[span] += _row_squares(_measured(chunk, name, metrics, span))
    return squared, kept


def _measured(chunk: Chunk, name: str, metrics: Metrics, span: slice) -> Tensor:
    sources = chunk.sources[name]
    gradients = chunk.explicit(name, span)
    if len(sources) > 1:
        metric = metrics.in_planes(name, lambda block: block.reshape(1, -1))
    else:
        metric = metrics.in_planes(name, sources[0].to_planes)
    return metric.apply_(gradients)


def _row_squares(z: Tensor) -> Tensor:
    return torch.linalg.vector_norm(z, dim=2).to(torch.float64).square().sum(0)


def _sum_kept(chunk: Chunk, name: str, z: Tensor, factors: Tensor) -> Tensor:
    quiet = factors == 0
    if bool(quiet.any()):
        z[:, quiet] = 0
    summed: Tensor = torch.matmul(factors.to(z), z)
    sources = chunk.sources[name]
    in_order: Tensor = summed if len(sources) > 1 else sources[0].from_planes(summed)
    return in_order.reshape(-1)


def _in_block_order(source: Source, span: slice) -> Tensor:
    """Explicit gradients as one plane in the block's own order."""
    planes = source.explicit(span)
    if planes.shape[0] == 1:
        return planes
    rows = [source.from_planes(planes[:, i]).reshape(-1) for i in range(planes.shape[1])]
    return torch.stack(rows).unsqueeze(0)


def _restricted_rows(chunk: Chunk, blocks: Mapping[str, Block], size: int) -> Tensor:
    """The explicit [contributions, k] matrix of one chunk: what the per-sample top-r cannot do without."""
    rows = torch.zeros(chunk.unit_count, size, dtype=torch.float64, device=chunk.device)
    for name, block in blocks.items():
        sources = chunk.sources.get(name, [])
        if not sources:
            continue
        planes = chunk.explicit(name, slice(None))
        if len(sources) == 1 and planes.shape[0] > 1:
            flat = torch.stack(
                [sources[0].from_planes(planes[:, i]).reshape(-1) for i in range(planes.shape[1])]
            )
        else:
            flat = planes[0]
        rows[:, block.span] = flat[:, block.places].to(torch.float64)
    return rows
