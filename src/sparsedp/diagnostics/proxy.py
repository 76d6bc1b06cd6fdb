"""DP-visible proxy concentration (TP-TopK, Sec. 7.4): what it is under pure noise, and the split version.

`rho_sig` ranks and measures with the same scores, so noise passes for signal: with no signal at all it is 0.7 to 0.8
at k/d = 0.2 for the energy score of ten steps or more, and 0.93 for the coherent score. Compare it with that null,
not with k/d; the split version may be compared with k/d.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from scipy import special, stats
from torch import Tensor

from sparsedp.diagnostics.criteria import NoisyEstimate, SplitEnergies
from sparsedp.errors import SparseDPError
from sparsedp.parameters import Support


def proxy_concentration(scores: Tensor, support: Support) -> float:
    """`rho_sig(A)`: the support's share of `max(a_p, 0)`; 0 when no score is positive."""
    positive = scores.double().clamp(min=0)
    total = float(positive.sum())
    return float(support.gather(positive).sum()) / total if total else 0.0


@final
@dataclass(frozen=True, slots=True)
class PureNoise:
    """What `rho_sig` of the best k of d coordinates is when there is no gradient at all."""

    mean: float
    std: float

    def surprise(self, seen: float) -> float:
        """How many standard deviations above pure noise a value is."""
        return (seen - self.mean) / self.std if self.std else math.inf * (seen > self.mean)


def pure_noise(size: int, dimension: int, squares: int) -> PureNoise:
    """The null of `rho_sig`, for scores that average `squares` independent squares less their expectation.

    `squares` is the number of warm-up steps T for the energy score and 1 for the coherent score. With `X = chi2_n/n`,
    the null is `E[X - 1; X > u]/E[X - 1; X > 1]`, where u is X's upper k/d quantile; the standard
    deviation is that of the ratio of the two sums to first order in 1/d.

    **Edge cases.** When more than the positive scores are kept, it is 1 without deviation.
    """
    if not 0 < size <= dimension or squares < 1:
        raise SparseDPError(
            f"pure_noise: got k={size} of d={dimension} with {squares} squares, expected 0 < k <= d and squares >= 1"
        )
    cut = float(stats.chi2.isf(size / dimension, squares)) / squares if size < dimension else 0.0
    if cut <= 1:
        return PureNoise(1.0, 0.0)
    top, whole = _partial(cut, squares), _partial(1.0, squares)
    numerator, denominator = top[1] - top[0], whole[1] - whole[0]
    ratio = numerator / denominator
    # Influence of one coordinate on the ratio: (X - u)+ - ratio (X - 1)+, over the denominator.
    excess = top[1] - cut * top[0]
    square = (top[2] - 2 * cut * top[1] + cut**2 * top[0]) + ratio**2 * (whole[2] - 2 * whole[1] + whole[0])
    cross = top[2] - (1 + cut) * top[1] + cut * top[0]
    variance = square - 2 * ratio * cross - (excess - ratio * denominator) ** 2
    return PureNoise(ratio, math.sqrt(max(variance, 0.0) / dimension) / denominator)


def _partial(cut: float, freedom: int) -> tuple[float, float, float]:
    """`E[X^j; X > cut]` for j = 0, 1, 2 and `X = chi2_n/n`."""
    tails = [float(special.chdtrc(freedom + 2 * j, cut * freedom)) for j in range(3)]
    return tails[0], tails[1], tails[2] * (1 + 2 / freedom)


@final
@dataclass(frozen=True, slots=True)
class SplitConcentration:
    """The split version of `rho_sig`: ranked by some steps, measured by others.

    Attributes:
        share: the support's share of the estimated energy, its deviation to first order; None when the total is not
            clearly positive, for then there is nothing to take a share of.
        total: the estimated energy of all coordinates.
        active_ratio: k/d, the share of a random support.
    """

    share: NoisyEstimate | None
    total: NoisyEstimate
    active_ratio: float


def split_concentration(split: SplitEnergies, size: int, clearly: float = 3.0) -> SplitConcentration:
    """The share of energy the best `size` coordinates hold, if the total is `clearly` many deviations above zero.

    Unbiased in numerator and denominator, so a random ranking gives k/d whatever the noise.
    """
    inside = split.energy(split.support(size))
    outside = split.energy(Support(split.order[size:], split.dimension))
    total = NoisyEstimate(inside.value + outside.value, math.hypot(inside.std, outside.std))
    ratio = size / split.dimension
    if total.value <= clearly * total.std:
        return SplitConcentration(None, total, ratio)
    share = inside.value / total.value
    std = math.hypot((1 - share) * inside.std, share * outside.std) / total.value
    return SplitConcentration(NoisyEstimate(share, std), total, ratio)


def split_of(order: Tensor, gradients: Tensor, noise_std: float) -> SplitEnergies:
    """Split energies from a stack of released dense gradients `[steps, d]`: even steps against odd ones."""
    if gradients.shape[0] < 2:
        raise SparseDPError(f"split_of: got {gradients.shape[0]} gradients, expected at least 2")
    even, odd = gradients[0::2].double(), gradients[1::2].double()
    v = noise_std**2
    return SplitEnergies(
        order.to(torch.int64), even.mean(0), odd.mean(0), v / even.shape[0], v / odd.shape[0]
    )
