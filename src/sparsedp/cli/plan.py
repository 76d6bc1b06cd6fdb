"""`sparsedp plan`: what a budget costs in noise, from public numbers alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from sparsedp._validate import exact_ratio
from sparsedp.cli import (
    ActiveRatio,
    BatchSize,
    ClipNorm,
    Delta,
    Epochs,
    Epsilon,
    Json,
    answered,
    clip_bounds,
    numbers,
    numbers_table,
)
from sparsedp.errors import OutOfReachError, SparseDPError

if TYPE_CHECKING:
    from sparsedp.methods import Method, PlanConfig


def plan(
    units: Annotated[int, typer.Option(min=1, help="Number N of privacy units: examples, or people.")],
    parameters: Annotated[int, typer.Option(min=1, help="Number d of trainable parameters.")],
    batch_size: BatchSize = None,
    epochs: Epochs = None,
    epsilon: Epsilon = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="The noise instead of the budget.")] = None,
    delta: Delta = None,
    method: Annotated[str, typer.Option(help="A method, or auto: what fit takes for a network.")] = "auto",
    active_ratio: ActiveRatio = None,
    clip_norm: ClipNorm = None,
    warmup_fraction: Annotated[
        float | None, typer.Option(help="Share of the steps that the warm-up takes; 0.3 if not given.")
    ] = None,
    warmup_budget: Annotated[
        float | None, typer.Option(help="Share of epsilon the warm-up alone may cost (the papers' split).")
    ] = None,
    accountant: Annotated[str | None, typer.Option(help="pld if not given, rdp or rdp-classic.")] = None,
    unit: Annotated[str, typer.Option(help="What one unit is: row, patient, ...")] = "row",
    other_budgets: Annotated[
        str, typer.Option(metavar="E1,E2,...", help="Other epsilons to compare with; empty for none.")
    ] = "0.5,1,2,4,8",
    as_json: Json = False,
) -> None:
    """Say what noise a budget takes and what a run would cost, from public numbers alone.

    Example: `sparsedp plan --units 60000 --parameters 26010 --epsilon 3`

    It answers before any data is touched: which settings follow from N, d and the budget, and why; how much noise a
    step gets; its norm over the clip norm (r: below about 0.4, training all coordinates is as good as any part of
    them); and what another epsilon or batch size would cost. The papers' split of the budget: `--warmup-budget 0.3`.
    """
    from sparsedp.privacy import NominalSplit

    asked: Any = {
        "batch_size": batch_size, "epochs": epochs, "epsilon": epsilon, "noise_multiplier": noise_multiplier,
        "delta": delta, "max_grad_norm": clip_bounds(clip_norm), "accountant": accountant,
        "warmup_fraction": warmup_fraction, "units": units, "unit_name": unit,
        "split": None if warmup_budget is None else NominalSplit(warmup_budget),
    }  # fmt: skip
    spec, reason = _spec(method, active_ratio, parameters, asked)
    if not spec.method.warm_up and (warmup_fraction, warmup_budget) != (None, None):
        raise SparseDPError(
            f"{spec.method.name} has no warm-up: --warmup-fraction and --warmup-budget are for methods with one, "
            "such as tp-topk; drop them"
        )
    others = numbers(other_budgets, "other-budgets") if other_budgets.strip() else []
    explained = {"reason": reason, "settings": _explain(spec, parameters, asked)}
    answer = quote(spec, parameters, others) | explained
    _show(answer, answered(answer, as_json))


_REASONS = {
    "epsilon": "a choice about people, not about models: odds of a guess grow by at most e^epsilon. Name the unit, "
    "count every run on the same people",
    "delta": "the chance that the bound on odds fails: a power of ten at most 1/(10 N)",
    "batch_size": "larger batches have less noise beside the signal, and cost time",
    "epochs": "more passes learn more, and every step gets more noise: 20 to 40 from scratch, 3 to 10 from "
    "pretrained weights",
    "max_grad_norm": "acts on the learning rate when most gradients are clipped: change the two together, and never "
    "read it off the data",
}


def _explain(spec: PlanConfig, d: int, asked: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Say of the settings what they are, whether they were asked for, and what speaks for another value."""
    from sparsedp.methods.auto import noise_ratio

    plan, reasons = spec.plan(), dict(_REASONS)
    if 4 * spec.batch_size <= spec.units:
        now, then = noise_ratio(plan, d), noise_ratio(replace(spec, batch_size=4 * spec.batch_size).plan(), d)
        reasons["batch_size"] += (
            f": four times as large takes r of all coordinates from {now:.2f} to {then:.2f}"
        )
    values = (plan.target_epsilon, plan.delta, spec.batch_size, spec.epochs, plan.phases[-1].clip_norm)
    return [
        {"setting": name, "value": value, "given": asked.get(name) is not None, "why": why}
        for (name, why), value in zip(reasons.items(), values, strict=True)
    ]


def _spec(
    method: str, active_ratio: float | None, dimension: int, asked: Any
) -> tuple[PlanConfig, str | None]:
    """What is planned, and why its method if that was left open."""
    from sparsedp.methods import PlanConfig, get_method
    from sparsedp.methods.auto import AUTO_METHOD, choose_method
    from sparsedp.methods.plan_config import METHOD

    changes = {} if active_ratio is None else {"active_ratio": active_ratio}
    if method != AUTO_METHOD:
        return PlanConfig.asked(get_method(method, **changes), **asked), None
    if changes:
        row = get_method(METHOD, **changes)
        return PlanConfig.asked(row, **asked), "a support, as --active-ratio was given"
    row, reason = choose_method(dimension, **asked)
    return PlanConfig.asked(row, **asked), reason


def count_active(method: Method, dimension: int) -> int | None:
    """How many coordinates a method has active in its last period; None where it takes more than their number."""
    from sparsedp.methods.schedules import active_count
    from sparsedp.methods.scores import ScoreSource

    if method.scope or method.always:
        return None
    if method.ranking is not None and method.ranking.source is ScoreSource.STEP_ROWS:
        return None
    return active_count(exact_ratio(method.active_ratio), dimension)


def quote(spec: PlanConfig, d: int, other_budgets: Iterable[float]) -> dict[str, Any]:
    """Say what a plan costs in noise and epsilon, as JSON values.

    The noise energy is the expected squared length of a step's noise in the main phase: d nu^2 on all coordinates,
    k nu^2 on the support (TP-TopK, Sec. 5); k is that of the last period, for methods that shrink as they go.
    """
    from sparsedp.guarantee import epsilons, guarantee
    from sparsedp.methods.auto import meaning_of, noise_ratio
    from sparsedp.methods.support_scheduler import noise_on_mean

    plan = spec.plan()
    by_accountant, active = epsilons(plan), count_active(spec.method, d)
    noise = noise_on_mean(plan, plan.phases[-1])
    counts, sparse = {"all": d}, None if active is None else active * noise**2
    if active is not None and active != d:
        counts[f"the support of {spec.method.name}"] = active
    of_plan = ("method", "target_epsilon", "delta", "accountant", "unit", "units")
    of_phase = ("name", "steps", "sampling_rate", "noise_multiplier", "clip_norm")
    return {
        "guarantee": guarantee(plan),
        **{name: getattr(plan, name) for name in of_plan},
        "epsilon": by_accountant.get(plan.accountant or "pld"),
        "epsilons": by_accountant,
        "phases": [
            {**{name: getattr(phase, name) for name in of_phase}, "noise_on_mean": noise_on_mean(plan, phase)}
            for phase in plan.phases
        ],
        "active": active,
        "noise_energy": {"d": d, "k": active, "dense": d * noise**2, "sparse": sparse},
        "noise_ratios": [
            {"which": name, "coordinates": count, "noise_ratio": ratio, "means": meaning_of(ratio)}
            for name, count in counts.items()
            for ratio in (noise_ratio(plan, count),)
        ],
        "other_budgets": [_other(spec, noise, epsilon) for epsilon in other_budgets],
    }


def _other(spec: PlanConfig, noise: float, epsilon: float) -> dict[str, Any]:
    """What another budget would cost; a budget that no noise reaches has neither noise nor energy."""
    from sparsedp.methods.support_scheduler import noise_on_mean

    try:
        other = replace(spec, epsilon=epsilon, noise_multiplier=None).plan()
    except OutOfReachError:
        return {"epsilon": epsilon, "noise_multipliers": [], "noise_energy_factor": None}
    return {
        "epsilon": epsilon,
        "noise_multipliers": [phase.noise_multiplier for phase in other.phases],
        "noise_energy_factor": (noise_on_mean(other, other.phases[-1]) / noise) ** 2,
    }


def _show(answer: dict[str, Any], screen: Console) -> None:
    screen.print(f"[bold]{answer['guarantee']}[/bold]")
    if answer["reason"] is not None:
        screen.print(f"Method auto takes {answer['method']}: {answer['reason']}.", markup=False)
    names = ("sampling_rate", "noise_multiplier", "clip_norm", "noise_on_mean")
    headings = ("phase", "steps", "sampling rate", "noise multiplier", "clip norm", "noise on a coordinate")
    rows = [(p["name"], str(p["steps"]), *(_short(p[name]) for name in names)) for p in answer["phases"]]
    screen.print(numbers_table("", headings, rows))
    if answer["epsilons"]:
        spent = ", ".join(f"{name} {value:.4f}" for name, value in answer["epsilons"].items())
        screen.print(f"Epsilon by accountant: {spent} (delta {answer['delta']:g})")
    energy = answer["noise_energy"]
    said = f"Noise energy of a step: {energy['dense']:.4g} on all d={energy['d']:,} coordinates"
    if energy["k"] is None:
        said += f"; how many {answer['method']} has active is not known from --parameters alone"
    else:
        share = energy["k"] / energy["d"]
        said += f", {energy['sparse']:.4g} on the k={energy['k']:,} active ones: {share:.1%} of it"
    screen.print(f"{said}.")
    for row in answer["noise_ratios"]:
        screen.print(
            f"Noise over clip norm, r, for {row['which']} ({row['coordinates']:,} coordinates): "
            f"{row['noise_ratio']:.2f}, {row['means']}."
        )
    settings = [
        (row["setting"], _short(row["value"], "g"), "given" if row["given"] else "default", row["why"])
        for row in answer["settings"]
    ]
    screen.print(numbers_table("Settings", ("setting", "value", "", "why"), settings, 4))
    if answer["other_budgets"]:
        budgets = []
        for other in answer["other_budgets"]:
            noise = ", ".join(map(_short, other["noise_multipliers"])) or "out of reach"
            factor = other["noise_energy_factor"]
            budgets.append((f"{other['epsilon']:g}", noise, "" if factor is None else f"x {factor:.3g}"))
        titles = ("epsilon", "noise multiplier", "noise energy, compared with this plan")
        screen.print(numbers_table("What another epsilon costs", titles, budgets))


def _short(value: float | None, form: str = ".4g") -> str:
    return "-" if value is None else format(value, form)
