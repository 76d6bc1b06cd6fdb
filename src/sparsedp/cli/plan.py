"""`sparsedp plan`: what a run would cost, without touching data."""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from sparsedp.cli import options
from sparsedp.cli.output import emit, people
from sparsedp.core.errors import SparseDPError

_OTHER_BUDGETS = "0.5,1,2,4,8"
_CURVE_ROWS = 10


def plan(
    records: Annotated[
        int, typer.Option(min=1, help="Number of records; of people, where each has several rows.")
    ],
    batch_size: Annotated[int, typer.Option(help="Expected size of a batch.")],
    epochs: Annotated[int, typer.Option(help="Passes over the data.")],
    epsilon: Annotated[
        float | None, typer.Option("--epsilon", "-e", help="The budget; 3 if not given.")
    ] = None,
    delta: options.Delta = None,
    method: Annotated[
        str | None, typer.Option(help="A method, tp-topk if not given; `sparsedp methods` lists them.")
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
    model: Annotated[str | None, typer.Option(help="Or the name of a model, to count them.")] = None,
    head_parameters: Annotated[
        int | None, typer.Option(min=1, help="How many of them are the head's, to compare its noise.")
    ] = None,
    bias_parameters: Annotated[int | None, typer.Option(min=1, help="How many of them are biases.")] = None,
    other_budgets: Annotated[
        str, typer.Option(metavar="E1,E2,...", help="Other epsilons to compare with; empty for none.")
    ] = _OTHER_BUDGETS,
    as_json: options.Json = False,
) -> None:
    """Say what noise a budget takes and what a run would cost, from public numbers alone.

    Example: `sparsedp plan --records 60000 --batch-size 1024 --epochs 20 --epsilon 3 --model mnist-cnn`

    The papers' split: add `--phase1-epochs 6 --phase1-budget 0.3`. The table of other budgets answers what epsilon 1
    would cost.
    """
    if equal_noise and phase1_budget is not None:
        raise SparseDPError(
            "give --equal-noise or --phase1-budget, not both: they are two ways to split the budget"
        )
    from sparsedp.methods import MethodOptions, PlanSpec, get_method
    from sparsedp.methods.quote import quote
    from sparsedp.methods.scope import part_sizes
    from sparsedp.methods.spec import METHOD
    from sparsedp.models import usual_layout
    from sparsedp.privacy import NominalSplit, PrivateNormalisation

    row = get_method(METHOD if method is None else method)
    if not row.warm_up and (phase1_epochs is not None or phase1_budget is not None or equal_noise):
        raise SparseDPError(
            f"{row.name} has one phase: --phase1-epochs, --phase1-budget and --equal-noise are for methods with a "
            "warm-up, such as tp-topk; drop them"
        )
    ratio, clip = options.ratio(active_ratio), options.bounds(clip_norm)
    spec = PlanSpec.asked(
        row,
        None if ratio is None else MethodOptions.from_json({"active_ratio": ratio}),
        units=records,
        unit=unit,
        batch_size=batch_size,
        epochs=epochs,
        epsilon=epsilon if row.private else None,
        delta=delta,
        clip_norm=(clip[0], clip[1]) if isinstance(clip, list) else clip,
        accountant=accountant,
        warmup_fraction=_warmup_share(phase1_epochs, epochs),
        split=None if phase1_budget is None else NominalSplit(phase1_budget),
        normalise=None if normalise is None else PrivateNormalisation(normalise),
    )
    told = {"all": parameters, "head": head_parameters, "bias": bias_parameters}
    sizes = {part: count for part, count in told.items() if count is not None}
    if model is not None:
        sizes = part_sizes(usual_layout(model)) | {part: sizes[part] for part in sizes if part != "all"}
    others = options.numbers(other_budgets, "other-budgets") if other_budgets.strip() else []
    answered = quote(spec, sizes, others)
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


def _show(answer: dict[str, Any], screen: Console) -> None:
    screen.print(f"[bold]{answer['guarantee']}[/bold]")
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
    _show_energy(answer["noise_energy"], screen)
    for row in answer["noise_ratios"]:
        screen.print(
            f"Noise over clip norm, r, for {row['which']} ({row['coordinates']:,} coordinates): "
            f"{row['noise_ratio']:.2f}, {row['means']}."
        )
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


def _show_energy(energy: dict[str, Any] | None, screen: Console) -> None:
    if energy is None:
        screen.print("Noise energy: give --parameters or --model (and an active ratio that is a number).")
        return
    screen.print(
        f"Noise energy of a step: {energy['dense']:.4g} on all d={energy['d']:,} coordinates, {energy['sparse']:.4g} "
        f"on the k={energy['k']:,} active ones: {energy['sparse'] / energy['dense']:.1%} of it."
    )


def _show_curve(curve: list[dict[str, Any]], screen: Console) -> None:
    if not curve:
        return
    stride = -(-len(curve) // _CURVE_ROWS)
    shown = [point for point in curve if point["epoch"] % stride == 0 or point is curve[-1]]
    top = curve[-1]["epsilon"]
    table = Table("epoch", "epsilon", "", title="Cost over time")
    for point in shown:
        table.add_row(
            str(point["epoch"]), f"{point['epsilon']:.3f}", "#" * round(30 * point["epsilon"] / top)
        )
    screen.print(table)
