"""`audit`: attack what settings would train, or the run that they started."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsedp.cli import print_json, run_folder, stdout_console
from sparsedp.cli.runs import Confidence, Out, Steps, run_audit
from sparsedp.errors import SparseDPError
from sparsedp_experiments.cli import options

if TYPE_CHECKING:
    from sparsedp.auditing import AuditResult


def audit(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN]", help="The folder of a run: plan, model and weights are taken from it."
        ),
    ] = None,
    dataset: options.Dataset = None,
    model: options.Model = None,
    method: options.Method = None,
    epsilon: Annotated[
        float | None, typer.Option("--epsilon", "-e", help="The budget to be claimed; 3 if not given.")
    ] = None,
    delta: options.Delta = None,
    epochs: options.Epochs = None,
    batch_size: options.BatchSize = None,
    clip_norm: options.ClipNorm = None,
    active_ratio: options.ActiveRatio = None,
    classes: options.Classes = None,
    set_: options.Set = None,
    config: options.Config = None,
    confidence: Confidence = 0.95,
    steps: Steps = 200,
    records: Annotated[
        int,
        typer.Option(help="Instead, train models with so many mislabelled records planted; takes minutes."),
    ] = 0,
    trainings: Annotated[int, typer.Option(help="With --records: train so many models.")] = 1,
    out: Out = None,
    as_json: options.Json = False,
) -> None:
    """Attack what would be trained, and show a lower bound on epsilon beside the epsilon that is claimed.

    Before a run: `sparsedp audit --dataset digits --method tp-topk --epsilon 3`

    After it: `sparsedp audit runs/digits-tp-topk-eps3`; then `verify` and `report` of that run show the result.

    As `sparsedp audit`; with --records, models are trained instead, and planted records told by their losses.
    """
    chosen = options.given(
        set_,
        dataset=dataset,
        model=model,
        method=method,
        epsilon=epsilon,
        delta=delta,
        epochs=epochs,
        batch_size=batch_size,
        clip_norm=clip_norm,
        active_ratio=active_ratio,
        classes=classes,
    )
    values = _values(run, chosen, config)
    how: dict[str, Any] = {
        "confidence": confidence,
        "steps": steps,
    }
    if records:
        _attack_models(values, records, trainings, confidence, as_json)
        return
    run_audit(lambda: _attack(values, run=run, progress=not as_json, **how), run, out, as_json)


def _values(run: Path | None, chosen: dict[str, Any], config: Path | None) -> dict[str, Any]:
    """The settings of what is audited: a run's own, or those given."""
    if run is None:
        from sparsedp.methods.auto import AUTO_METHOD

        values = {"method": AUTO_METHOD, **options.from_file(config), **chosen}
        if "dataset" not in values:
            raise SparseDPError("give RUN, the folder of a run, or --dataset (`sparsedp data` lists them)")
        return values
    if chosen or config is not None:
        raise SparseDPError(
            "audit: got a run and settings; a run is audited as it was planned, so drop one or the other"
        )
    from sparsedp_experiments.runs.settings import settings_of_run

    return settings_of_run(run_folder(run))


def _attack(values: dict[str, Any], **how: Any) -> AuditResult:
    from sparsedp_experiments.runs.audited import audit_settings
    from sparsedp_experiments.runs.settings import Settings

    return audit_settings(Settings.from_json(values), **how)


def _attack_models(
    values: dict[str, Any], records: int, trainings: int, confidence: float, as_json: bool
) -> None:
    """Train models with planted records, and show what their losses tell."""
    from sparsedp_experiments.runs.audited import attack_settings
    from sparsedp_experiments.runs.settings import Settings

    settings = Settings.from_json(values)
    found = attack_settings(settings, records=records, trainings=trainings, confidence=confidence)
    if as_json:
        print_json(found.to_json())
    stdout_console(as_json).print(
        f"{found.scores.count:,} mislabelled units, each in the data of {trainings} models by a fair coin: their "
        f"losses show epsilon of at least {found.lower_bound:.4f} at confidence {confidence:g}."
    )
