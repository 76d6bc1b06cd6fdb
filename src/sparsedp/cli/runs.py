"""Commands about runs and models: `check`, `verify`, `report`, `diagnose`, `audit`, and the list of methods."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsedp._validate import percent, significant
from sparsedp.cli import (
    ActiveRatio,
    BatchSize,
    ClipNorm,
    Delta,
    Epochs,
    Epsilon,
    Exit,
    Json,
    Method,
    Run,
    answered,
    clip_bounds,
    imported_parts,
    numbers_table,
    run_folder,
    stderr_console,
)
from sparsedp.errors import SparseDPError

if TYPE_CHECKING:
    from rich.console import Console

    from sparsedp.auditing import AuditResult

AUDIT_BANNER = (
    "Not for release: an audit looks at the training data without noise. Its results are for whoever answers for the "
    "guarantee."
)


def methods(as_json: Json = False) -> None:
    """List the training methods: what they do and where they come from.

    Use a name as `sparsedp.fit(..., method="NAME")`. What pays when: docs/methods.md.
    """
    from sparsedp.methods import list_methods

    rows, names = list_methods(), ("name", "summary", "paper", "warm_up", "active_ratio")
    screen = answered([{name: getattr(row, name) for name in names} for row in rows], as_json)
    cells = [(row.name, row.summary, row.paper, str(row.active_ratio)) for row in rows]
    headings = ("method", "what it does", "from", "active ratio")
    screen.print(numbers_table("Methods", headings, cells, 4))


def check(
    model: Annotated[
        str, typer.Argument(metavar="MODULE:FUNCTION", help="A function that gives (model, loss_fn, rows).")
    ],
    as_json: Json = False,
) -> None:
    """Say whether a model can be trained, which parts leave the fast path, and why.

    Only the rows that your function gives are looked at: make some up.

    Example: `sparsedp check mypackage.models:example`
    """
    from sparsedp.batch import MicroBatch, per_sample_loss
    from sparsedp.clipping import FlatClip
    from sparsedp.grad_sample import BookKeepingEngine, ClippedSumQuery
    from sparsedp.parameters import Support
    from sparsedp.validation.model import validate_model

    network, loss_fn, rows = imported_parts(model, "(model, loss_fn, rows)")
    loss = per_sample_loss(loss_fn)
    found = validate_model(network, loss, rows)
    engine = BookKeepingEngine(network, loss)
    size = engine.layout.dimension
    engine.clipped_sum([MicroBatch(rows)], ClippedSumQuery(Support.full(size), FlatClip(1.0)))
    notes = list(dict.fromkeys([*found, *engine.notes]))
    screen = answered({"model": model, "parameters": size, "fast": not notes, "notes": notes}, as_json)
    screen.print(f"{model}: {size:,} parameters; every example is computed by itself")
    for note in notes or ["none of it; all is on the fast path"]:
        screen.print(f"slow: {note}", soft_wrap=True)


_OF_LEDGER = {
    "delta": "delta", "steps_charged": "charged", "steps_planned": "planned_steps", "unit": "unit", "units": "units",
}  # fmt: skip


def verify(run: Run, as_json: Json = False) -> None:
    """Recompute a run's epsilon from its ledger alone, check its files, and say what is guaranteed and what is not.

    Example: `sparsedp verify runs/mnist-tp-topk-eps3`

    Checks the ledger's hash chain; that plan, checkpoint, metrics and record are what the run wrote, and that what
    they claim follows from the ledger; and epsilon by two or more other accountants. Names what nothing was
    compared with. Exits with 5 if anything does not fit, and names it.
    """
    from sparsedp.auditing.result import saved_audit
    from sparsedp.guarantee import describe_run
    from sparsedp.runs.verify import verify as verify_run

    found = verify_run(run_folder(run))
    ledger = found.ledger
    words = None if found.plan is None else describe_run(found.plan, ledger, found.record)
    answer: dict[str, Any] = {
        "run": str(run),
        "passed": found.passed,
        "checks": [{"what": c.name, "passed": c.passed, "problem": c.problem} for c in found.checks],
        "reasons": list(found.reasons),
        "unchecked": list(found.unchecked),
        "epsilons": dict(found.epsilons),
        **{name: getattr(ledger, source, None) for name, source in _OF_LEDGER.items()},
        "guaranteed": words.guaranteed if words is not None and found.passed else [],
        "not_guaranteed": [] if words is None else words.not_guaranteed,
        "audit": None if ledger is None else saved_audit(run, ledger.head),
    }
    screen = answered(answer, as_json)
    _show_checks(answer["checks"], "MISMATCH", screen)
    _list("Not checked", answer["unchecked"], screen)
    if answer["epsilons"]:
        title = (
            f"Epsilon of the {answer['steps_charged']:,} steps in the ledger, at delta {answer['delta']:g}"
        )
        rows = [(name, f"{value:.4f}") for name, value in answer["epsilons"].items()]
        screen.print(numbers_table(title, ("accountant", "epsilon"), rows))
    _list("Guaranteed", answer["guaranteed"], screen)
    _list("Not guaranteed", answer["not_guaranteed"], screen)
    if answer["audit"] is not None:
        _list("Attacked from outside (sparsedp audit)", answer["audit"]["summary"], screen)
    verdict = "[bold green]Verified[/bold green]" if answer["passed"] else "[bold red]Not verified[/bold red]"
    screen.print(f"{verdict}: {answer['run']}", soft_wrap=True)
    if not found.passed:
        raise typer.Exit(Exit.MISMATCH)


def _show_checks(checks: Iterable[dict[str, Any]], alarm: str, screen: Console) -> None:
    for check in checks:
        mark = "[green]ok[/green]" if check["passed"] else f"[bold red]{alarm}[/bold red]"
        screen.print(f"{mark} {check['what']}", soft_wrap=True)
        if check["problem"] is not None:
            screen.print(f"   {check['problem']}", style="red", markup=False, soft_wrap=True)


def _list(title: str, lines: Sequence[str], screen: Console) -> None:
    if lines:
        screen.print(f"[bold]{title}[/bold]")
    for line in lines:
        screen.print(f"- {line}", markup=False)


def report(
    path: Run,
    out: Annotated[
        Path | None, typer.Option(help="The file to write; report.html in the folder by default.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the report of a run as one HTML file.

    Examples: `sparsedp report runs/mnist-tp-topk-eps3`, `sparsedp report runs/demo --out demo.html`.
    """
    from sparsedp.report import write_report

    written = write_report(run_folder(path), out=out)
    answered({"report": str(written)}, as_json).print(f"Report: {written}", soft_wrap=True)


def diagnose(run: Run, as_json: Json = False) -> None:
    """Show how good a run's support is, from its releases and public numbers alone: it costs nothing.

    Example: `sparsedp diagnose runs/first`
    """
    from sparsedp.diagnostics import inspect_run

    seen = inspect_run(run_folder(run))
    screen = answered({"run": str(run), "visible": seen.to_json()}, as_json)
    k, d, energy = seen.k, seen.d, seen.noise_std**2
    screen.print(
        f"[bold]Support[/bold]: {k:,} of {d:,} coordinates, {percent(k / d)}. From releases alone: free."
    )
    if k == d:
        screen.print(f"Every coordinate is trained. Below: what a support of {seen.shown:,} would have held.")
    if seen.proxy is not None:
        share, null = seen.proxy
        screen.print(
            f"Proxy concentration rho_sig {percent(share)}; pure noise gives {percent(null.mean)} "
            f"(give or take {percent(2 * null.std)})."
        )
    if seen.missing is not None:
        screen.print(f"No split estimate: {seen.missing}.", markup=False, soft_wrap=True)
    for decision in seen.decisions:
        screen.print(f"Step {decision['step']}: keeps {decision['reason']}.", markup=False, soft_wrap=True)
    rows = []
    for name, split in seen.splits.items():
        value, interval = "lost in noise", "-"
        if split.share is not None:
            middle, reach = split.share.value, 1.96 * split.share.std
            value, interval = percent(middle), f"{percent(middle - reach)} to {percent(middle + reach)}"
        rows.append((name, value, interval, percent(split.active_ratio)))
    if rows:
        title = f"Energy in the best {percent(seen.shown / seen.d)}: ranked and measured by different steps"
        screen.print(numbers_table(title, ("ranking", "share of energy", "95 %", "random"), rows))
    screen.print(
        f"Noise energy of a step: {significant(k * energy)} on the support, "
        f"{significant(d * energy)} on all coordinates."
    )
    if seen.noise_ratios:
        parts = ", ".join(f"{ratio:.2f} on {name}" for name, ratio in seen.noise_ratios.items())
        screen.print(f"A step's noise over its clip norm, r: {parts}.")


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
    method: Method = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    clip_norm: ClipNorm = None,
    active_ratio: ActiveRatio = None,
    confidence: Annotated[
        float,
        typer.Option(help="Chance that honest code raises no alarm; 0.999999 for a gate that runs often."),
    ] = 0.95,
    steps: Annotated[int, typer.Option(help="Run at most so many steps of the plan with canaries.")] = 200,
    out: Annotated[
        Path | None,
        typer.Option(help="A folder for the audit, marked as not for release; RUN-audit beside a run."),
    ] = None,
    as_json: Json = False,
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
    asked = {
        "method": method, "epsilon": epsilon, "delta": delta, "epochs": epochs, "batch_size": batch_size,
        "max_grad_norm": clip_bounds(clip_norm),
    }  # fmt: skip
    chosen: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    if run is not None and (chosen or active_ratio is not None):
        raise SparseDPError(
            "audit: got a run and settings; a run is audited as it was planned, so drop one or the other"
        )

    from sparsedp.auditing import audit as attacked
    from sparsedp.auditing.result import audit_folder, check_folder, save
    from sparsedp.methods.auto import AUTO_METHOD
    from sparsedp.training.planning import changed_method

    folder = audit_folder(run_folder(run)) if run is not None and out is None else out
    if folder is not None:
        check_folder(folder)
    if active_ratio is not None:
        chosen["method"] = changed_method(chosen.get("method", AUTO_METHOD), active_ratio=active_ratio)
    if not as_json:
        stderr_console().print(AUDIT_BANNER, style="yellow")
    parts = imported_parts(subject, "(model, train_dataset, loss_fn)")
    try:
        found = attacked(*parts, run=run, confidence=confidence, steps=steps, progress=not as_json, **chosen)
    except KeyboardInterrupt as interrupt:
        stderr_console().print("Stopped; nothing was written.")
        raise typer.Exit(Exit.INTERRUPTED) from interrupt
    if folder is not None:
        save(found, folder)
    said = found.to_json()
    _show_audit(found, folder, answered({**said, "folder": None if folder is None else str(folder)}, as_json))
    if not found.passed:
        raise typer.Exit(Exit.MISMATCH)


def _show_audit(found: AuditResult, folder: Path | None, screen: Console) -> None:
    from sparsedp.auditing.result import ESTIMATOR_NAMES

    one, steps = found.one_step, f"the plan, {found.planned_steps:,} steps"
    rows = [
        ("one step", f"{one['claimed_epsilon']:.4f}", _epsilon(one["lower_bound"])),
        (steps, f"{found.claimed_epsilon:.4f}", _epsilon(found.lower_bound)),
        *((f"  {ESTIMATOR_NAMES[name]}", "", _epsilon(bound)) for name, bound in found.estimates.items()),
        ("measured steps, recomposed (no attack)", "", _epsilon(found.recomposed)),
    ]
    title = f"{found.method}: epsilon at delta {found.delta:g}, per {found.unit}"
    screen.print(numbers_table(title, ("", "claimed", "shown by attack"), rows))
    _show_checks(found.to_json()["checks"], "LEAK", screen)
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
