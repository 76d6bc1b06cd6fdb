"""Calibration: the noise that spends a given epsilon and no more."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, final

import numpy as np

from sparsedp import _validate as checks
from sparsedp.errors import OutOfReachError, PrivacyError, PrivacyWarning
from sparsedp.privacy.accounting import ORDERS, renyi, tight_epsilon
from sparsedp.privacy.accounting import accountant as accountant_named
from sparsedp.privacy.plan import FILTER, Plan, PriorSpending, SampledGaussian, normalize_events

LEAST_NOISE, MOST_NOISE = 0.1, 10_000.0
"""Noise multipliers outside protect nobody, or leave nothing to learn."""

TOLERANCE, MARGIN = 0.0025, 1e-4
"""Accepted: a cost between these fractions below the target. The second is kept free, so that another machine's last
digits do not push a recomputed epsilon over it."""


class Found(NamedTuple):
    """The noise, and d log(cost) / d log(noise) there, from which a finer search can start."""

    noise: float
    slope: float


def least_noise(cost: Callable[[float], float], target: float, start: Found, what: str) -> Found:
    """The noise whose cost is just within the target: safeguarded secant steps on the log-log curve.

    `cost` decreases in the noise. The answer never costs more than the target, also where `cost` jumps.
    """
    aim = math.log(target * (1 - (TOLERANCE + MARGIN) / 2))
    place, slope = _clamp(math.log(start.noise)), start.slope
    too_little, enough = -math.inf, math.inf
    last: tuple[float, float] | None = None
    for _ in range(80):
        value = cost(math.exp(place))
        within = value <= target * (1 - MARGIN)
        if within and value >= target * (1 - TOLERANCE):
            return Found(math.exp(place), slope)
        too_little, enough = (too_little, place) if within else (place, enough)
        _check_reachable(place, within, what)
        if 0 < value < math.inf:
            height = math.log(value)
            if last is not None and place != last[0]:
                slope = min(-0.05, max(-30.0, (height - last[1]) / (place - last[0])))
            last = (place, height)
            ahead = place + min(1.5, max(-1.5, (aim - height) / slope))
        else:
            ahead = place + (-1.5 if within else 1.5)
        if not too_little < ahead < enough:
            ahead = (too_little + enough) / 2
        if enough - too_little < 1e-9:
            break
        place = _clamp(ahead)
    if enough == math.inf:
        raise PrivacyError(f"{what}: no noise was found that keeps to the target")
    return Found(math.exp(enough), slope)


def _clamp(place: float) -> float:
    return min(math.log(MOST_NOISE), max(math.log(LEAST_NOISE), place))


def _check_reachable(place: float, within: bool, what: str) -> None:
    if not within and place >= math.log(MOST_NOISE):
        raise OutOfReachError(
            f"{what}: too small: even a noise multiplier of {MOST_NOISE:g} costs more. Raise epsilon or delta, take "
            "fewer steps, sample fewer units per step, or give phases that have noise already (normalise) more of it"
        )
    if within and place <= math.log(LEAST_NOISE):
        raise PrivacyError(
            f"{what}: so large that a noise multiplier of {LEAST_NOISE:g} costs less, which protects nobody; lower it"
        )


class CalibrationTarget(NamedTuple):
    """What some events may cost together, and who counts it: exactly, or by a quick estimate."""

    limit: float
    cost: Callable[[Sequence[SampledGaussian], bool], float]
    what: str


@final
@dataclass(frozen=True, slots=True)
class EqualNoise:
    """One noise multiplier for all phases without one."""

    def to_json(self) -> dict[str, Any]:
        """A description, which `read_split` reads."""
        return {"split": "equal-noise"}


@final
@dataclass(frozen=True, slots=True)
class NominalSplit:
    """Two phases without noise: the first alone costs `phase1_budget` of epsilon, the second fills up the whole.

    TP-TopK Sec. 7: nominal, because epsilons do not add; what is kept to is the composed epsilon.
    """

    phase1_budget: float = 0.3

    def __post_init__(self) -> None:
        if checks.number(self.phase1_budget, "phase1_budget", above=0.0) >= 1:
            raise PrivacyError(f"phase1_budget: got {self.phase1_budget}, expected a fraction in (0, 1)")

    def to_json(self) -> dict[str, Any]:
        """A description, which `read_split` reads."""
        return {"split": "nominal", "phase1_budget": self.phase1_budget}


BudgetSplit = EqualNoise | NominalSplit


def read_split(value: Any) -> BudgetSplit:
    """The split that `to_json` described."""
    for split in (EqualNoise(), NominalSplit(value.get("phase1_budget", 0.3))):
        if split.to_json() == value:
            return split
    raise PrivacyError(f"split: got {value!r}, expected what EqualNoise or NominalSplit writes")


def solve(
    events: tuple[SampledGaussian, ...], goal: CalibrationTarget, split: BudgetSplit
) -> tuple[SampledGaussian, ...]:
    """The events, their missing noise such that all together cost the goal.

    A search on the quick estimate is finished on the real cost.
    """
    missing = [place for place, event in enumerate(events) if event.noise_multiplier == 0]
    if isinstance(split, NominalSplit):
        if len(missing) != 2:
            raise PrivacyError(
                f"a nominal split needs two phases without noise, got {len(missing)}; use EqualNoise()"
            )
        first, share = missing[0], split.phase1_budget
        alone = goal._replace(limit=share * goal.limit, what=f"{share:g} of {goal.what}")
        solved = solve(events[first : first + 1], alone, EqualNoise())
        events = (*events[:first], *solved, *events[first + 1 :])

    def filled(noise: float) -> tuple[SampledGaussian, ...]:
        return tuple(s if s.noise_multiplier else s._replace(noise_multiplier=noise) for s in events)

    strength = math.sqrt(sum(s.steps * s.sampling_rate**2 for s in events if s.noise_multiplier == 0))
    found = Found(max(0.6, strength), -1.2)
    for coarse in (True, False):
        cost = partial(lambda coarse, noise: goal.cost(filled(noise), coarse), coarse)
        found = least_noise(cost, goal.limit, found, goal.what)
    return filled(found.noise)


UNDERSHOOT = 0.005
"""A calibrated plan spends at least this close to its target."""


def calibrate(
    plan: Plan,
    epsilon: float,
    delta: float,
    accountant: str = "pld",
    split: BudgetSplit = EqualNoise(),  # noqa: B008
) -> Plan:
    """The plan with noise such that it costs `epsilon` at `delta`: never more, at most 0.5 % less.

    Phases with a noise multiplier keep it and are counted; phases without one (0) get theirs from `split`.

    Formal guarantees:
        It holds when the whole plan was fixed before the first release; for others there is `RdpFilter.calibrate`.

    Edge cases:
        A process remembers what it has solved. A delta of 1/N or more is warned of.
    """
    target = checks.positive_epsilon(epsilon)
    chosen = checks.delta_in_range(delta)
    events = _open_events(plan)
    warn_if_large(chosen, plan)
    solved = _solved(split, events, accountant, target, chosen)
    return replace(_with_events(plan, solved), delta=chosen, target_epsilon=target, accountant=accountant)


@lru_cache(maxsize=256)
def _solved(
    split: BudgetSplit, events: tuple[SampledGaussian, ...], accountant: str, epsilon: float, delta: float
) -> tuple[SampledGaussian, ...]:
    counted, steps = accountant_named(accountant), sum(event.steps for event in events)
    goal = CalibrationTarget(
        limit=epsilon,
        cost=lambda events, coarse: counted.epsilon(events, delta, coarse=coarse),
        what=f"epsilon={epsilon:g} at delta={delta:g} in {steps} steps ({accountant})",
    )
    return solve(events, goal, split)


def _open_events(plan: Plan) -> tuple[SampledGaussian, ...]:
    """The plan's phases, those that wait for their noise with noise 0."""
    if plan.is_calibrated:
        raise PrivacyError(
            "every phase has its noise already; set it to 0 (plan.with_noise) to have it found"
        )
    return plan.events()


def _with_events(plan: Plan, events: Sequence[SampledGaussian]) -> Plan:
    return plan.with_noise({p.name: s.noise_multiplier for p, s in zip(plan.phases, events, strict=True)})


def warn_if_large(delta: float, plan: Plan) -> None:
    """Warn when delta is at least one over the number of units."""
    if delta * plan.units >= 1:
        warnings.warn(
            f"delta={delta:g} is not below 1/N = {1 / plan.units:.3g} for N={plan.units} units ({plan.unit}): "
            "a mechanism that publishes one unit's record outright would satisfy it; use a delta well below 1/N",
            PrivacyWarning,
            stacklevel=3,
        )


EarlierRun = tuple[str, tuple[SampledGaussian, ...]]
"""An earlier run on the same units: the head of its ledger, or its plan's fingerprint, and the most it can spend."""


@final
@dataclass(frozen=True, slots=True)
class RdpFilter:
    """A cap on all runs over the same units together, counted at one fixed Renyi order.

    Formal guarantees:
        Whatever plans it admits, chosen in any way from earlier releases, the whole is (epsilon, delta)-DP, provided
        cap and order were settled without looking at any release. Unlike a PLD guarantee this also covers runs
        stopped early because of what they showed: what their closed ledgers did not charge is free for later runs.
        It counts the runs that it is told of; `runs.run.continue_runs` also gives no remainder away twice.
    """

    epsilon: float
    delta: float
    order: float

    def __post_init__(self) -> None:
        checks.positive_epsilon(self.epsilon)
        checks.delta_in_range(self.delta)
        checks.number(self.order, "order", above=1.0)

    @classmethod
    def for_first_plan(cls, first: Plan, epsilon: float, delta: float) -> RdpFilter:
        """The filter whose order leaves most room for Gaussian releases after the first plan, fixed in advance.

        The order follows from public values, cap and plan. The cost of Gaussian releases grows like the order.
        """
        orders = np.asarray(ORDERS)
        budgets = np.asarray([cls(epsilon, delta, order).budget for order in ORDERS])
        room = (budgets - renyi(first.events())) / orders
        best = int(room.argmax())
        if not room[best] > 0:
            raise PrivacyError(
                f"the first plan leaves nothing of epsilon={epsilon:g} at delta={delta:g} by RDP; "
                "raise the cap (before looking at any release) or plan a cheaper first run"
            )
        return cls(float(epsilon), float(delta), ORDERS[best])

    @property
    def budget(self) -> float:
        """B: the Renyi divergence of the fixed order that the cap allows. Negative if it allows none."""
        overhead = tight_epsilon(np.asarray([self.order]), np.zeros(1), self.delta)
        return self.epsilon - float(overhead[0])

    def declared(self, first: Plan) -> Plan:
        """The first run's plan, its noise as it is, holding the cap and the order before anything is released."""
        none = PriorSpending(self.order, 0.0, ())
        return replace(first, target_epsilon=self.epsilon, accountant=FILTER, continuation=none)

    def cost(self, events: Iterable[SampledGaussian]) -> float:
        """Renyi divergence of the fixed order of what is spent; infinite if it is not private."""
        return float(renyi(normalize_events(events), (self.order,))[0])

    def calibrate(
        self,
        plan: Plan,
        earlier: Sequence[EarlierRun],
        split: BudgetSplit = EqualNoise(),  # noqa: B008
        run: str = "",
    ) -> Plan:
        """The plan with the least noise that keeps all runs together within the cap."""
        events = _open_events(plan)
        warn_if_large(self.delta, plan)
        spent = math.fsum(self.cost(events) for _, events in earlier)
        left = self.budget - spent
        if left <= 0:
            raise PrivacyError(
                f"earlier runs used up the cap of epsilon={self.epsilon:g} at delta={self.delta:g}"
            )
        goal = CalibrationTarget(
            limit=left,
            cost=lambda events, _: self.cost(events),
            what=f"what is left of epsilon={self.epsilon:g} at delta={self.delta:g} in {plan.total_steps} steps",
        )
        return replace(
            _with_events(plan, solve(events, goal, split)),
            delta=self.delta,
            target_epsilon=self.epsilon,
            accountant=FILTER,
            continuation=PriorSpending(self.order, spent, tuple(head for head, _ in earlier), run),
        )
