"""Clipped sums from the parameters' grad samplers, chunk by chunk: norms, factors, sums."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsedp.clipping import LayerClip
from sparsedp.grad_sample.query import ClippedSumQuery, group_of_coordinates, sum_clipped_rows
from sparsedp.grad_sample.sampler import (
    MOST_SUMMED,
    Block,
    GradSampler,
    Metric,
    UnitPlaces,
    add_to,
    spans,
    squared_norms_of,
)


@dataclass(frozen=True, eq=False)
class Chunk:
    """A chunk's per-example gradients: samplers by parameter, added example by example, then by unit. Private."""

    examples: int
    units: Tensor | None
    samplers: Mapping[str, list[GradSampler]]

    @property
    def unit_count(self) -> int:
        return self.examples if self.units is None else int(self.units[-1]) + 1

    @functools.cached_property
    def grouped(self) -> dict[str, tuple[list[GradSampler], Tensor | None]]:
        """Each parameter's samplers, and the unit of each example if gradients come whole, to be added up by it."""
        if self.units is None:
            return {name: (samplers, None) for name, samplers in self.samplers.items()}
        places = UnitPlaces.of(self.units)
        grouped: dict[str, tuple[list[GradSampler], Tensor | None]] = {}
        for name, samplers in self.samplers.items():
            found = [sampler.by_unit(self.units, places) for sampler in samplers]
            known = [sampler for sampler in found if sampler is not None]
            grouped[name] = (known, None) if len(known) == len(samplers) else (samplers, self.units)
        return grouped

    def explicit(self, name: str, span: slice) -> Tensor:
        """One parameter's gradients, [contributions, scalars]: of some, or of all where they come whole."""
        (first, *others), units = self.grouped[name]
        gradients = first.explicit(span)
        if others and span != slice(None):
            gradients = gradients.clone()  # the next sampler's lie in the same room
        for sampler in others:
            gradients += sampler.explicit(span)
        if units is None:
            return gradients
        return gradients.new_zeros(self.unit_count, gradients.shape[1]).index_add_(0, units, gradients)

    def ghost_norm(self, name: str, metric: Metric) -> GradSampler | None:
        """The parameter's gradients, per unit where there are units, if formulas hold; the same object again."""
        if name not in self.samplers:
            return None
        (first, *others), units = self.grouped[name]
        return None if others or units is not None or not first.has_ghost_norm(metric) else first

    def restricted(self, blocks: Mapping[str, Block]) -> Tensor:
        parts = [
            block.active(self.explicit(name, slice(None))).to(torch.float64, copy=True)
            if name in self.samplers
            else torch.zeros(self.unit_count, block.active_count, dtype=torch.float64, device=block.device)
            for name, block in blocks.items()
        ]
        return torch.cat(parts, dim=1)


class ClippedSum:
    """Adds up clipped gradients over chunks, those measured as they are in their place of the result.

    `keep` bounds the bytes of explicit gradients held between a parameter's norm and its sum. What does not fit is
    formed a few examples at a time for the norm, and once more for the sum: both must see the same numbers, or
    examples whose positions cancel would slip past the clip.
    """

    def __init__(
        self,
        blocks: Mapping[str, Block],
        metrics: Mapping[str, Metric],
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
        self._measured: dict[str, Tensor] = {}
        self._raw: dict[str, Tensor] = {}
        self._factors: dict[str, Tensor] = {}

    def add(self, chunk: Chunk) -> None:
        clip = self._query.clip
        if self._query.kept_per_unit < self._query.support.size:
            counts = {name: block.active_count for name, block in self._blocks.items()}
            groups = group_of_coordinates(clip, counts, self._total.device)
            self._total += sum_clipped_rows(chunk.restricted(self._blocks), self._query, groups)
            return
        squared, kept = self._squared_norms(chunk)
        by_group = isinstance(clip, LayerClip)
        found = clip.factors(torch.stack(squared).sqrt()) if by_group else [clip.factors(squared[0].sqrt())]
        for name in self._blocks:
            factors = found[self._group[name]]
            metric = self._metrics[name]
            ghost = chunk.ghost_norm(name, metric)
            if ghost is not None or name not in chunk.samplers:
                self._factors[name] = self._factors.get(name, 0) + factors.sum()
            if ghost is not None:
                ghost.add_weighted_sum(factors, self._sum_in(self._raw, name), metric)
            elif name in kept:
                self._add_measured(name, kept[name], factors)
            elif name in chunk.samplers:
                for span in spans(chunk.unit_count, self._room(chunk, name)):
                    self._add_measured(name, metric.apply_(chunk.explicit(name, span)), factors[span])

    def _add_measured(self, name: str, z: Tensor, factors: Tensor) -> None:
        rejected = factors == 0
        if bool(rejected.any()):
            z[rejected] = 0
        total = self._sum_in(self._measured, name)
        for span in spans(len(z), MOST_SUMMED):
            add_to(total, factors[span].to(z) @ z[span])

    def _sum_in(self, sums: dict[str, Tensor], name: str) -> Tensor:
        block = self._blocks[name]
        if self._metrics[name].is_identity:
            return self._total[block.span]
        if name not in sums:
            sums[name] = self._total.new_zeros(block.size)
        return sums[name]

    def total(self) -> Tensor:
        """The clipped sum on the support, a float64 k-vector; to be asked once, at the end."""
        for name, block in self._blocks.items():
            if self._metrics[name].is_identity:
                continue
            place = self._total[block.span]
            if name in self._measured:
                place += block.active(self._measured.pop(name))
            if name in self._factors:
                raw = self._metrics[name].apply_to_sum(self._sum_in(self._raw, name), self._factors[name])
                place += block.active(raw)
        return self._total

    def _squared_norms(self, chunk: Chunk) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Squared norms in the metric, one vector for each group of the clip, and the gradients kept for the sum."""
        clip = self._query.clip
        groups = len(clip.norms) if isinstance(clip, LayerClip) else 1
        squared = [self._total.new_zeros(chunk.unit_count) for _ in range(groups)]
        kept: dict[str, Tensor] = {}
        for name, group in self._group.items():
            metric = self._metrics[name]
            if name not in chunk.samplers:
                squared[group] += metric.squared_constant()
            elif (ghost := chunk.ghost_norm(name, metric)) is not None:
                squared[group] += ghost.squared_norms(metric)
            elif chunk.grouped[name][1] is not None or chunk.unit_count <= self._room(chunk, name):
                kept[name] = metric.apply_(chunk.explicit(name, slice(None)))
                squared[group] += squared_norms_of(kept[name])
            else:
                for span in spans(chunk.unit_count, self._room(chunk, name)):
                    squared[group][span] += squared_norms_of(metric.apply_(chunk.explicit(name, span)))
        return squared, kept

    def _room(self, chunk: Chunk, name: str) -> int:
        """Units whose explicit gradients fit into what may be kept."""
        return self._keep // (4 * chunk.samplers[name][0].block_size)
