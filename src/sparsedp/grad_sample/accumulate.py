"""Clipped sums from the parameters' grad samplers, chunk by chunk: norms, factors, sums."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparsedp.clipping import LayerClip
from sparsedp.grad_sample.query import ClippedSumQuery, group_of_coordinates, sum_clipped_rows
from sparsedp.grad_sample.sampler import (
    MOST_SUMMED,
    Block,
    GradSampler,
    Metric,
    Metrics,
    UnitPlaces,
    add_to,
    spans,
    squared_norms_of,
)

_Grouped = tuple[list[GradSampler], Tensor | None]
"""One parameter's samplers, and the unit of each example if gradients are still to be added up by it."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """The per-example gradients of one chunk, by parameter; a parameter the loss ignores is absent. Private.

    A parameter used several times has several samplers, to be added example by example. With `units`, examples of one
    unit are added too (their losses were already divided by the unit's size): before anything is formed where the
    samplers can do it, else once it is.
    """

    examples: int
    units: Tensor | None
    samplers: Mapping[str, list[GradSampler]]
    _known: dict[str, _Grouped] = field(default_factory=dict, init=False)

    @property
    def unit_count(self) -> int:
        """Contributions that are clipped."""
        return self.examples if self.units is None else int(self.units[-1]) + 1

    @functools.cached_property
    def _places(self) -> UnitPlaces | None:
        return None if self.units is None else UnitPlaces.of(self.units)

    def _grouped(self, name: str) -> _Grouped:
        if name not in self._known:
            first, *others = self.samplers[name]
            joined = first.joined(others)
            samplers, units = self.samplers[name] if joined is None else [joined], self.units
            if units is not None:
                by_unit = [sampler.by_unit(units, self._places) for sampler in samplers]
                if all(sampler is not None for sampler in by_unit):
                    samplers, units = [sampler for sampler in by_unit if sampler is not None], None
            self._known[name] = samplers, units
        return self._known[name]

    def comes_whole(self, name: str) -> bool:
        """Whether a parameter's gradients can only be had for all units together."""
        return self._grouped(name)[1] is not None

    def explicit(self, name: str, span: slice) -> Tensor:
        """One parameter's gradients, [planes, contributions, scalars]: of some, or of all where they come whole."""
        (first, *others), units = self._grouped(name)
        if others:
            gradients = first.in_block_order(span)
            if span != slice(None):
                gradients = gradients.clone()  # the next sampler's lie in the same room
            for sampler in others:
                gradients += sampler.in_block_order(span)
        else:
            gradients = first.explicit(span)
        if units is None:
            return gradients
        merged = gradients.new_zeros(gradients.shape[0], self.unit_count, gradients.shape[2])
        return merged.index_add_(1, units, gradients)

    def ghost_norm(self, name: str, metric: Metric) -> GradSampler | None:
        """The parameter's gradients, per unit where there are units, if formulas hold; the same object again."""
        (first, *others), units = self._grouped(name)
        if others or units is not None or not first.has_ghost_norm(metric):
            return None
        return first

    def sole_sampler(self, name: str) -> GradSampler | None:
        """The parameter's sampler if it has just one."""
        samplers, _ = self._grouped(name)
        return samplers[0] if len(samplers) == 1 else None

    def restricted(self, blocks: Mapping[str, Block], span: slice) -> Tensor:
        """The explicit [contributions, k] matrix of some examples, or of all units, on the support."""
        count = len(range(*span.indices(self.unit_count)))
        parts = []
        for name, block in blocks.items():
            if name not in self.samplers:
                parts.append(torch.zeros(count, block.active_count, device=block.device))
                continue
            planes, sampler = self.explicit(name, span), self.sole_sampler(name)
            if sampler is not None:
                planes = sampler.as_one_plane(planes)
            parts.append(block.active(planes[0]).to(torch.float64, copy=True))
        return torch.cat([part.to(torch.float64) for part in parts], dim=1)


class ClippedSum:
    """Adds up clipped gradients over chunks. Each parameter's sum stays in the order it first came in till the end.

    Where a block is all active and measured as it is, its sum is made in its place of the result: of these no second
    vector exists. Others have a sum of their own till the end.

    `keep` bounds the bytes of explicit gradients held between a parameter's norm and its sum. What does not fit is
    formed a few examples at a time for the norm, and once more for the sum: both must see the same numbers, or
    examples whose positions cancel would slip past the clip.
    """

    def __init__(
        self,
        blocks: Mapping[str, Block],
        metrics: Metrics,
        query: ClippedSumQuery,
        keep: int,
        device: torch.device,
    ) -> None:
        self._blocks = blocks
        self._metrics = metrics
        self._query = query
        clip = query.clip
        self._group = {name: clip.group(name) if isinstance(clip, LayerClip) else 0 for name in blocks}
        self._keep = keep
        self._total = torch.zeros(query.support.size, dtype=torch.float64, device=device)
        self._homes = {
            name: self._total[block.span]
            for name, block in blocks.items()
            if block.places is None and metrics.of(name).is_identity
        }
        self._measured: dict[str, Tensor] = {}
        self._samplers: dict[str, GradSampler | None] = {}
        self._raw: dict[str, Tensor] = {}
        self._raw_factors: dict[str, Tensor] = {}

    def add(self, chunk: Chunk) -> None:
        """Clip and add one chunk."""
        clip = self._query.clip
        if self._query.kept_per_unit < self._query.support.size:
            counts = {name: block.active_count for name, block in self._blocks.items()}
            groups = group_of_coordinates(clip, counts, self._total.device)
            rows = chunk.restricted(self._blocks, slice(None))
            self._total += sum_clipped_rows(rows, self._query, groups)
            return
        squared, kept = self._squared_norms(chunk)
        by_group = isinstance(clip, LayerClip)
        found = clip.factors(torch.stack(squared).sqrt()) if by_group else [clip.factors(squared[0].sqrt())]
        for name, block in self._blocks.items():
            factors = found[self._group[name]]
            if name in kept:
                self._add_measured(chunk, name, kept[name], factors)
            elif (ghost := self._ghost(chunk, name)) is not None:
                ghost.add_weighted_sum(factors, self._raw_sum(name, block), self._metrics.of(name))
                _accumulate(self._raw_factors, name, factors.sum())
            elif name in chunk.samplers:
                for span in self._spans(chunk, name):
                    self._add_measured(chunk, name, self._measure(chunk, name, span), factors[span])
            else:
                _accumulate(self._raw_factors, name, factors.sum())

    def _add_measured(self, chunk: Chunk, name: str, z: Tensor, factors: Tensor) -> None:
        rejected = factors == 0
        if bool(rejected.any()):
            z[:, rejected] = 0
        for span in spans(z.shape[1], MOST_SUMMED):
            planes = torch.matmul(factors[span].to(z), z[:, span])
            if name in self._homes and name not in self._raw:
                self._measured.setdefault(name, self._homes[name].view(planes.shape))
            _accumulate(self._measured, name, self._in_first_order(chunk, name, planes))

    def _in_first_order(self, chunk: Chunk, name: str, planes: Tensor) -> Tensor:
        """Planes as the first chunk's came; a layer called more or less often in this one has others."""
        sampler = chunk.sole_sampler(name)
        if name not in self._measured or planes.shape == self._measured[name].shape:
            self._samplers[name] = sampler
            return planes
        block = planes if sampler is None else sampler.from_planes(planes)
        first = self._samplers[name]
        return block if first is None else first.to_planes(block.reshape(self._blocks[name].shape))

    def _raw_sum(self, name: str, block: Block) -> Tensor:
        if name not in self._raw:
            at_home = name in self._homes and name not in self._measured
            self._raw[name] = self._homes[name] if at_home else self._total.new_zeros(block.size)
        return self._raw[name]

    def total(self) -> Tensor:
        """The clipped sum on the support, a float64 k-vector; to be asked once, at the end."""
        for name, block in self._blocks.items():
            place = self._total[block.span]
            if name in self._measured:
                sampler, planes = self._samplers[name], self._measured.pop(name)
                flat = (planes if sampler is None else sampler.from_planes(planes)).reshape(-1)
                if planes.data_ptr() == place.data_ptr() != flat.data_ptr():
                    place.copy_(block.active(flat))  # made in its place, but in another order
                elif flat.data_ptr() != place.data_ptr():
                    place += block.active(flat)
            metric, raw = self._metrics.of(name), self._raw.pop(name, None)
            if raw is None and name in self._raw_factors and not metric.is_identity:
                raw = self._total.new_zeros(block.size)
            if raw is not None and raw.data_ptr() != place.data_ptr():
                place += block.active(metric.apply_to_sum(raw, self._raw_factors[name]))
        return self._total

    def _squared_norms(self, chunk: Chunk) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Squared norms in the metric, one vector for each group of the clip, and the gradients kept for the sum."""
        clip = self._query.clip
        squared: list[Tensor | float] = [0.0] * (len(clip.norms) if isinstance(clip, LayerClip) else 1)
        kept: dict[str, Tensor] = {}
        for name, group in self._group.items():
            if name not in chunk.samplers:
                squared[group] = squared[group] + self._metrics.of(name).squared_constant()
                continue
            if (ghost := self._ghost(chunk, name)) is not None:
                more = ghost.squared_norms(self._metrics.of(name)).double()
            elif chunk.comes_whole(name) or self._bytes_each(chunk, name) * chunk.unit_count <= self._keep:
                kept[name] = self._measure(chunk, name, slice(None))
                more = squared_norms_of(kept[name]).sum(0)
            else:
                parts = (self._measure(chunk, name, span) for span in self._spans(chunk, name))
                more = torch.cat([squared_norms_of(z).sum(0) for z in parts])
            squared[group] = squared[group] + more
        like = self._total
        vectors = [like.new_full((chunk.unit_count,), s) if isinstance(s, float) else s for s in squared]
        return vectors, kept

    def _ghost(self, chunk: Chunk, name: str) -> GradSampler | None:
        return chunk.ghost_norm(name, self._metrics.of(name)) if name in chunk.samplers else None

    @staticmethod
    def _bytes_each(chunk: Chunk, name: str) -> int:
        return 4 * chunk.samplers[name][0].block_size

    def _spans(self, chunk: Chunk, name: str) -> list[slice]:
        return spans(chunk.unit_count, self._keep // self._bytes_each(chunk, name))

    def _measure(self, chunk: Chunk, name: str, span: slice) -> Tensor:
        sampler, gradients = chunk.sole_sampler(name), chunk.explicit(name, span)
        to_planes = GradSampler().to_planes if sampler is None else sampler.to_planes
        return self._metrics.in_planes(name, gradients.shape[0], to_planes).apply_(gradients)


def _accumulate(sums: dict[str, Tensor], name: str, value: Tensor) -> None:
    if name in sums:
        add_to(sums[name].view(-1), value)
    else:
        sums[name] = value.to(torch.float64, copy=True)
