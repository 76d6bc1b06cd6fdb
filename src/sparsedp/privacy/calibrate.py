"""Calibration: the noise that spends a given epsilon and no more."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from sparsedp.errors import OutOfReachError, PrivacyError, PrivacyWarning
from sparsedp.privacy import checks
from sparsedp.privacy.accountants import accountant as accountant_named
from sparsedp.privacy.events import Spend
from sparsedp.privacy.plan import Plan
from sparsedp.privacy.splits import BudgetSplit, EqualNoise, Goal, NominalSplit

__all__ = [
    "BudgetSplit",
    "EqualNoise",
    "NominalSplit",
    "as_spends",
    "calibrate",
    "warn_if_large",
    "with_spends",
]

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

    **Privacy.** The guarantee holds when the whole plan was fixed before the first release. For a plan chosen after
    an earlier run's releases were seen, use `RdpFilter.calibrate`.
    **Edge cases.** A process remembers what it has solved.

    Raises:
        PrivacyError: nothing to calibrate, a phase without a clip, or an epsilon that no noise reaches.

    Warns:
        PrivacyWarning: delta is 1/N or more, which allows publishing one unit's record outright.
    """
    target = checks.positive_epsilon(epsilon)
    chosen = checks.delta_in_range(delta)
    spends = as_spends(plan)
    warn_if_large(chosen, plan)
    goal = _goal(accountant, target, chosen, plan.total_steps)
    _check_room_is_left(plan, spends, goal)
    solved = _solved(split, spends, accountant, target, chosen)
    return replace(with_spends(plan, solved), delta=chosen, target_epsilon=target, accountant=accountant)


def _goal(accountant: str, epsilon: float, delta: float, steps: int) -> Goal:
    counted = accountant_named(accountant)
    return Goal(
        limit=epsilon,
        cost=lambda spends: counted.epsilon(spends, delta),
        rough_cost=lambda spends: counted.rough_epsilon(spends, delta),
        what=f"epsilon={epsilon:g} at delta={delta:g} in {steps} steps ({accountant})",
    )


@lru_cache(maxsize=256)
def _solved(
    split: BudgetSplit, spends: tuple[Spend, ...], accountant: str, epsilon: float, delta: float
) -> tuple[Spend, ...]:
    steps = sum(spend.steps for spend in spends)
    return split.solve(spends, _goal(accountant, epsilon, delta, steps))


def _check_room_is_left(plan: Plan, spends: tuple[Spend, ...], goal: Goal) -> None:
    fixed = tuple(spend for spend in spends if spend.noise_multiplier > 0)
    if not fixed or (alone := goal.cost(fixed)) < goal.limit:
        return
    names = ", ".join(phase.name for phase in plan.phases if phase.noise_multiplier > 0)
    raise OutOfReachError(
        f"{goal.what}: {names} alone costs {alone:.3g} with the noise it has, which leaves nothing for training; "
        "raise its noise multiplier, leave it out, or raise epsilon"
    )


def as_spends(plan: Plan) -> tuple[Spend, ...]:
    """The plan's phases as spends, those that wait for their noise with noise 0.

    Raises:
        PrivacyError: no phase waits for its noise, or one has no clip.
    """
    unclipped = [phase.name for phase in plan.phases if phase.clip_norm is None]
    if unclipped:
        raise PrivacyError(
            f"phases {unclipped} have no clip_norm, so no noise makes them private; give them one"
        )
    if all(phase.noise_multiplier > 0 for phase in plan.phases):
        raise PrivacyError(
            "every phase has its noise already; set it to 0 (plan.with_noise) where it is to be found"
        )
    return tuple(Spend(phase.sampling_rate, phase.noise_multiplier, phase.steps) for phase in plan.phases)


def with_spends(plan: Plan, spends: Sequence[Spend]) -> Plan:
    """The plan with the noise of its spends."""
    return plan.with_noise({p.name: s.noise_multiplier for p, s in zip(plan.phases, spends, strict=True)})


def warn_if_large(delta: float, plan: Plan) -> None:
    """Warn when delta is at least one over the number of units."""
    if delta * plan.units >= 1:
        warnings.warn(
            f"delta={delta:g} is not below 1/N = {1 / plan.units:.3g} for N={plan.units} units ({plan.unit}): "
            "a mechanism that publishes one unit's record outright would satisfy it; use a delta well below 1/N",
            PrivacyWarning,
            stacklevel=3,
        )
