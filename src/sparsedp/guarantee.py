"""A plan in words and numbers, for the command line and for records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import final

from sparsedp._validate import rounded_up
from sparsedp.privacy.accounting import ACCOUNTANTS, plan_epsilon
from sparsedp.privacy.calibration import UNDERSHOOT
from sparsedp.privacy.plan import Phase, Plan

ROUNDING = 1e-6
"""Relative excess over a target that rounding on another machine may explain."""


@final
@dataclass(frozen=True, slots=True)
class PlanSummary:
    """What a plan guarantees.

    Attributes:
        statement: the guarantee in a sentence, with its unit, relation and accountant.
        epsilons: epsilon of the whole plan by every accountant; infinite where it is not private, empty without a
            delta.
        batch_sizes: expected batch size of each phase.
    """

    plan: Plan
    statement: str
    epsilons: Mapping[str, float]
    batch_sizes: Mapping[str, float]


def summarize(plan: Plan) -> PlanSummary:
    """The guarantee of a plan, by every accountant."""
    epsilons = {} if plan.delta is None else {name: plan_epsilon(plan, name) for name in ACCOUNTANTS}
    return PlanSummary(
        plan=plan,
        statement=guarantee(plan),
        epsilons=MappingProxyType(epsilons),
        batch_sizes=MappingProxyType({p.name: plan.expected_batch_size(p) for p in plan.phases}),
    )


def guarantee(plan: Plan) -> str:
    """The guarantee in a sentence; it never leaves out what a unit is.

    **Privacy.** Epsilon is accounted for anew. The target is named in its place only when the plan costs just that,
    to the accuracy of calibration, so that a plan edited by hand says what it costs and not what it once aimed at.
    """
    if not plan.is_private:
        reasons = [reason for phase in plan.phases if (reason := _not_private(phase))]
        return f"Not private (epsilon is infinite): {'; '.join(reasons)}."
    if plan.delta is None:
        return f"Noise without a target: epsilon for one {plan.unit} of {plan.units} depends on the delta chosen."
    cost, target = plan_epsilon(plan), plan.target_epsilon
    if target is None:
        return (
            f"({rounded_up(cost)}, {plan.delta:g})-differential privacy for adding or removing one {plan.unit} of "
            f"{plan.units}, by the pld accountant."
        )
    calibrated = (1 - UNDERSHOOT) * target <= cost <= target
    epsilon = rounded_up(target if calibrated else cost)
    earlier = len(plan.continuation.ledgers) if plan.continuation else 0
    whole = f" together with {earlier} earlier run{'s' if earlier > 1 else ''}" if earlier else ""
    excess = f" That is more than its target of {target:.4g}." if exceeds_target(plan, cost) else ""
    return (
        f"At most ({epsilon}, {plan.delta:g})-differential privacy{whole} for adding or removing one {plan.unit} of "
        f"{plan.units}, by the {plan.accountant} accountant.{excess}"
    )


def exceeds_target(plan: Plan, cost: float) -> bool:
    """Whether a plan costs more than it was calibrated to, beyond rounding; False without a target."""
    return plan.target_epsilon is not None and not cost <= plan.target_epsilon * (1 + ROUNDING)


def _not_private(phase: Phase) -> str:
    if phase.clip_norm is None:
        return f"phase {phase.name} does not clip"
    return "" if phase.noise_multiplier else f"phase {phase.name} adds no noise"
