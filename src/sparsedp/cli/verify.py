"""`sparsedp verify`: recompute what a run spent, and check that its files agree."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsedp.cli import options
from sparsedp.cli.output import Exit, emit, people, run_folder

if TYPE_CHECKING:
    from rich.console import Console

    from sparsedp.runs.verify import Verification


def verify(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    as_json: options.Json = False,
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
        emit({"run": str(run), **_as_json(run, found)})
    else:
        _show(run, found, people(as_json))
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
    from rich.table import Table

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
        table = Table("accountant", "epsilon", title=title)
        for name, value in found.epsilons.items():
            table.add_row(name, f"{value:.4f}")
        screen.print(table)
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
