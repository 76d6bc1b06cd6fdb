"""What a plan costs, in numbers: noise, epsilon by every accountant, noise energy, and other budgets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from sparsedp.errors import OutOfReachError
from sparsedp.guarantee import guarantee, summarize
from sparsedp.methods.choice import meaning_of, noise_ratio
from sparsedp.methods.method import Method
from sparsedp.methods.sizes import ALL, ActiveCount, ModelSize, count_active
from sparsedp.methods.spec import PlanSpec
from sparsedp.methods.timeline import noise_on_mean
from sparsedp.privacy.accounting import epsilon_by_epoch
from sparsedp.privacy.plan import Plan


def quote(spec: PlanSpec, size: ModelSize, other_budgets: Iterable[float]) -> dict[str, Any]:
    """What is asked for in noise and epsilon, as JSON values."""
    plan = spec.plan()
    summary = summarize(plan)
    epsilons = dict(summary.epsilons)
    active = count_active(spec.method, size)
    return {
        "epsilon": epsilons.get(plan.accountant or "pld"),
        "delta": plan.delta,
        "accountant": plan.accountant,
        "phases": [_phase(plan, number) for number in range(len(plan.phases))],
        "target_epsilon": plan.target_epsilon,
        "method": plan.method,
        "unit": plan.unit,
        "units": plan.units,
        "guarantee": guarantee(plan),
        "epsilons": epsilons,
        "active": active.to_json(),
        "noise_energy": noise_energy(plan, size, active),
        "noise_ratios": noise_ratios(plan, spec.method, size, active),
        "curve": _curve(plan),
        "other_budgets": [_other(spec, plan, epsilon) for epsilon in other_budgets]
        if plan.is_private
        else [],
    }


def noise_energy(plan: Plan, size: ModelSize, active: ActiveCount) -> dict[str, Any] | None:
    """Expected squared length of a step's noise in the main phase: d nu^2 on all coordinates, k nu^2 on the support.

    TP-TopK Sec. 5: what sparsity saves. k is that of the last period, for methods that shrink as they go.
    """
    if active.count is None or ALL not in size.parts:
        return None
    dimension, variance = size.parts[ALL], noise_on_mean(plan, plan.phases[-1]) ** 2
    return {
        "d": dimension,
        "k": active.count,
        "dense": dimension * variance,
        "sparse": active.count * variance,
    }


def noise_ratios(plan: Plan, method: Method, size: ModelSize, active: ActiveCount) -> list[dict[str, Any]]:
    """r, the noise norm over the clip norm, for parts of a model and for what is active in the end."""
    if not plan.is_private:
        return []
    counts = [(part, count, False) for part, count in size.parts.items() if count]
    support = _name_of_support(method, size)
    if active.count is not None and support is not None:
        counts.append((support, active.count, active.at_most))
    return [
        {
            "which": name,
            "coordinates": count,
            "at_most": at_most,
            "noise_ratio": noise_ratio(plan, count),
            "means": meaning_of(plan, count, whole=name == ALL),
        }
        for name, count, at_most in counts
    ]


def _name_of_support(method: Method, size: ModelSize) -> str | None:
    """What to call the coordinates that are active in the end; None where that is one of the parts."""
    if method.active_ratio != 1.0:
        return f"{method.name}, ratio {method.active_ratio}"
    if not method.scope or (len(method.scope) == 1 and method.scope[0] in size.parts):
        return None
    return f"{method.name}, which is {' and '.join(method.scope)}"


def _phase(plan: Plan, number: int) -> dict[str, Any]:
    phase = plan.phases[number]
    return {
        "name": phase.name,
        "steps": phase.steps,
        "sampling_rate": phase.sampling_rate,
        "noise_multiplier": phase.noise_multiplier,
        "clip_norm": phase.clip_norm,
        "noise_on_mean": noise_on_mean(plan, phase),
    }


def _curve(plan: Plan) -> list[dict[str, Any]]:
    if not plan.is_private:
        return []
    spent = epsilon_by_epoch(plan)
    return [{"epoch": epoch, "epsilon": epsilon} for epoch, epsilon in enumerate(spent, start=1)]


def _other(spec: PlanSpec, plan: Plan, epsilon: float) -> dict[str, Any]:
    """What another budget would cost: its noise, and its noise energy over that of the plan asked for.

    A budget that no noise reaches has neither.
    """
    try:
        other = replace(spec, epsilon=epsilon).plan()
    except OutOfReachError:
        return {"epsilon": epsilon, "noise_multipliers": [], "noise_energy_factor": None}
    louder = noise_on_mean(other, other.phases[-1]) / noise_on_mean(plan, plan.phases[-1])
    return {
        "epsilon": epsilon,
        "noise_multipliers": [phase.noise_multiplier for phase in other.phases],
        "noise_energy_factor": louder**2,
    }
