"""What a plan costs in noise and epsilon, and how many coordinates a method trains, from public sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from sparsedp._validate import exact_ratio
from sparsedp.errors import OutOfReachError, SparseDPError
from sparsedp.guarantee import guarantee, summarize
from sparsedp.methods.auto import meaning_of, noise_ratio
from sparsedp.methods.method import Method
from sparsedp.methods.plan_config import PlanSpec
from sparsedp.methods.ranking import Names, Parts, part_sizes, size_of
from sparsedp.methods.schedules import active_count
from sparsedp.methods.scores import RankedBy
from sparsedp.methods.support_scheduler import noise_on_mean
from sparsedp.parameters import ParameterLayout
from sparsedp.privacy.accounting import epsilon_by_epoch
from sparsedp.privacy.plan import Plan

ALL = "all"
"""What the number of all trained scalars is called among the parts."""


@final
@dataclass(frozen=True, slots=True)
class ModelSize:
    """What is known of a model's size.

    Attributes:
        parts: number of scalars by part: "all", and words for structure such as "head"; not known ones are left out.
        layout: the parameters themselves, where there is a model. Then every part can be counted.
    """

    parts: Mapping[str, int]
    layout: ParameterLayout | None = None

    def __post_init__(self) -> None:
        most = self.parts.get(ALL)
        for part, count in self.parts.items():
            if most is not None and count > most:
                raise SparseDPError(
                    f"{part}: got {count:,} parameters of a model that has {most:,}; expected at most all of them; "
                    "correct one of the two numbers"
                )

    @classmethod
    def of(cls, layout: ParameterLayout) -> ModelSize:
        """The size of a model whose parameters are known."""
        return cls(part_sizes(layout), layout)

    def unknown(self, names: Names) -> Names:
        """Those of the parts whose size is not known."""
        return () if self.layout is not None else tuple(name for name in names if name not in self.parts)


@final
@dataclass(frozen=True, slots=True)
class ActiveCount:
    """How many coordinates are active in the end.

    Attributes:
        count: None where it is not known.
        at_most: whether it is a bound: two parts of known sizes may overlap.
        missing: the parts whose sizes would have to be known. None are missing where training itself decides.
    """

    count: int | None = None
    at_most: bool = False
    missing: Names = ()

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {"count": self.count, "at_most": self.at_most, "missing": list(self.missing)}


def count_active(method: Method, size: ModelSize) -> ActiveCount:
    """How many coordinates a method has active in its last period."""
    if method.ranking is not None and method.ranking.source is RankedBy.STEP_ROWS:
        return ActiveCount()
    scope = method.scope or (ALL,)
    missing = size.unknown((*scope, *method.always))
    if missing:
        return ActiveCount(missing=missing)
    if size.layout is not None:
        parts = Parts.of(size.layout, method.scope, method.always)
        always, ranked, at_most = size_of(parts.always), parts.ranked_size, False
    else:
        together = sum(size.parts[name] for name in scope)
        inside = min(together, size.parts.get(ALL, together))
        always = min(sum(size.parts[name] for name in method.always), inside)
        ranked, at_most = inside - always, len(scope) > 1 or len(method.always) > 1
    best = active_count(exact_ratio(method.active_ratio), ranked) if ranked else 0
    return ActiveCount(always + best, at_most)


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
        other = replace(spec, epsilon=epsilon, noise_multiplier=None).plan()
    except OutOfReachError:
        return {"epsilon": epsilon, "noise_multipliers": [], "noise_energy_factor": None}
    louder = noise_on_mean(other, other.phases[-1]) / noise_on_mean(plan, plan.phases[-1])
    return {
        "epsilon": epsilon,
        "noise_multipliers": [phase.noise_multiplier for phase in other.phases],
        "noise_energy_factor": louder**2,
    }
