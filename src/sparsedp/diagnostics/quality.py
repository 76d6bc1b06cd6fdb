"""How good a support is: energy captured, against random and oracle supports; overlap, churn, support per layer.

The functions here are pure. Energies are squared gradients `G_p^2`; from un-noised ones, keep results `NonPrivate`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from scipy import special
from torch import Tensor

from sparsedp._validate import exact_ratio, share_of
from sparsedp.errors import SparseDPError
from sparsedp.parameters import Layout, Support


def energy_captured(energies: Tensor, support: Support) -> float:
    """`sum_{p in A} G_p^2 / sum_p G_p^2` (TP-TopK, Sec. 7.4); 0 when there is no energy."""
    values = energies.double()
    total = float(values.sum())
    return min(1.0, float(support.gather(values).sum()) / total) if total else 0.0


@final
@dataclass(frozen=True, slots=True)
class Baseline:
    """A quantity for a uniformly random support: its exact mean and standard deviation."""

    mean: float
    std: float

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """The central normal interval, cut to [0, 1]."""
        reach = float(special.ndtri(0.5 + level / 2)) * self.std
        return max(0.0, self.mean - reach), min(1.0, self.mean + reach)


def random_capture(energies: Tensor, size: int) -> Baseline:
    """The energy a uniformly random support of k coordinates captures: k/d, with its deviation.

    A sum over a sample without replacement has variance `k (d-k)/(d-1)` times the population variance.
    """
    values = energies.double()
    d, total = values.numel(), float(values.sum())
    _check_size(size, d)
    if total == 0 or d == 1:
        return Baseline(size / d if total else 0.0, 0.0)
    variance = size * (d - size) / (d - 1) * float(values.var(correction=0))
    return Baseline(size / d, math.sqrt(variance) / total)


def concentration_curve(energies: Tensor, shares: Sequence[float]) -> tuple[float, ...]:
    """The share of energy in the top x of coordinates, for each share x (TP-TopK, Fig. 1a)."""
    ordered = torch.sort(energies.double(), descending=True).values.cumsum(0)
    total = float(ordered[-1])
    counts = [share_of(exact_ratio(share, "share"), energies.numel()) for share in shares]
    return tuple(float(ordered[k - 1]) / total if k and total else 0.0 for k in counts)


@final
@dataclass(frozen=True, slots=True)
class Recovery:
    """Energy captured at one ratio by a ranking, by chance and at best (TP-TopK, Fig. 1b)."""

    size: int
    learned: float
    random: Baseline
    oracle: float

    @property
    def above_chance(self) -> float:
        """Where the ranking lies between chance (0) and the oracle (1)."""
        room = self.oracle - self.random.mean
        return (self.learned - self.random.mean) / room if room > 0 else 0.0


def recovery_curve(energies: Tensor, order: Tensor, ratios: Sequence[float]) -> tuple[Recovery, ...]:
    """Captured energy over active ratios for a ranking, given as coordinates best first."""
    d = energies.numel()
    best = torch.sort(energies.double(), descending=True, stable=True).indices
    sizes = [max(1, share_of(exact_ratio(ratio), d)) for ratio in ratios]
    return tuple(
        Recovery(
            k,
            energy_captured(energies, Support(order[:k], d)),
            random_capture(energies, k),
            energy_captured(energies, Support(best[:k], d)),
        )
        for k in sizes
    )


@final
@dataclass(frozen=True, slots=True)
class Overlap:
    """How much two supports share.

    Attributes:
        shared: number of common coordinates.
        share: that, over the size of the smaller support.
        jaccard: that, over the size of the union.
        random: `share` for two independent random supports of these sizes.
        churn: share of the first support's coordinates that the second one dropped.
    """

    shared: int
    share: float
    jaccard: float
    random: Baseline
    churn: float


def overlap(first: Support, second: Support) -> Overlap:
    """Compare two supports with each other and with chance (a hypergeometric count)."""
    shared, d = first.overlap(second), first.dimension
    a, b = first.size, second.size
    small = min(a, b)
    if small == 0:
        raise SparseDPError("overlap: a support is empty; compare supports with coordinates in them")
    mean = a * b / d
    variance = mean * (1 - a / d) * (d - b) / (d - 1) if d > 1 else 0.0
    return Overlap(
        shared,
        shared / small,
        shared / (a + b - shared),
        Baseline(mean / small, math.sqrt(variance) / small),
        1 - shared / a,
    )


@final
@dataclass(frozen=True, slots=True)
class LayerShare:
    """One parameter's part of a support."""

    name: str
    size: int
    active: int

    @property
    def active_ratio(self) -> float:
        """The share of the parameter that is active."""
        return self.active / self.size if self.size else 0.0


def support_per_layer(support: Support, layout: Layout) -> tuple[LayerShare, ...]:
    """How many coordinates of each parameter are active."""
    masks = support.per_parameter(layout)
    return tuple(LayerShare(slot.name, slot.size, int(masks[slot.name].sum())) for slot in layout)


def trajectory_capture(captured: Sequence[float], total: Sequence[float]) -> float:
    """`alpha_T` (TP-TopK, Def. 6.5): the sum of `||P_t G_t||^2` over that of `||G_t||^2`; 1 when that is zero."""
    if len(captured) != len(total) or not total:
        raise SparseDPError(
            f"alpha_T: got {len(captured)} and {len(total)} energies, expected as many, not none"
        )
    whole = math.fsum(total)
    return min(1.0, math.fsum(captured) / whole) if whole else 1.0


def _check_size(size: int, dimension: int) -> None:
    if not 0 <= size <= dimension:
        raise SparseDPError(f"size: got k={size}, expected 0..d={dimension}")
