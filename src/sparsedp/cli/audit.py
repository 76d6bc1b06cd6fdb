"""`sparsedp audit`: attack a plan or a run, and put what was achieved beside what is claimed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from sparsedp.cli import options
from sparsedp.cli.output import Exit, aside, emit, people, run_folder
from sparsedp.errors import SparseDPError

if TYPE_CHECKING:
    from rich.console import Console

    from sparsedp.auditing import AuditResult

BANNER = (
    "Not for release: an audit looks at the training data without noise. Its results are for whoever answers for the "
    "guarantee."
)


Confidence = Annotated[
    float,
    typer.Option(help="Chance that honest code raises no alarm; 0.999999 for a gate that runs often."),
]
Steps = Annotated[int, typer.Option(help="Run at most so many steps of the plan with canaries.")]
Out = Annotated[
    Path | None,
    typer.Option(help="A folder for the audit, marked as not for release; RUN-audit beside a run."),
]


def audit(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION", help="A function that gives (model, train_dataset, loss_fn)."
        ),
    ],
    run: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="The folder of a run: its plan and its weights are audited."),
    ] = None,
    method: options.Method = None,
    epsilon: Annotated[
        float | None, typer.Option("--epsilon", "-e", help="The budget to be claimed; 3 if not given.")
    ] = None,
    delta: options.Delta = None,
    epochs: options.Epochs = None,
    batch_size: options.BatchSize = None,
    clip_norm: options.ClipNorm = None,
    active_ratio: options.ActiveRatio = None,
    confidence: Confidence = 0.95,
    steps: Steps = 200,
    out: Out = None,
    as_json: options.Json = False,
) -> None:
    """Attack what would be trained, and show a lower bound on epsilon beside the epsilon that is claimed.

    Before a run: `sparsedp audit mypackage.training:parts --method tp-topk --epsilon 3 --epochs 20`

    After it: `sparsedp audit mypackage.training:parts --run runs/first`; then `verify` and `report` of that run show
    the result. Units that are not rows, and models trained with planted records, are for `sparsedp.audit` in Python.

    Planted units (canaries) go through the real sampler, engine, clip and noise, and an attacker who sees every
    release tells which took part. Units of your data are left out one by one, to see that none moves a sum by more
    than the clip norm. Noise and sampling are measured, coordinate by coordinate and unit by unit. A bound above the
    claim, or a check that fails, is a leak: the command names it and exits with 5. A bound below the claim shows that
    these attacks did no better; it proves nothing about others. The run is read and never touched.
    """
    clip = options.bounds(clip_norm)
    asked = {
        "method": method,
        "epsilon": epsilon,
        "delta": delta,
        "epochs": epochs,
        "batch_size": batch_size,
        "max_grad_norm": (clip[0], clip[1]) if isinstance(clip, list) else clip,
    }
    chosen: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    if run is not None and (chosen or active_ratio is not None):
        raise SparseDPError(
            "audit: got a run and settings; a run is audited as it was planned, so drop one or the other"
        )

    def attack() -> AuditResult:
        from sparsedp.auditing import audit as attacked
        from sparsedp.methods import MethodOptions

        given = options.imported(subject, "(model, train_dataset, loss_fn)")
        if not isinstance(given, tuple) or len(given) != 3:
            raise SparseDPError(
                f"{subject}() gave {type(given).__name__}, expected (model, train_dataset, loss_fn)"
            )
        if active_ratio is not None:
            chosen["options"] = MethodOptions.from_json({"active_ratio": active_ratio})
        how: dict[str, Any] = {"confidence": confidence, "steps": steps, "progress": not as_json}
        model, train_dataset, loss_fn = given
        return attacked(model, train_dataset, loss_fn, run=run, **how, **chosen)

    carry_out(attack, None if run is None else run_folder(run), out, as_json)


def carry_out(attack: Callable[[], AuditResult], run: Path | None, out: Path | None, as_json: bool) -> None:
    """Audit, show what was found, and keep it if there is a folder for it."""
    folder = _folder(run, out)
    if not as_json:
        aside().print(BANNER, style="yellow")
    try:
        found = attack()
    except KeyboardInterrupt as interrupt:
        aside().print("Stopped; nothing was written.")
        raise typer.Exit(Exit.INTERRUPTED) from interrupt
    if folder is not None:
        _save(found, folder)
    if as_json:
        emit({**found.to_json(), "folder": None if folder is None else str(folder)})
    else:
        _show(found, folder, people(as_json))
    if not found.passed:
        raise typer.Exit(Exit.MISMATCH)


def _folder(run: Path | None, out: Path | None) -> Path | None:
    """Where the audit is written, checked before anything is run; None for nowhere."""
    from sparsedp.auditing.result import audit_folder, check_folder

    folder = out if run is None or out is not None else audit_folder(run)
    if folder is not None:
        check_folder(folder)
    return folder


def _save(found: AuditResult, folder: Path) -> None:
    from sparsedp.auditing.result import save

    save(found, folder)


def _show(found: AuditResult, folder: Path | None, screen: Console) -> None:
    """The result on a terminal."""
    from sparsedp.auditing.result import ESTIMATOR_NAMES

    table = Table(title=f"{found.method}: epsilon at delta {found.delta:g}, per {found.unit}")
    for heading in ("", "claimed", "shown by attack"):
        table.add_column(heading, justify="left" if not heading else "right")
    table.add_row(
        "one step", f"{found.one_step['claimed_epsilon']:.4f}", _epsilon(found.one_step["lower_bound"])
    )
    table.add_row(
        f"the plan, {found.planned_steps:,} steps",
        f"{found.claimed_epsilon:.4f}",
        _epsilon(found.lower_bound),
    )
    for name, bound in found.estimates.items():
        table.add_row(f"  {ESTIMATOR_NAMES[name]}", "", _epsilon(bound), style="dim")
    table.add_row("measured steps, recomposed (no attack)", "", _epsilon(found.recomposed), style="dim")
    screen.print(table)
    for check in found.checks:
        mark = "[green]ok[/green]  " if check.passed else "[bold red]LEAK[/bold red]"
        screen.print(f"{mark} {check.name}", soft_wrap=True)
        if check.problem is not None:
            screen.print(f"     {check.problem}", style="red", markup=False, soft_wrap=True)
    for line in found.summary():
        screen.print(f"- {line}", markup=False)
    if folder is not None:
        screen.print(f"Written: {folder}", soft_wrap=True)
    verdict = "[bold green]No leak found[/bold green]" if found.passed else "[bold red]Leak found[/bold red]"
    screen.print(
        f"{verdict}: claimed epsilon {found.claimed_epsilon:.3g}, shown by attack {_epsilon(found.lower_bound)}"
    )


def _epsilon(value: float) -> str:
    return "any size" if math.isinf(value) else f"{value:.4f}"
