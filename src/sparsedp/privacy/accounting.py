"""The table of accountants, and the guarantee of a plan epoch by epoch."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import pairwise
from typing import Any, final

import numpy as np
import numpy.typing as npt

from sparsedp import _validate as checks
from sparsedp.errors import PrivacyError
from sparsedp.privacy.plan import (
    FILTER,
    Plan,
    SampledGaussian,
    is_private,
    merge_events,
    normalize_events,
    slice_events,
)


@contextmanager
def silence_dp_accounting() -> Iterator[None]:
    """Drop log records from `dp_accounting`, and nothing else, while inside."""
    logger, silence = logging.getLogger("absl"), lambda record: "dp_accounting" not in record.pathname
    logger.addFilter(silence)
    try:
        yield
    finally:
        logger.removeFilter(silence)


Vector = npt.NDArray[np.floating[Any]]

ROUNDING = 1e-15
"""Taken off delta per step for the rounding of the Fourier transforms, which may be downwards: composing a Gaussian
with known answer, they lost up to 0.4 * 2.2e-16 of delta per step."""

SUPPORT = 10.0
"""Standard deviations of noise the grid reaches out to; the mass beyond counts as an infinite loss."""

Grid = tuple[float, int, int]
"""How finely losses are discretised. The width as a fraction of the standard deviation of one step's loss: epsilon is
too high by about 0.09 fraction^2 of itself, at rates 1e-4..1 and noise 0.4..30. Most points for one step's loss: past
them the grid is widened, looser, still an upper bound. And the points below which it is narrowed, up to fourfold."""
FINE, CURVE, COARSE = (1 / 10, 200_000, 20_000), (1 / 6, 50_000, 0), (1 / 3, 50_000, 0)
"""For reported numbers; for the inner points of curves; for searches, one percent too high and ten times as quick."""


@final
@dataclass(frozen=True, slots=True)
class PldAccountant:
    """Privacy loss distributions on Google's `dp_accounting`, pessimistic, under adding or removing one unit.

    One step is discretised by connecting the dots of its exact hockey-stick divergence (Doroshenko et al. 2022,
    arXiv 2207.04380, Algorithm 1), which dominates it whatever the grid; the library composes and reads off.

    Formal guarantees:
        Valid only for mechanisms and step counts fixed beforehand; else use `RdpFilter`.
    """

    name: str = "pld"

    def epsilon(self, events: Iterable[SampledGaussian], delta: float, *, coarse: bool = False) -> float:
        """Smallest epsilon at `delta`, rounded up; infinite for events that are not private.

        With `coarse` an upper bound within about one percent of it, quicker.
        """
        known, bound = merge_events(normalize_events(events)), checks.delta_in_range(delta)
        if not known or not is_private(known):
            return math.inf if known else 0.0
        slack = _slack(known)
        if slack > bound / 4:
            raise PrivacyError(
                f"delta={bound:g} is too small for the pld accountant over {sum(s.steps for s in known)} steps: its "
                f'rounding error may reach {slack:.1g}; use accountant="rdp", which has none, or a larger delta'
            )
        return _epsilon_at(_compose(known, _width(known, COARSE if coarse else FINE)), bound - slack)

    def epsilon_at_steps(
        self, events: Iterable[SampledGaussian], marks: Sequence[int], delta: float
    ) -> tuple[float, ...]:
        """Epsilon after each of an increasing list of step counts, each point built on the one before.

        The last equals `epsilon`; the others are on a coarser grid, lowered to the next where that is smaller.
        """
        known, bound = normalize_events(events), checks.delta_in_range(delta)
        if not is_private(known):
            return (math.inf,) * len(marks)
        prefixes = [merge_events(known[: count + 1]) for count in range(len(known))]
        width = min((_width(prefix, CURVE) for prefix in prefixes), default=1.0)
        epsilons, total = [], None
        for start, stop in pairwise((0, *marks[:-1])):
            if new := merge_events(slice_events(known, start, stop)):
                chunk = _compose(new, width)
                total = chunk if total is None else total.compose(chunk)
            slack = _slack(slice_events(known, 0, stop))
            epsilons.append(0.0 if total is None else _epsilon_at(total, bound - slack))
        epsilons.append(self.epsilon(slice_events(known, 0, marks[-1]), delta))
        return tuple(float(value) for value in np.minimum.accumulate(epsilons[::-1])[::-1])


def _epsilon_at(distribution: Any, delta: float) -> float:
    return max(0.0, float(distribution.get_epsilon_for_delta(delta)))


def _slack(events: Sequence[SampledGaussian]) -> float:
    return ROUNDING * sum(_releases(event)[0] for event in events)


def _compose(events: Sequence[SampledGaussian], width: float) -> Any:
    return reduce(lambda total, part: total.compose(part), [_composed(event, width) for event in events])


@lru_cache(maxsize=6)
def _composed(event: SampledGaussian, width: float) -> Any:
    """All releases of an event as one distribution of losses on the grid, for removing and for adding a unit."""
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

    rate, (count, noise) = event.sampling_rate, _releases(event)
    first, last = _loss_ends(rate, noise)
    pmfs = []
    for divergence, low, high in ((removal_divergence, first, last), (addition_divergence, -last, -first)):
        start, stop = math.floor(low / width), math.ceil(high / width)
        deltas = divergence(rate, noise, np.arange(start, stop + 1) * width)
        pmfs.append(pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(width, start, stop, deltas))
    with silence_dp_accounting(), np.errstate(all="ignore"):
        one = PrivacyLossDistribution(*pmfs)
        return one.self_compose(count) if count > 1 else one


def removal_divergence(rate: float, noise: float, epsilons: Vector) -> Vector:
    """Hockey-stick divergence of (1-q) N(0, noise^2) + q N(1, noise^2) from N(0, noise^2), at many epsilons.

    The loss grows with x and passes epsilon where q exp((2x - 1) / (2 noise^2)) = e^epsilon - 1 + q.
    """
    from scipy.special import log_ndtr, ndtr

    height = _log_height(rate, epsilons)
    x = 0.5 + noise**2 * (height - math.log(rate))
    beyond = rate * ndtr((1 - x) / noise) - np.exp(height + log_ndtr(-x / noise))
    return np.clip(np.where(np.isfinite(height), beyond, -np.expm1(np.minimum(0.0, epsilons))), 0.0, 1.0)


def addition_divergence(rate: float, noise: float, epsilons: Vector) -> Vector:
    """Hockey-stick divergence of N(0, noise^2) from (1-q) N(0, noise^2) + q N(1, noise^2), at many epsilons.

    The loss falls with x and passes epsilon where q exp((2x - 1) / (2 noise^2)) = e^-epsilon - 1 + q; it never
    exceeds -log(1-q).
    """
    from scipy.special import log_ndtr, ndtr

    height = _log_height(rate, -epsilons)
    x = 0.5 + noise**2 * (height - math.log(rate))
    below = np.exp(epsilons + height) * ndtr(x / noise) - rate * np.exp(epsilons + log_ndtr((x - 1) / noise))
    return np.asarray(np.clip(below, 0.0, 1.0))


def _log_height(rate: float, epsilons: Vector) -> Vector:
    """log(e^epsilon - 1 + q), or -inf; without the logarithm it cancels at rates near 1, and overflows."""
    unsampled = math.log1p(-rate) if rate < 1 else -math.inf
    with np.errstate(divide="ignore"):
        above = np.log(-np.expm1(np.minimum(0.0, unsampled - epsilons)))
    return np.asarray(epsilons + above)


def _releases(event: SampledGaussian) -> tuple[int, float]:
    """How many releases are composed numerically, with which noise: plain Gaussians compose into one exactly."""
    if event.sampling_rate == 1:
        return 1, event.noise_multiplier / math.sqrt(event.steps)
    return event.steps, event.noise_multiplier


def _width(events: Sequence[SampledGaussian], grid: Grid) -> float:
    """The grid's width: a power of two where affordable, so that nearby noise levels share it and their work."""
    variance, count, widest = 0.0, 0, 0.0
    for event in events:
        releases, noise = _releases(event)
        variance += releases * _loss_variance(event.sampling_rate, noise)
        count += releases
        first, last = _loss_ends(event.sampling_rate, noise)
        widest = max(widest, last - first)
    fraction, points, spare = grid
    wanted = fraction * math.sqrt(variance / count)
    if spare:
        wanted = min(wanted, max(wanted / 4, widest / spare))
    return float(max(2.0 ** math.floor(math.log2(wanted)), widest / points))


def _loss_ends(rate: float, noise: float) -> tuple[float, float]:
    reach = SUPPORT + 1 / noise
    first, last = _loss(rate, noise, np.asarray([-reach, reach]))
    return float(first), float(last)


def _loss_variance(rate: float, noise: float) -> float:
    z = np.linspace(-9.0, 9.0, 2001)
    weights = np.exp(-z * z / 2)
    weights /= weights.sum()
    loss = _loss(rate, noise, z)
    mean = float(weights @ loss)
    return max(float(weights @ (loss - mean) ** 2), 1e-30)


def _loss(rate: float, noise: float, z: Vector) -> Vector:
    """log((1-q) + q exp((2x - 1) / (2 noise^2))) at x = noise z: the privacy loss of one step."""
    shifted = math.log(rate) + z / noise - 1 / (2 * noise * noise)
    return np.logaddexp(math.log1p(-rate), shifted) if rate < 1 else shifted


ORDERS = (*(1 + x / 10 for x in range(1, 100)), *map(float, range(11, 64)), 128.0, 256.0, 512.0, 1024.0)
"""Renyi orders the infimum is taken over: those of `dp_accounting`."""
QUADRATURE = 1e-14
"""Added to the logarithm of an integral: above the rounding error of its sum."""
LEAST_INTEGRATED = 0.05
"""Below this noise multiplier, which protects nobody, the integral would take too many points."""


def tight_epsilon(a: Vector, r: Vector, delta: float) -> Vector:
    """Epsilon from Renyi divergences `r` of orders `a`: Canonne, Kamath and Steinke 2020, Proposition 12."""
    return np.asarray(r + np.log1p(-1 / a) - np.log(delta * a) / (a - 1))


def classic_epsilon(a: Vector, r: Vector, delta: float) -> Vector:
    """The same by TP-TopK, Theorem 4.1; Mironov 2017, Proposition 3."""
    return np.asarray(r + math.log(1 / delta) / (a - 1))


def renyi(events: Iterable[SampledGaussian], orders: Sequence[float] = ORDERS) -> Vector:
    """Renyi divergence of each order: the sum over all steps (adaptive composition, Mironov 2017, Prop. 1)."""
    total = np.zeros(len(orders))
    for rate, noise, steps in merge_events(events):
        total += steps * (np.asarray(_per_step(rate, noise, tuple(orders))) + ROUNDING)
    return total


@lru_cache(maxsize=256)
def _per_step(rate: float, noise: float, orders: tuple[float, ...]) -> tuple[float, ...]:
    if noise == 0:
        return (math.inf,) * len(orders)
    import dp_accounting as dp

    known = [order for order in orders if order == int(order) or rate == 1 or noise < LEAST_INTEGRATED]
    accountant = dp.rdp.RdpAccountant(known or [2.0], dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    with silence_dp_accounting(), np.errstate(all="ignore"):
        accountant.compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise)))
    values = (float(value) if value >= 0 else 0.0 for value in accountant.rdp)
    found = dict(zip(known, values, strict=False))
    return tuple(found[a] if a in found else _fractional(rate, noise, a) for a in orders)


def _fractional(rate: float, noise: float, order: float) -> float:
    """`log(E[(1 - q + q exp((2x - 1) / 2s^2))^a]) / (a - 1)` for x normal with deviation s (Mironov et al. 2019).

    By the trapezoid rule, which for such integrands is exact to the last digits: the step is well below the width of
    the Gaussian and the distance of the nearest singularity, `pi s^2`. The library's series is too large.
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
    """The infimum over orders of a conversion of the composed Renyi divergence; `spent` of each order before."""

    name: str
    conversion: Callable[[Vector, Vector, float], Vector]
    orders: tuple[float, ...] = ORDERS
    spent: tuple[float, ...] = (0.0,) * len(ORDERS)

    def epsilon(self, events: Iterable[SampledGaussian], delta: float, *, coarse: bool = False) -> float:
        """Smallest epsilon it can show at `delta`; infinite for events that are not private."""
        bound = checks.delta_in_range(delta)
        total = np.asarray(self.spent) + renyi(normalize_events(events), self.orders)
        if not total.any():
            return 0.0
        return max(0.0, float(self.conversion(np.asarray(self.orders), total, bound).min()))

    def epsilon_at_steps(
        self, events: Iterable[SampledGaussian], marks: Sequence[int], delta: float
    ) -> tuple[float, ...]:
        """Epsilon after each of an increasing list of step counts."""
        known = normalize_events(events)
        return tuple(self.epsilon(slice_events(known, 0, stop), delta) for stop in marks)


Accountant = PldAccountant | RdpAccountant
"""Bounds epsilon of what was spent at a delta, under adding or removing one unit."""

ACCOUNTANTS: Mapping[str, Accountant] = {
    "pld": PldAccountant(),
    "rdp": RdpAccountant("rdp", tight_epsilon),
    "rdp-classic": RdpAccountant("rdp-classic", classic_epsilon),
}
"""`pld` is the tightest; `rdp` and `rdp-classic` are what papers report."""


def accountant(name: str) -> Accountant:
    """The accountant of that name."""
    if name not in ACCOUNTANTS:
        raise PrivacyError(f"accountant: got {name!r}, expected one of {sorted(ACCOUNTANTS)}")
    return ACCOUNTANTS[name]


def plan_accountant(plan: Plan) -> Accountant:
    """The accountant a plan was calibrated with; `pld` if with none.

    A plan that continues earlier runs has one of its own: it counts what they spent, at the filter's fixed order.
    """
    if before := plan.continuation:
        return RdpAccountant(FILTER, tight_epsilon, (before.order,), (before.spent,))
    return accountant(plan.accountant or "pld")


def epsilon_by_epoch(plan: Plan, name: str | None = None, delta: float | None = None) -> tuple[float, ...]:
    """Epsilon of a plan at the end of each epoch, by its own accountant and at its own delta unless told otherwise.

    Formal guarantees:
        These are prefixes of the plan. A run stopped early guarantees the *planned* epsilon, unless the stop did not
        depend on anything that was released.
    """
    counted, bound = _terms(plan, name, delta)
    return counted.epsilon_at_steps(plan.events(), plan.epoch_ends(), bound)


def plan_epsilon(plan: Plan, name: str | None = None, delta: float | None = None) -> float:
    """Epsilon of the whole plan, by its own accountant and at its own delta unless told otherwise."""
    counted, bound = _terms(plan, name, delta)
    return counted.epsilon(plan.events(), bound)


def _terms(plan: Plan, name: str | None, delta: float | None) -> tuple[Accountant, float]:
    chosen = checks.delta_in_range(plan.delta if delta is None else delta)
    return plan_accountant(plan) if name in (None, plan.accountant) else accountant(str(name)), chosen
