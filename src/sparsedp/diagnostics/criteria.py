"""Does a support pay? From a gradient, or from the warm-up alone, by two criteria.

TP-TopK's one-step criterion (Prop. 5.1) compares squared errors. Whenever the noise energy `d nu^2` exceeds the
gradient's it favours moving hardly anything, since not moving at all has error `||G||^2` only. The other one, ours,
compares progress: a step of size eta on a support lowers a beta-smooth loss by at least
`eta c - beta eta^2/2 (c + k nu^2)` with `c = ||P G||^2`, which at the best eta is `c^2/(2 beta (c + k nu^2))`.
Relative to all coordinates beta cancels; random supports then make k/d of the progress, and a learned one that
captures the share alpha pays under heavy noise when `alpha^2 > k/d`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from sparsedp.errors import SparseDPError
from sparsedp.parameters import Support


@final
@dataclass(frozen=True, slots=True)
class OneStep:
    """The two sides of Prop. 5.1 for one support.

    Attributes:
        signal_loss: `||P_notA G||^2`, the gradient energy a step leaves out.
        noise_saved: `(d - k) nu^2`, the noise energy it does not add.
        noise_kept: `k nu^2`.
    """

    signal_loss: float
    noise_saved: float
    noise_kept: float

    @property
    def error(self) -> float:
        """`E(A)`, the one-step squared error."""
        return self.signal_loss + self.noise_kept

    @property
    def full_error(self) -> float:
        """`E_full = d nu^2`, that of all coordinates."""
        return self.noise_saved + self.noise_kept

    @property
    def helps(self) -> bool:
        """Whether the support's error is the smaller one."""
        return self.signal_loss < self.noise_saved


def one_step(gradient: Tensor, support: Support, noise_std: float) -> OneStep:
    """The criterion for a mean clipped gradient G and the main phase's noise nu per coordinate.

    **Privacy.** It is as private as the gradient: with an un-noised one, keep the result `NonPrivate`.
    """
    energies = gradient.to("cpu", torch.float64) ** 2
    lost = float(energies[~support.mask()].sum())
    k, d = support.size, support.dimension
    return OneStep(lost, (d - k) * noise_std**2, k * noise_std**2)


def step_progress(captured: float, size: int, noise_std: float) -> float:
    """`c^2/(c + k nu^2)` for captured energy c: twice beta times the guaranteed descent of the best step size."""
    return captured**2 / (captured + size * noise_std**2) if captured > 0 else 0.0


def random_signal_loss(gradient: Tensor, size: int) -> float:
    """`(1 - k/d) ||G||^2`: what a uniformly random support of k coordinates leaves out on average."""
    return float((gradient.double() ** 2).sum()) * (1 - size / gradient.numel())


@final
@dataclass(frozen=True, slots=True)
class NoisyEstimate:
    """An unbiased estimate and the standard deviation of the noise in it."""

    value: float
    std: float


@final
@dataclass(frozen=True, slots=True, eq=False)
class SplitEnergies:
    """Coordinate energies estimated from released gradients by sample splitting. Post-processing, so free.

    `G_p^2` is estimated by the product of the means of two disjoint sets of steps, and the ranking by a third, so no
    noise is counted as signal: the estimates are unbiased under any ranking, and may be negative.

    Attributes:
        order: coordinates, best first, by the steps that rank.
        first: mean released gradient of one set of steps, a d-vector.
        second: that of the other.
        first_variance: variance of the noise on each coordinate of `first`.
        second_variance: that of `second`.
    """

    order: Tensor = field(repr=False)
    first: Tensor = field(repr=False)
    second: Tensor = field(repr=False)
    first_variance: float
    second_variance: float

    def __post_init__(self) -> None:
        if not (self.order.shape == self.first.shape == self.second.shape) or self.first.dim() != 1:
            raise SparseDPError("SplitEnergies: expected an order and two means of one length")

    @property
    def dimension(self) -> int:
        """The number d of coordinates."""
        return self.first.numel()

    @property
    def energies(self) -> Tensor:
        """The unbiased estimates of `G_p^2`."""
        return self.first * self.second

    def support(self, size: int) -> Support:
        """The first `size` coordinates of the ranking."""
        return Support(self.order[:size], self.dimension)

    def energy(self, support: Support) -> NoisyEstimate:
        """The energy on a support.

        Its variance is the sum of `G^2 (v1 + v2) + v1 v2`, estimated without bias by `m1^2 v2 + m2^2 v1 - v1 v2` and
        never taken below what noise alone gives. Only the noise that was added is in it: sampling of batches makes
        the true one a little larger.
        """
        m1, m2 = support.gather(self.first), support.gather(self.second)
        v1, v2 = self.first_variance, self.second_variance
        floor = support.size * v1 * v2
        spread = float((m1**2).sum()) * v2 + float((m2**2).sum()) * v1 - floor
        return NoisyEstimate(float((m1 * m2).sum()), math.sqrt(max(spread, floor)))

    def progress(self, size: int, noise_std: float, clearly: float = 3.0) -> NoisyEstimate | None:
        """Progress of a step on the best k coordinates over that of a dense step, each at its best step size.

        The deviation is to first order. None when the total energy is not `clearly` many deviations above zero.
        """
        inside = self.energy(self.support(size))
        outside = self.energy(Support(self.order[size:], self.dimension))
        total = inside.value + outside.value
        if total <= clearly * math.hypot(inside.std, outside.std):
            return None
        captured = max(inside.value, 0.0)
        dense = step_progress(total, self.dimension, noise_std)
        ratio = step_progress(captured, size, noise_std) / dense
        slope_inside = _slope(captured, size * noise_std**2) / dense
        slope_total = ratio * _slope(total, self.dimension * noise_std**2) / dense
        return NoisyEstimate(
            ratio, math.hypot((slope_inside - slope_total) * inside.std, slope_total * outside.std)
        )

    def gain(self, size: int, noise_std: float) -> NoisyEstimate:
        """`E_full - E(A) = (d - k) nu^2 - ||P_notA G||^2` for the best k coordinates: positive when they suffice."""
        left_out = Support(self.order[size:], self.dimension)
        lost = self.energy(left_out)
        return NoisyEstimate(left_out.size * noise_std**2 - lost.value, lost.std)


def _slope(captured: float, noise: float) -> float:
    """The derivative of `c^2/(c + n)`."""
    return (captured**2 + 2 * captured * noise) / (captured + noise) ** 2 if captured > 0 else 0.0
