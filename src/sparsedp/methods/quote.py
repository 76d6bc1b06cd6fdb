"""What a plan costs, in numbers: noise, epsilon by every accountant, noise energy, and other budgets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from sparsedp.core.errors import OutOfReachError
from sparsedp.core.ratio import exact_ratio
from sparsedp.methods.choice import meaning_of, noise_ratio
from sparsedp.methods.method import AUTO, Method
from sparsedp.methods.schedules import active_count
from sparsedp.methods.spec import PlanSpec
from sparsedp.methods.timeline import noise_on_mean
from sparsedp.privacy.accountants import epsilon_by_epoch
from sparsedp.privacy.plan import Plan
from sparsedp.privacy.summary import guarantee, summarize


def quote(spec: PlanSpec, sizes: Mapping[str, int], other_budgets: Iterable[float]) -> dict[str, Any]:
    """What is asked for in noise and epsilon, as JSON values.

    `sizes` has the number of parameters by part of the model: "all", where it is known, and such as "head".
    """
    plan = spec.plan()
    summary = summarize(plan)
    epsilons = dict(summary.epsilons)
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
        "noise_energy": noise_energy(plan, spec.method, sizes),
        "noise_ratios": noise_ratios(plan, spec.method, sizes),
        "curve": _curve(plan),
        "other_budgets": [_other(spec, plan, epsilon) for epsilon in other_budgets]
        if plan.is_private
        else [],
    }


def noise_energy(plan: Plan, method: Method, sizes: Mapping[str, int]) -> dict[str, Any] | None:
    """Expected squared length of a step's noise in the main phase: d nu^2 on all coordinates, k nu^2 on the support.

    TP-TopK Sec. 5: what sparsity saves. k is that of the last period, for methods that shrink as they go.
    """
    active = _active(method, sizes)
    if active is None or "all" not in sizes:
        return None
    dimension, variance = sizes["all"], noise_on_mean(plan, plan.phases[-1]) ** 2
    return {"d": dimension, "k": active, "dense": dimension * variance, "sparse": active * variance}


def noise_ratios(plan: Plan, method: Method, sizes: Mapping[str, int]) -> list[dict[str, Any]]:
    """r, the noise norm over the clip norm, for parts of a model and for what is active in the end."""
    if not plan.is_private:
        return []
    counts = {name: count for name, count in sizes.items() if count}
    active = _active(method, sizes)
    if active is not None and method.active_ratio != 1.0:
        counts[f"{method.name}, ratio {method.active_ratio}"] = active
    return [
        {
            "which": name,
            "coordinates": count,
            "noise_ratio": noise_ratio(plan, count),
            "means": meaning_of(plan, count),
        }
        for name, count in counts.items()
    ]


def _active(method: Method, sizes: Mapping[str, int]) -> int | None:
    """How many coordinates are active in the end; None where the sizes of the parts do not tell."""
    inside = sizes.get(method.scope[0] if method.scope else "all")
    if inside is None or len(method.scope) > 1 or method.active_ratio == AUTO:
        return None
    fixed = sum(sizes.get(part, 0) for part in method.always)
    ranked = max(inside - fixed, 0)
    return fixed + (active_count(exact_ratio(method.active_ratio), ranked) if ranked else 0)


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
