"""Commands about runs and models: `check`, `verify`, `report`, `diagnose`, `audit`, and the list of methods."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
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
    clip_bounds,
    imported_parts,
    numbers_table,
    print_json,
    run_folder,
    stderr_console,
    stdout_console,
)
from sparsedp.errors import DataError, SparseDPError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from sparsedp.auditing import AuditResult
    from sparsedp.diagnostics import Visible
    from sparsedp.runs.verify import Verification

MAX_ROWS = 40
"""Of a table on the screen; --json has everything."""
TIMED_ROWS, TIMES = 32, 3
"""Examples to take the time of, and how often; the least counts."""
AUDIT_BANNER = (
    "Not for release: an audit looks at the training data without noise. Its results are for whoever answers for the "
    "guarantee."
)
Confidence = Annotated[
    float, typer.Option(help="Chance that honest code raises no alarm; 0.999999 for a gate that runs often.")
]
Steps = Annotated[int, typer.Option(help="Run at most so many steps of the plan with canaries.")]
Out = Annotated[
    Path | None,
    typer.Option(help="A folder for the audit, marked as not for release; RUN-audit beside a run."),
]


def methods(as_json: Json = False) -> None:
    """List the training methods: what they do and where they come from.

    Use a name as `sparsedp.fit(..., method="NAME")`. What pays when: docs/methods.md.
    """
    from sparsedp.methods import list_methods

    rows = list_methods()
    if as_json:
        names = ("name", "summary", "paper", "warm_up", "active_ratio")
        print_json([{name: getattr(row, name) for name in names} for row in rows])
        return
    cells = [(row.name, row.summary, row.paper, str(row.active_ratio)) for row in rows]
    headings = ("method", "what it does", "from", "active ratio")
    stdout_console(as_json).print(numbers_table("Methods", headings, cells, 4))


def check(
    model: Annotated[
        str, typer.Argument(metavar="MODULE:FUNCTION", help="A function that gives (model, loss_fn, rows).")
    ],
    as_json: Json = False,
) -> None:
    """Say whether a model can be trained, which parts leave the fast path, why, and what a step costs.

    Only the rows that your function gives are looked at: make some up.

    Example: `sparsedp check mypackage.models:example`
    """
    from sparsedp.batch import per_sample_loss

    network, loss_fn, rows = imported_parts(model, "(model, loss_fn, rows)")
    loss = per_sample_loss(loss_fn)
    notes, times_plain = _coverage(network, loss, rows)
    size = sum(p.numel() for p in network.parameters() if p.requires_grad)
    if as_json:
        told = {"model": model, "parameters": size, "fast": not notes, "notes": list(notes)}
        print_json({**told, "times_plain": round(times_plain, 2)})
        return
    screen = stdout_console(as_json)
    screen.print(f"{model}: {size:,} parameters; every example is computed by itself")
    for note in notes:
        screen.print(f"slow: {note}", soft_wrap=True)
    if not notes:
        screen.print("all of it is on the fast path")
    screen.print(
        f"a clipped sum of {TIMED_ROWS} examples takes {times_plain:.1f} times an ordinary gradient, here and now"
    )


def _coverage(network: Any, loss: Any, rows: Any) -> tuple[tuple[str, ...], float]:
    """What is slow and why, and a clipped sum's processor time over that of an ordinary gradient."""
    import torch

    from sparsedp.batch import MicroBatch
    from sparsedp.clipping import FlatClip
    from sparsedp.grad_sample import BookKeepingEngine, ClippedSumQuery
    from sparsedp.grad_sample.isolation import made_up
    from sparsedp.parameters import Support
    from sparsedp.validation.model import ModelValidation, validate_model

    notes = validate_model(network, loss, rows)
    engine = BookKeepingEngine(network, loss)
    query = ClippedSumQuery(Support.full(engine.layout.dimension), FlatClip(1.0))
    many = made_up(rows, TIMED_ROWS, ModelValidation(network, loss, rows).kind)
    parameters = engine.layout.parameters(network)
    clipped = _seconds(lambda: engine.clipped_sum([MicroBatch(many)], query))
    plain = _seconds(lambda: torch.autograd.grad(loss(network, many).sum(), parameters, allow_unused=True))
    return (*notes, *(note for note in engine.notes if note not in notes)), clipped / plain


def _seconds(step: Callable[[], object]) -> float:
    taken = []
    for _ in range(1 + TIMES):
        start = time.process_time()
        step()
        taken.append(time.process_time() - start)
    return max(min(taken[1:]), 1e-9)


def verify(
    run: Run,
    as_json: Json = False,
) -> None:
    """Recompute a run's epsilon from its ledger alone, check its files, and say what is guaranteed and what is not.

    Example: `sparsedp verify runs/mnist-tp-topk-eps3`

    Checks the ledger's hash chain; that plan, checkpoint, metrics and record are what the run wrote, and that what
    they claim follows from the ledger; and epsilon by two or more other accountants. Names what nothing was
    compared with. Exits with 5 if anything does not fit, and names it.
    """
    from sparsedp.runs.verify import verify as verify_run

    found = verify_run(run_folder(run))
    if as_json:
        print_json({"run": str(run), **_as_json(run, found)})
    else:
        _show(run, found, stdout_console(as_json))
    if not found.passed:
        raise typer.Exit(Exit.MISMATCH)


def _as_json(run: Path, found: Verification) -> dict[str, object]:
    from sparsedp.guarantee import describe_run

    ledger, plan = found.ledger, found.plan
    words = None if plan is None else describe_run(plan, ledger, found.record)
    return {
        "passed": found.passed,
        "checks": [{"what": c.name, "passed": c.passed, "problem": c.problem} for c in found.checks],
        "reasons": list(found.reasons),
        "unchecked": list(found.unchecked),
        "epsilons": dict(found.epsilons),
        "delta": None if ledger is None else ledger.delta,
        "steps_charged": None if ledger is None else ledger.charged,
        "steps_planned": None if ledger is None else ledger.planned_steps,
        "unit": None if ledger is None else ledger.unit,
        "units": None if ledger is None else ledger.units,
        "guaranteed": words.guaranteed if words is not None and found.passed else [],
        "not_guaranteed": words.not_guaranteed if words is not None else [],
        "audit": _audit(run, found),
    }


def _audit(run: Path, found: Verification) -> dict[str, Any] | None:
    """What an audit of the run as it is found; it lies beside the run and decides nothing here."""
    from sparsedp.auditing.result import saved_audit

    return None if found.ledger is None else saved_audit(run, found.ledger.head)


def _show(run: Path, found: Verification, screen: Console) -> None:
    from sparsedp.guarantee import describe_run

    for check in found.checks:
        mark = "[green]ok[/green]      " if check.passed else "[bold red]MISMATCH[/bold red]"
        screen.print(f"{mark} {check.name}", soft_wrap=True)
        if not check.passed:
            screen.print(f"         {check.problem}", style="red", markup=False, soft_wrap=True)
    _list("Not checked", found.unchecked, screen)
    if found.epsilons and found.ledger is not None:
        title = (
            f"Epsilon of the {found.ledger.charged:,} steps in the ledger, at delta {found.ledger.delta:g}"
        )
        rows = [(name, f"{value:.4f}") for name, value in found.epsilons.items()]
        screen.print(numbers_table(title, ("accountant", "epsilon"), rows))
    if found.plan is not None:
        words = describe_run(found.plan, found.ledger, found.record)
        if found.passed:
            _list("Guaranteed", words.guaranteed, screen)
        _list("Not guaranteed", words.not_guaranteed, screen)
    audit = _audit(run, found)
    if audit is not None:
        _list("Attacked from outside (sparsedp audit)", audit["summary"], screen)
    verdict = "[bold green]Verified[/bold green]" if found.passed else "[bold red]Not verified[/bold red]"
    screen.print(f"{verdict}: {run}", soft_wrap=True)


def _list(title: str, lines: Iterable[str], screen: Console) -> None:
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
    if not path.is_dir():
        raise DataError(f"{path} is no folder; give the directory of a run")
    from sparsedp.report import write_report

    written = write_report(path, out=out)
    if as_json:
        print_json({"report": str(written)})
    stdout_console(as_json).print(f"Report: {written}", soft_wrap=True)


def diagnose(
    run: Run,
    as_json: Json = False,
) -> None:
    """Show how good a run's support is, from its releases and public numbers alone: it costs nothing.

    Example: `sparsedp diagnose runs/first`
    """
    from sparsedp.diagnostics import inspect_run

    seen = inspect_run(run_folder(run))
    if as_json:
        print_json({"run": str(run), "visible": seen.to_json()})
    else:
        show_support(seen, stdout_console(as_json))


def show_support(seen: Visible, screen: Console) -> None:
    """What releases and public numbers say."""
    k, d, noise = seen.size, seen.dimension, seen.noise
    screen.print(
        f"[bold]Support[/bold]: {k:,} of {d:,} coordinates, {percent(k / d)}. From releases alone: free."
    )
    if seen.proxy is not None:
        null = seen.proxy.null
        screen.print(
            f"Proxy concentration rho_sig {percent(seen.proxy.seen)}; pure noise gives {percent(null.mean)} "
            f"(give or take {percent(2 * null.std)})."
        )
    if seen.missing is not None:
        screen.print(f"No split estimate: {seen.missing}.", markup=False, soft_wrap=True)
    for decision in seen.decisions:
        screen.print(f"Step {decision['step']}: keeps {decision['reason']}.", markup=False, soft_wrap=True)
    for table in _support_tables(seen):
        screen.print(table)
    screen.print(
        f"Noise energy of a step: {significant(noise.sparse_energy)} on the support, "
        f"{significant(noise.dense_energy)} on all coordinates."
    )
    if noise.noise_ratios:
        parts = ", ".join(f"{ratio:.2f} on {name}" for name, ratio in noise.noise_ratios.items())
        screen.print(f"A step's noise over its clip norm, r: {parts}.")


def _support_tables(seen: Visible) -> Iterator[Table]:
    """How well the rankings do, where the support lies, and how it changed."""
    if seen.splits:
        rows = []
        for name, split in seen.splits.items():
            share, value, interval = split.share, "lost in noise", "-"
            if share is not None:
                reach = 1.96 * share.std
                value = percent(share.value)
                interval = f"{percent(share.value - reach)} to {percent(share.value + reach)}"
            rows.append((name, value, interval, percent(split.active_ratio)))
        best = percent(seen.size / seen.dimension)
        title = f"Energy in the best {best}: ranked and measured by different steps"
        yield numbers_table(title, ("ranking", "share of energy", "95 %", "random"), rows)
    layers = [
        (layer.name, f"{layer.active:,}", f"{layer.size:,}", percent(layer.active_ratio))
        for layer in seen.layers[:MAX_ROWS]
    ]
    yield numbers_table("Active coordinates by parameter", ("parameter", "active", "of", "share"), layers)
    if seen.overlaps:
        shared = []
        for first, second, found in seen.overlaps[:MAX_ROWS]:
            chance = " to ".join(map(percent, found.random.interval()))
            shared.append((first, second, percent(found.share), chance, percent(found.churn)))
        headings = ("supports", "", "shared", "by chance, 95 %", "dropped")
        yield numbers_table("Overlap", headings, shared, 2)


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
    confidence: Confidence = 0.95,
    steps: Steps = 200,
    out: Out = None,
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
        "method": method,
        "epsilon": epsilon,
        "delta": delta,
        "epochs": epochs,
        "batch_size": batch_size,
        "max_grad_norm": clip_bounds(clip_norm),
    }
    chosen: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    if run is not None and (chosen or active_ratio is not None):
        raise SparseDPError(
            "audit: got a run and settings; a run is audited as it was planned, so drop one or the other"
        )

    def attack() -> AuditResult:
        from sparsedp.auditing import audit as attacked
        from sparsedp.methods.auto import AUTO_METHOD
        from sparsedp.training.planning import changed_method

        model, train_dataset, loss_fn = imported_parts(subject, "(model, train_dataset, loss_fn)")
        if active_ratio is not None:
            chosen["method"] = changed_method(chosen.get("method", AUTO_METHOD), active_ratio=active_ratio)
        how: dict[str, Any] = {"confidence": confidence, "steps": steps, "progress": not as_json}
        return attacked(model, train_dataset, loss_fn, run=run, **how, **chosen)

    run_audit(attack, None if run is None else run_folder(run), out, as_json)


def run_audit(attack: Callable[[], AuditResult], run: Path | None, out: Path | None, as_json: bool) -> None:
    """Audit, show what was found, and keep it if there is a folder for it."""
    from sparsedp.auditing.result import audit_folder, check_folder, save

    folder = out if run is None or out is not None else audit_folder(run)
    if folder is not None:
        check_folder(folder)
    if not as_json:
        stderr_console().print(AUDIT_BANNER, style="yellow")
    try:
        found = attack()
    except KeyboardInterrupt as interrupt:
        stderr_console().print("Stopped; nothing was written.")
        raise typer.Exit(Exit.INTERRUPTED) from interrupt
    if folder is not None:
        save(found, folder)
    if as_json:
        print_json({**found.to_json(), "folder": None if folder is None else str(folder)})
    else:
        _show_audit(found, folder, stdout_console(as_json))
    if not found.passed:
        raise typer.Exit(Exit.MISMATCH)


def _show_audit(found: AuditResult, folder: Path | None, screen: Console) -> None:
    """The result on a terminal."""
    from sparsedp.auditing.result import ESTIMATOR_NAMES

    rows = [
        ("one step", f"{found.one_step['claimed_epsilon']:.4f}", _epsilon(found.one_step["lower_bound"])),
        (
            f"the plan, {found.planned_steps:,} steps",
            f"{found.claimed_epsilon:.4f}",
            _epsilon(found.lower_bound),
        ),
        *((f"  {ESTIMATOR_NAMES[name]}", "", _epsilon(bound)) for name, bound in found.estimates.items()),
        ("measured steps, recomposed (no attack)", "", _epsilon(found.recomposed)),
    ]
    title = f"{found.method}: epsilon at delta {found.delta:g}, per {found.unit}"
    screen.print(numbers_table(title, ("", "claimed", "shown by attack"), rows))
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
