"""What `sparsedp audit` shows: the bound beside the claim, every check, and what it means."""

from __future__ import annotations

import math
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sparsedp.auditing import AuditResult
from sparsedp.auditing.result import WAYS


def show_audit(found: AuditResult, folder: Path | None, screen: Console) -> None:
    """The result on a terminal."""
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
        table.add_row(f"  {WAYS[name]}", "", _epsilon(bound), style="dim")
    screen.print(table)
    for check in found.checks:
        mark = "[green]ok[/green]  " if check.passed else "[bold red]LEAK[/bold red]"
        screen.print(f"{mark} {check.what}", soft_wrap=True)
        if check.problem is not None:
            screen.print(f"     {check.problem}", style="red", markup=False, soft_wrap=True)
    for line in found.words():
        screen.print(f"- {line}", markup=False)
    if folder is not None:
        screen.print(f"Written: {folder}", soft_wrap=True)
    verdict = "[bold green]No leak found[/bold green]" if found.passed else "[bold red]Leak found[/bold red]"
    screen.print(
        f"{verdict}: claimed epsilon {found.claimed_epsilon:.3g}, shown by attack {_epsilon(found.lower_bound)}"
    )


def _epsilon(value: float) -> str:
    return "any size" if math.isinf(value) else f"{value:.4f}"
