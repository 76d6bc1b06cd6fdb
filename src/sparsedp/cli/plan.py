"""`sparsedp plan`: what a run would cost, without touching data."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from sparsedp._validate import rounded_up
from sparsedp.cli import options
from sparsedp.cli.output import emit, people
from sparsedp.errors import SparseDPError

if TYPE_CHECKING:
    from sparsedp.methods import MethodOptions, PlanSpec
    from sparsedp.methods.plan_config import Asked
    from sparsedp.methods.plan_summary import ModelSize

_OTHER_BUDGETS = "0.5,1,2,4,8"
_CURVE_ROWS = 10
_FLAGS = {"all": "--parameters", "head": "--head-parameters", "bias": "--bias-parameters"}
_IN_WORDS = {
    "head": "the head",
    "bias": "the biases",
    "norms": "normalisation layers",
    "dense": "what is no embedding table",
}


def plan(
    records: Annotated[
        int, typer.Option(min=1, help="Number of records; of people, where each has several rows.")
    ],
    batch_size: Annotated[int, typer.Option(help="Expected size of a batch.")],
    epochs: Annotated[int, typer.Option(help="Passes over the data.")],
    epsilon: Annotated[
        float | None, typer.Option("--epsilon", "-e", help="The budget; 3 if not given.")
    ] = None,
    noise_multiplier: Annotated[
        float | None,
        typer.Option(help="The noise instead of the budget; the plan says which epsilon comes out."),
    ] = None,
    delta: options.Delta = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="A method, tp-topk if not given; `sparsedp methods` lists them. auto: what training would take."
        ),
    ] = None,
    active_ratio: options.ActiveRatio = None,
    phase1_epochs: Annotated[
        float | None, typer.Option(help="Epochs of warm-up; 30 % of all by default.")
    ] = None,
    phase1_budget: Annotated[
        float | None, typer.Option(help="Share of epsilon the warm-up alone may cost (the papers' split).")
    ] = None,
    equal_noise: Annotated[
        bool, typer.Option("--equal-noise", help="The same noise in both phases. This is the default.")
    ] = False,
    clip_norm: options.ClipNorm = None,
    normalise: Annotated[
        float | None,
        typer.Option(
            metavar="NOISE", help="Normalise the inputs privately first, with this noise multiplier (8)."
        ),
    ] = None,
    accountant: Annotated[str | None, typer.Option(help="pld if not given, rdp or rdp-classic.")] = None,
    unit: Annotated[str, typer.Option(help="What one record is: row, patient, ...")] = "row",
    parameters: Annotated[
        int | None, typer.Option(min=1, help="Number d of parameters, for the noise energy.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="Or a function that gives the model, to count them."),
    ] = None,
    head_parameters: Annotated[
        int | None, typer.Option(min=1, help="How many of them are the head's, to compare its noise.")
    ] = None,
    bias_parameters: Annotated[int | None, typer.Option(min=1, help="How many of them are biases.")] = None,
    part: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=N", help="How many are in norms, embeddings, dense (no table) or last=2."),
    ] = None,
    other_budgets: Annotated[
        str, typer.Option(metavar="E1,E2,...", help="Other epsilons to compare with; empty for none.")
    ] = _OTHER_BUDGETS,
    as_json: options.Json = False,
) -> None:
    """Say what noise a budget takes and what a run would cost, from public numbers alone.

    Example: `sparsedp plan --records 60000 --batch-size 1024 --epochs 20 --epsilon 3 --parameters 26010`

    The papers' split: add `--phase1-epochs 6 --phase1-budget 0.3`. The table of other budgets answers what epsilon 1
    would cost.
    """
    if equal_noise and phase1_budget is not None:
        raise SparseDPError(
            "give --equal-noise or --phase1-budget, not both: they are two ways to split the budget"
        )
    from sparsedp.methods import MethodOptions
    from sparsedp.methods.plan_summary import quote
    from sparsedp.privacy import NominalSplit, PrivateNormalisation

    clip = options.bounds(clip_norm)
    asked: Asked = {
        "batch_size": batch_size,
        "epochs": epochs,
        "epsilon": epsilon,
        "noise_multiplier": noise_multiplier,
        "delta": delta,
        "max_grad_norm": (clip[0], clip[1]) if isinstance(clip, list) else clip,
        "accountant": accountant,
        "warmup_fraction": _warmup_share(phase1_epochs, epochs),
        "split": None if phase1_budget is None else NominalSplit(phase1_budget),
        "normalise": None if normalise is None else PrivateNormalisation(normalise),
    }
    told = {"all": parameters, "head": head_parameters, "bias": bias_parameters}
    size = _size(model, {name: count for name, count in told.items() if count is not None} | _parts(part))
    changes = None if active_ratio is None else MethodOptions(active_ratio=active_ratio)
    spec, reason = _spec(method, changes, size, asked, units=records, unit=unit)
    if not spec.method.warm_up and (phase1_epochs is not None or phase1_budget is not None or equal_noise):
        raise SparseDPError(
            f"{spec.method.name} has one phase: --phase1-epochs, --phase1-budget and --equal-noise are for methods "
            "with a warm-up, such as tp-topk; drop them"
        )
    others = options.numbers(other_budgets, "other-budgets") if other_budgets.strip() else []
    answered = {**quote(spec, size, others), "reason": reason}
    if as_json:
        emit(answered)
    else:
        _show(answered, people(as_json))


def _warmup_share(phase1_epochs: float | None, epochs: int) -> float | None:
    """The warm-up's share of the steps, if it was told."""
    if phase1_epochs is None:
        return None
    if not 0 < phase1_epochs < epochs:
        raise SparseDPError(
            f"phase1-epochs: got {phase1_epochs:g}, expected more than 0 and fewer than {epochs}"
        )
    return float(Fraction(repr(phase1_epochs)) / epochs)


def _parts(texts: list[str] | None) -> dict[str, int]:
    """The sizes given with `--part`."""
    from sparsedp.methods.ranking import DENSE, EMBEDDINGS, LAST, NORMS

    found = {}
    for text in texts or []:
        name, _, count = text.rpartition("=")
        known = name in (NORMS, EMBEDDINGS, DENSE) or (
            name.startswith(LAST) and name.removeprefix(LAST).isdigit()
        )
        if not known or not count.isdigit() or int(count) == 0:
            raise SparseDPError(
                f"--part: got {text!r}, expected NAME=N with a name of {NORMS}, {EMBEDDINGS}, {DENSE}, {LAST}2 and a "
                "number of at least 1, such as dense=12810"
            )
        found[name] = int(count)
    return found


def _size(model: str | None, told: dict[str, int]) -> ModelSize:
    """The size of the model that a function gives, or what was told of one."""
    from torch import nn

    from sparsedp.methods.plan_summary import ModelSize
    from sparsedp.parameters import ParameterLayout

    if model is None:
        return ModelSize(told)
    if told:
        raise SparseDPError(
            f"got --model {model} and {', '.join(_flag(name) for name in told)}; give the model, which is counted, "
            "or the numbers, not both"
        )
    given = options.imported(model, "a model")
    if not isinstance(given, nn.Module):
        raise SparseDPError(f"{model}() gave {type(given).__name__}, expected a torch.nn.Module")
    return ModelSize.of(ParameterLayout.of(given))


def _spec(
    method: str | None,
    changes: MethodOptions | None,
    size: ModelSize,
    asked: Asked,
    *,
    units: int,
    unit: str,
) -> tuple[PlanSpec, str | None]:
    """What is planned, and why its method if that was left open."""
    from sparsedp.methods import PlanSpec, get_method
    from sparsedp.methods.auto import AUTO_METHOD
    from sparsedp.methods.plan_config import METHOD

    if method == AUTO_METHOD:
        return _chosen_by_fit(changes, size, asked, units=units, unit=unit)
    row = get_method(METHOD if method is None else method)
    known: Asked = asked if row.private else {**asked, "epsilon": None, "noise_multiplier": None}
    return PlanSpec.asked(row, changes, units=units, unit_name=unit, **known), None


def _chosen_by_fit(
    changes: MethodOptions | None, size: ModelSize, asked: Asked, *, units: int, unit: str
) -> tuple[PlanSpec, str]:
    """What `fit` would make of method "auto", and why."""
    from torch import nn

    from sparsedp.methods.auto import AUTO_METHOD, reason_of
    from sparsedp.methods.plan_summary import ALL
    from sparsedp.methods.ranking import HEAD
    from sparsedp.training.planning import spec_for

    dimension = size.parts.get(ALL)
    if dimension is None:
        raise SparseDPError(
            "--method auto goes by the number of parameters, which was not given; add --parameters N, or --model "
            "MODULE:FUNCTION"
        )
    # `fit` looks at nothing of a model but its size and whether it is one layer, as layers without memory have.
    layers = [dimension] if size.parts.get(HEAD) == dimension else [1, dimension - 1]
    stand_in = nn.Sequential(*(nn.Linear(width, 1, bias=False, device="meta") for width in layers))
    spec = spec_for(stand_in, AUTO_METHOD, changes, units=units, unit_name=unit, **asked)
    return spec, reason_of(spec, dimension, linear=len(layers) == 1)


def _show(answer: dict[str, Any], screen: Console) -> None:
    screen.print(f"[bold]{answer['guarantee']}[/bold]")
    if answer["reason"] is not None:
        screen.print(f"Method auto takes {answer['method']}: {answer['reason']}.", markup=False)
    phases = Table(
        "phase", "steps", "sampling rate", "noise multiplier", "clip norm", "noise on each coordinate"
    )
    for phase in answer["phases"]:
        numbers = (
            phase["sampling_rate"],
            phase["noise_multiplier"],
            phase["clip_norm"],
            phase["noise_on_mean"],
        )
        phases.add_row(phase["name"], str(phase["steps"]), *(f"{value:.4g}" for value in numbers))
    screen.print(phases)
    if answer["epsilons"]:
        spent = ", ".join(f"{name} {value:.4f}" for name, value in answer["epsilons"].items())
        screen.print(f"Epsilon by accountant: {spent} (delta {answer['delta']:g})")
    _show_energy(answer, screen)
    for row in answer["noise_ratios"]:
        most = "at most " if row["at_most"] else ""
        screen.print(
            f"Noise over clip norm, r, for {row['which']} ({most}{row['coordinates']:,} coordinates): "
            f"{most}{row['noise_ratio']:.2f}, {row['means']}."
        )
    if answer["noise_ratios"]:
        screen.print("What was measured at which r: docs/fine-tuning.md.")
    _show_curve(answer["curve"], screen)
    if answer["other_budgets"]:
        table = Table(
            "epsilon",
            "noise multiplier",
            "noise energy, compared with this plan",
            title="What another epsilon costs",
        )
        for other in answer["other_budgets"]:
            noise = ", ".join(f"{value:.4g}" for value in other["noise_multipliers"])
            factor = other["noise_energy_factor"]
            table.add_row(
                f"{other['epsilon']:g}", noise or "out of reach", "" if factor is None else f"x {factor:.3g}"
            )
        screen.print(table)


def _show_energy(answer: dict[str, Any], screen: Console) -> None:
    energy, active = answer["noise_energy"], answer["active"]
    if energy is None:
        screen.print(_why_no_energy(answer["method"], active), markup=False)
        return
    most = "at most " if active["at_most"] else ""
    screen.print(
        f"Noise energy of a step: {energy['dense']:.4g} on all d={energy['d']:,} coordinates, {energy['sparse']:.4g} "
        f"on {most or 'the '}k={energy['k']:,} active ones: {most}{energy['sparse'] / energy['dense']:.1%} of it."
    )


def _why_no_energy(method: str, active: dict[str, Any]) -> str:
    """What is not known of the support, and what to give."""
    missing = active["missing"]
    if active["count"] is not None or missing == ["all"]:
        return "Noise energy: give --parameters or --model."
    if not missing:
        return f"Noise energy and r of the support: not known before training, as {method} chooses it in every step."
    flags = ", ".join(_flag(name) for name in missing)
    parts = " and ".join(_IN_WORDS.get(name, name) for name in missing if name != "all")
    return (
        f"Noise energy and r of the support: not known, as {method} always trains {parts}, whose size was not given; "
        f"give {flags}, or --model."
    )


def _flag(part: str) -> str:
    """The option that tells a part's size."""
    return _FLAGS.get(part, f"--part {part}=N")


def _show_curve(curve: list[dict[str, Any]], screen: Console) -> None:
    if not curve:
        return
    stride = -(-len(curve) // _CURVE_ROWS)
    shown = [point for point in curve if point["epoch"] % stride == 0 or point is curve[-1]]
    top = curve[-1]["epsilon"]
    table = Table("epoch", "epsilon", "", title="Cost over time")
    for point in shown:
        table.add_row(
            str(point["epoch"]), rounded_up(point["epsilon"]), "#" * round(30 * point["epsilon"] / top)
        )
    screen.print(table)
