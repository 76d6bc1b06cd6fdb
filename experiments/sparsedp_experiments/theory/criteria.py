"""When a support pays in one step (TP-TopK, Prop. 5.1), and how much of a gradient's energy it holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from sparsedp._validate import exact_ratio, share_of
from sparsedp.diagnostics import Baseline, SplitEnergies
from sparsedp.parameters import Support


@final
@dataclass(frozen=True, slots=True)
class OneStep:
    """The two sides of Prop. 5.1 for one support."""

    signal_loss: float  # `||P_notA G||^2`, the gradient energy a step leaves out
    noise_saved: float  # `(d - k) nu^2`, the noise energy it does not add
    noise_kept: float  # `k nu^2`

    @property
    def error(self) -> float:
        """`E(A)`, the one-step squared error."""
        return self.signal_loss + self.noise_kept

    @property
    def full_error(self) -> float:
        """`E_full = d nu^2`, that of all coordinates."""
        return self.noise_saved + self.noise_kept


def one_step(gradient: Tensor, support: Support, noise_std: float) -> OneStep:
    """The criterion for a mean clipped gradient G and the main phase's noise nu per coordinate.

    **Privacy.** It is as private as the gradient.
    """
    energies = gradient.to("cpu", torch.float64) ** 2
    lost = float(energies[~support.mask()].sum())
    k, d = support.size, support.dimension
    return OneStep(lost, (d - k) * noise_std**2, k * noise_std**2)


def random_signal_loss(gradient: Tensor, size: int) -> float:
    """`(1 - k/d) ||G||^2`: what a uniformly random support of k coordinates leaves out on average."""
    return float((gradient.double() ** 2).sum()) * (1 - size / gradient.numel())


def split_of(order: Tensor, gradients: Tensor, noise_std: float) -> SplitEnergies:
    """Split energies from a stack of released dense gradients `[steps, d]`: even steps against odd ones."""
    even, odd = gradients[0::2].double(), gradients[1::2].double()
    v = noise_std**2
    return SplitEnergies(
        order.to(torch.int64), even.mean(0), odd.mean(0), v / even.shape[0], v / odd.shape[0]
    )


def energy_captured(energies: Tensor, support: Support) -> float:
    """`sum_{p in A} G_p^2 / sum_p G_p^2` (TP-TopK, Sec. 7.4); 0 when there is no energy."""
    values = energies.double()
    total = float(values.sum())
    return min(1.0, float(support.gather(values).sum()) / total) if total else 0.0


def random_capture(energies: Tensor, size: int) -> Baseline:
    """The energy a uniformly random support of k coordinates captures: k/d, with its deviation.

    A sum over a sample without replacement has variance `k (d-k)/(d-1)` times the population variance.
    """
    values = energies.double()
    d, total = values.numel(), float(values.sum())
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
