"""What a plan costs, in numbers: noise, epsilon by every accountant, noise energy, and other budgets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from sparsedp.core.errors import OutOfReachError, SparseDPError
from sparsedp.core.ratio import exact_ratio
from sparsedp.methods import AUTO, MethodOptions, build_plan, configure, get_method
from sparsedp.methods.method import Method
from sparsedp.methods.schedules import active_count
from sparsedp.methods.timeline import noise_on_mean
from sparsedp.privacy import EqualNoise, NominalSplit, Plan, epsilon_by_epoch, guarantee, summarize
from sparsedp.privacy.normalisation import PrivateNormalisation
from sparsedp.training.defaults import default_delta

SHAPES: Mapping[str, tuple[tuple[int, ...], int]] = MappingProxyType(
    {
        "mnist-cnn": ((1, 28, 28), 10),
        "dp-cnn": ((3, 32, 32), 10),
        "adadpigu-cnn": ((3, 32, 32), 10),
        "resnet-gn": ((3, 32, 32), 10),
        "scatter-linear": ((81, 7, 7), 10),
        "scatter-cnn": ((81, 7, 7), 10),
        "bag-of-words": ((16384,), 2),
        "embedding-bag": ((256,), 2),
        "transformer": ((256,), 2),
    }
)
"""The input each model was made for and its classes, to count parameters without data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What `sparsedp plan` is asked; public numbers only."""

    records: int
    batch_size: int
    epochs: int
    epsilon: float | None
    delta: float | None
    method: str
    active_ratio: float | str | None
    clip_norm: float | tuple[float, float] | None
    accountant: str
    warmup_fraction: float
    phase1_budget: float | None
    normalise: float | None
    unit: str
    dimension: int | None

    @property
    def row(self) -> Method:
        """The method with its ratio put in."""
        return configure(get_method(self.method), self._options)

    @property
    def _options(self) -> MethodOptions | None:
        return (
            None
            if self.active_ratio is None
            else MethodOptions.from_json({"active_ratio": self.active_ratio})
        )

    def plan(self) -> Plan:
        """The calibrated plan."""
        private = get_method(self.method).private
        delta = default_delta(self.records) if self.delta is None and private else self.delta
        return build_plan(
            get_method(self.method),
            self._options,
            units=self.records,
            batch_size=self.batch_size,
            epochs=self.epochs,
            epsilon=self.epsilon if private else None,
            delta=delta,
            clip_norm=self.clip_norm,
            unit=self.unit,
            accountant=self.accountant,
            warmup_fraction=self.warmup_fraction,
            split=EqualNoise() if self.phase1_budget is None else NominalSplit(self.phase1_budget),
            normalise=None if self.normalise is None else PrivateNormalisation(self.normalise),
        )


def answer(question: Question, other_budgets: list[float]) -> dict[str, Any]:
    """Everything the command shows, as JSON values."""
    plan = question.plan()
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
        "noise_energy": noise_energy(plan, question.row, question.dimension),
        "curve": _curve(plan),
        "other_budgets": [_other(question, plan, epsilon) for epsilon in other_budgets]
        if plan.is_private
        else [],
    }


def noise_energy(plan: Plan, method: Method, dimension: int | None) -> dict[str, Any] | None:
    """Expected squared length of a step's noise in the main phase: d nu^2 on all coordinates, k nu^2 on the support.

    TP-TopK Sec. 5: what sparsity saves. k is that of the last period, for methods that shrink as they go.
    """
    if dimension is None or method.active_ratio == AUTO:
        return None
    variance = noise_on_mean(plan, plan.phases[-1]) ** 2
    active = active_count(exact_ratio(method.active_ratio), dimension)
    return {"d": dimension, "k": active, "dense": dimension * variance, "sparse": active * variance}


def count_parameters(model: str) -> int:
    """The number of parameters of a model of the table, at the input it was made for."""
    from sparsedp.models import build, parameter_count

    if model not in SHAPES:
        raise SparseDPError(
            f"model: the size of {model!r} depends on the data, or there is no such model; give --parameters, or one "
            f"of {', '.join(SHAPES)}"
        )
    return parameter_count(build(model, *SHAPES[model]))


def warmup_share(phase1_epochs: float | None, epochs: int) -> float:
    """The warm-up's share of the steps; 0.3 if not told."""
    if phase1_epochs is None:
        return 0.3
    if not 0 < phase1_epochs < epochs:
        raise SparseDPError(
            f"phase1-epochs: got {phase1_epochs:g}, expected more than 0 and fewer than {epochs}"
        )
    return float(Fraction(repr(phase1_epochs)) / epochs)


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


def _other(question: Question, plan: Plan, epsilon: float) -> dict[str, Any]:
    """What another budget would cost: its noise, and its noise energy over that of the plan asked for.

    A budget that no noise reaches has neither.
    """
    try:
        other = replace(question, epsilon=epsilon).plan()
    except OutOfReachError:
        return {"epsilon": epsilon, "noise_multipliers": [], "noise_energy_factor": None}
    louder = noise_on_mean(other, other.phases[-1]) / noise_on_mean(plan, plan.phases[-1])
    return {
        "epsilon": epsilon,
        "noise_multipliers": [phase.noise_multiplier for phase in other.phases],
        "noise_energy_factor": louder**2,
    }
