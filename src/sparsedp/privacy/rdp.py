"""Renyi differential privacy: linear in the steps, converted to epsilon and delta at the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import final

import numpy as np
import numpy.typing as npt

from sparsedp.privacy import checks
from sparsedp.privacy.events import Spend, between, counted, merged
from sparsedp.privacy.quiet import quiet

Vector = npt.NDArray[np.float64]

ORDERS = (*(1 + x / 10 for x in range(1, 100)), *map(float, range(11, 64)), 128.0, 256.0, 512.0, 1024.0)
"""Renyi orders the infimum is taken over: those of `dp_accounting`."""

ROUNDING = 1e-15
"""Added per step: above the rounding error of the library's divergences, below anything that shows."""


QUADRATURE = 1e-14
"""Added to the logarithm of an integral: above the rounding error of its sum."""

LEAST_INTEGRATED = 0.05
"""Below this noise multiplier, which protects nobody, the integral would take too many points."""


@final
@dataclass(frozen=True, slots=True)
class Conversion:
    """From Renyi divergences to epsilon at delta and back; both take (orders, divergences, the other number)."""

    epsilon: Callable[[Vector, Vector, float], Vector]
    log_delta: Callable[[Vector, Vector, float], Vector]


TIGHT = Conversion(
    epsilon=lambda a, r, delta: r + np.log1p(-1 / a) - np.log(delta * a) / (a - 1),
    log_delta=lambda a, r, epsilon: (a - 1) * (r - epsilon + np.log1p(-1 / a)) - np.log(a),
)
"""Canonne, Kamath and Steinke 2020 (arXiv 2004.00010 v4), Proposition 12."""

CLASSIC = Conversion(
    epsilon=lambda a, r, delta: r + math.log(1 / delta) / (a - 1),
    log_delta=lambda a, r, epsilon: (a - 1) * (r - epsilon),
)
"""TP-TopK, Theorem 4.1; Mironov 2017, Proposition 3."""


def renyi(spends: Iterable[Spend], orders: Sequence[float] = ORDERS) -> Vector:
    """Renyi divergence of each order: the sum over all steps (adaptive composition, Mironov 2017, Prop. 1)."""
    total = np.zeros(len(orders))
    for rate, noise, steps in merged(spends):
        total += steps * (np.asarray(_per_step(rate, noise, tuple(orders))) + ROUNDING)
    return total


@lru_cache(maxsize=256)
def _per_step(rate: float, noise: float, orders: tuple[float, ...]) -> tuple[float, ...]:
    if noise == 0:
        return (math.inf,) * len(orders)
    import dp_accounting as dp

    known = [order for order in orders if order == int(order) or rate == 1 or noise < LEAST_INTEGRATED]
    accountant = dp.rdp.RdpAccountant(known or [2.0], dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    with quiet(), np.errstate(all="ignore"):
        accountant.compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise)))
    values = (float(value) if value >= 0 else 0.0 for value in accountant.rdp)
    found = dict(zip(known, values, strict=False))
    return tuple(found[a] if a in found else _fractional(rate, noise, a) for a in orders)


def _fractional(rate: float, noise: float, order: float) -> float:
    """`log(E[(1 - q + q exp((2x - 1) / 2s^2))^a]) / (a - 1)` for x normal with deviation s (Mironov et al. 2019).

    By the trapezoid rule, which for such integrands is exact to the last digits: the step is well below the width of
    the Gaussian and the distance of the nearest singularity, `pi s^2`. The library sums the absolute values of an
    alternating series instead: too large, for sampling rates from 0.1 on by a lot, and infinite for small orders.
    """
    width = min(noise / 4, noise**2 / 2)
    x = np.arange(-12 * noise, order + 12 * noise + width, width)
    density = -((x / noise) ** 2) / 2 + math.log(width / (noise * math.sqrt(2 * math.pi)))
    ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * x - 1) / (2 * noise**2))
    terms = density + order * ratio
    largest = float(terms.max())
    total = largest + math.log(math.fsum(np.exp(terms - largest)))
    return max(0.0, total + QUADRATURE * (1 + abs(total))) / (order - 1)


@final
@dataclass(frozen=True, slots=True)
class RdpAccountant:
    """The infimum over the orders of a conversion of the composed Renyi divergence.

    Attributes:
        name: how it is called in tables and plans.
        conversion: to epsilon and delta.
        orders: the orders it may choose from.
        spent: divergence of each order spent before; none by default.
    """

    name: str
    conversion: Conversion
    orders: tuple[float, ...] = ORDERS
    spent: tuple[float, ...] = (0.0,) * len(ORDERS)

    def epsilon(self, spends: Iterable[Spend], delta: float) -> float:
        """Smallest epsilon it can show at `delta`; infinite for spends that are not private."""
        return self._epsilon(self._total(counted(spends)), checks.delta_in_range(delta))

    def rough_epsilon(self, spends: Iterable[Spend], delta: float) -> float:
        """The same as `epsilon`: it is quick already."""
        return self.epsilon(spends, delta)

    def delta(self, spends: Iterable[Spend], epsilon: float) -> float:
        """Smallest delta it can show at `epsilon`; 1 for spends that are not private."""
        total, bound = self._total(counted(spends)), checks.number(epsilon, "epsilon", at_least=0.0)
        if not total.any():
            return 0.0
        logs = self.conversion.log_delta(np.asarray(self.orders), total, bound)
        return math.exp(min(0.0, float(logs.min())))

    def curve(self, spends: Iterable[Spend], marks: Sequence[int], delta: float) -> tuple[float, ...]:
        """Epsilon after each of an increasing list of step counts."""
        known, bound = counted(spends), checks.delta_in_range(delta)
        return tuple(self._epsilon(self._total(between(known, 0, stop)), bound) for stop in marks)

    def _total(self, spends: Iterable[Spend]) -> Vector:
        return np.asarray(self.spent) + renyi(spends, self.orders)

    def _epsilon(self, total: Vector, delta: float) -> float:
        if not total.any():
            return 0.0
        return max(0.0, float(self.conversion.epsilon(np.asarray(self.orders), total, delta).min()))
