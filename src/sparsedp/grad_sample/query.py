"""What is asked of an engine: the clipped sum of per-unit gradients on a support."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from sparsedp._validate import exact_ratio, share_of
from sparsedp.batch import MicroBatch
from sparsedp.clipping import Clip, Geometry, Identity, LayerClip, Standardized
from sparsedp.errors import SparseDPError
from sparsedp.parameters import ParameterLayout, Support


@dataclass(frozen=True, slots=True)
class ClippedSumQuery:
    """One clipped-sum query: restrict to the support, standardize, keep the top r per unit, clip, sum.

    `per_sample_top` is the fraction r of the k active coordinates each unit keeps (AdaDPIGU's option), by largest
    standardized magnitude, ties to the lower index; None keeps all.
    """

    support: Support
    clip: Clip
    geometry: Geometry = field(default_factory=Identity)
    per_sample_top: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.geometry, Standardized) and self.geometry.scale.numel() != self.support.size:
            raise SparseDPError(
                f"the geometry has {self.geometry.scale.numel()} coordinates, the support {self.support.size}; "
                "they must be aligned"
            )
        if self.per_sample_top is not None:
            exact_ratio(self.per_sample_top, "per_sample_top")

    @property
    def kept_per_unit(self) -> int:
        if self.per_sample_top is None or self.support.size == 0:
            return self.support.size
        return max(1, share_of(exact_ratio(self.per_sample_top, "per_sample_top"), self.support.size))


class ClippedSumEngine(Protocol):
    """Computes the clipped sum; the only code that touches un-noised gradients.

    Formal guarantees: The result is private: one unit moves it by at most the clip's sensitivity. Only the mechanism
    may ask for it.
    """

    @property
    def layout(self) -> ParameterLayout: ...

    def clipped_sum(self, batches: Iterable[MicroBatch], query: ClippedSumQuery) -> Tensor:
        """The sum over all units of their clipped gradients, a float64 vector of length k, in clipping space."""
        ...


def group_of_coordinates(clip: Clip, counts: Mapping[str, int], device: torch.device) -> Tensor | None:
    """The clip's group of each active coordinate, from how many each parameter has; None if there is one for all."""
    if not isinstance(clip, LayerClip):
        return None
    groups = torch.tensor([clip.group(name) for name in counts], dtype=torch.int64)
    return groups.repeat_interleave(torch.tensor([*counts.values()], dtype=torch.int64)).to(device)


def sum_clipped_rows(gradients: Tensor, query: ClippedSumQuery, groups: Tensor | None = None) -> Tensor:
    """Finish a query from explicit per-unit gradients on the support, one row each: the specification in few lines.

    Edge cases: A row, or a group's part of one, that is not finite after standardizing contributes exactly zero.
    """
    z = query.geometry.forward(gradients.to(torch.float64))
    if isinstance(query.clip, LayerClip) and groups is not None:
        return _sum_by_group(keep_largest(z, query.kept_per_unit), query.clip, groups)
    z = keep_largest(z, query.kept_per_unit)
    factors = query.clip.factors(torch.linalg.vector_norm(z, dim=1))
    z = torch.where((factors > 0).unsqueeze(1), z, torch.zeros_like(z))
    return factors @ z


def _sum_by_group(z: Tensor, clip: LayerClip, groups: Tensor) -> Tensor:
    squares = z.new_zeros(len(clip.norms), len(z)).index_add_(0, groups, z.square().T)
    factors = clip.factors(squares.sqrt())[groups].T
    return torch.where(factors > 0, factors * z, torch.zeros_like(z)).sum(0)


def keep_largest(rows: Tensor, count: int) -> Tensor:
    """Zero all but the `count` largest magnitudes of each row; ties go to the lower index."""
    if count >= rows.shape[1]:
        return rows
    magnitude = rows.abs()
    threshold = magnitude.topk(count, dim=1).values[:, -1:]
    above = magnitude > threshold
    tied = magnitude == threshold
    room = count - above.sum(dim=1, keepdim=True)
    keep = above | (tied & (tied.cumsum(dim=1) <= room))
    return torch.where(keep | magnitude.isnan(), rows, torch.zeros_like(rows))


def mean_per_unit(rows: Tensor, units: Tensor | None) -> Tensor:
    """Average the rows of each unit; without units, the rows themselves."""
    if units is None or rows.shape[0] == 0:
        return rows
    count = int(units[-1]) + 1
    totals = rows.new_zeros(count, *rows.shape[1:]).index_add_(0, units, rows)
    sizes = torch.bincount(units, minlength=count).to(rows.dtype)
    return totals / sizes.reshape(-1, *[1] * (rows.dim() - 1))
