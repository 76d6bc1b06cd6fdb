"""What the commands show of runs: that one begins and what came of it, the progress of many, and their table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from sparsedp._validate import rounded_up
from sparsedp.cli import Exit, stderr_console
from sparsedp.errors import SparseDPError
from sparsedp.guarantee import guarantee
from sparsedp_experiments.runs.pool import Status, run_all
from sparsedp_experiments.runs.results import make_rows


class Announcement:
    """A callback that says what is trained and where, once: with the first step, as before it all can be refused."""

    def __init__(self, screen: Console, words: str) -> None:
        self._screen, self._words = screen, words

    def __call__(self, event: Any) -> None:
        if self._words:
            self._screen.print(self._words, soft_wrap=True)
            self._words = ""


def show_run(result: Any, folder: Path, screen: Console) -> None:
    """What came out, what it cost, and what to do with it."""
    table = Table(title=f"{result.method}", show_header=False)
    for name, value in result.metrics.items():
        table.add_row(f"held-out {name.replace('_', ' ')}", "-" if value is None else f"{value:.4f}")
    table.add_row("coordinates", f"{result.k:,} of {result.d:,} active at the end")
    spent = f"{rounded_up(result.ledger.epsilon, 5)} at delta {result.delta:g}, per {result.unit}"
    table.add_row("epsilon spent", spent)
    screen.print(table)
    screen.print(guarantee(result.plan))
    if not result.publishable:
        screen.print("[yellow]Reproducible, not for release:[/yellow] a seed was given.")
    screen.print(f"Run: {folder}\nNext: sparsedp verify {folder}; sparsedp report {folder}", soft_wrap=True)


def run_on_screen(experiment: Any, runs: Any, place: Any, as_json: bool) -> Any:
    """Run everything that is not done, showing how it goes on standard error; Ctrl-C exits with 130."""
    screen = Console(stderr=True, quiet=as_json, highlight=False)
    bar = Progress(
        BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False), console=screen, transient=True,
        disable=not screen.is_terminal,
    )  # fmt: skip
    task = bar.add_task("", total=len(runs))

    def watch(status: Status, finished: int | None) -> None:
        done = len(status.records) + len(status.failures)
        at_work = "; ".join(runs[number].title for number in sorted(status.at_work))
        bar.update(task, completed=done, description=at_work)
        if finished is not None and finished in status.records and not screen.is_terminal:
            value = status.records[finished]["metrics"].get(experiment.metric)
            score = "" if value is None else f": {experiment.metric} {value:.4f}"
            screen.print(
                f"[{done}/{status.total}] {runs[finished].title}{score}", markup=False, soft_wrap=True
            )

    try:
        with bar:
            status = run_all(experiment.name, runs, place, watch)
    except KeyboardInterrupt as interrupt:
        stderr_console().print(
            "Stopped; runs at work have a checkpoint. The same command goes on where this one stopped."
        )
        raise typer.Exit(Exit.INTERRUPTED) from interrupt
    for message in sorted(status.warnings):
        screen.print(Text.assemble(("Warning: ", "bold yellow"), message), soft_wrap=True)
    for number, message in status.failures.items():
        stderr_console().print(
            Text.assemble(("Failed: ", "bold red"), f"{runs[number].title}: {message}"), soft_wrap=True
        )
    return status


def results_table(experiment: Any, rows: Any) -> Table:
    """Mean and spread over seeds, and the paired difference to the baseline with its 95 % interval."""
    axes = [axis.name for axis in experiment.axes]
    headings = (*axes, "seeds", experiment.metric, f"minus {experiment.contrast.baseline}", "spent", "active")
    table = Table(*headings, title=experiment.title, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for row in rows:
        deviation = "" if row.score.std is None else f" ± {row.score.std:.4f}"
        found = row.difference
        between = "-" if found is None else f"{found.mean:+.4f}"
        between += "" if found is None or found.low is None else f" [{found.low:+.4f}, {found.high:+.4f}]"
        table.add_row(
            *(row.cell[axis] for axis in axes),
            str(len(row.seeds)),
            f"{row.score.mean:.4f}{deviation}",
            between,
            "not private" if row.epsilon is None else rounded_up(row.epsilon),
            f"{row.active_ratio:.0%}",
        )
    return table


def rows_of(experiment: Any, status: Any) -> Any:
    """The table's rows, in the grid's order.

    Raises:
        SparseDPError: no run has the metric.
    """
    ordered = [status.records[number] for number in sorted(status.records)]
    rows = make_rows(ordered, experiment.metric, experiment.contrast)
    if ordered and not rows:
        known = sorted({name for record in ordered for name in record["metrics"]})
        raise SparseDPError(f"metric: no run has {experiment.metric!r}; expected one of {', '.join(known)}")
    return rows


def summary(experiment: Any, status: Any, place: Any) -> dict[str, Any]:
    """The outcome as JSON values."""
    return {
        "experiment": experiment.name,
        "title": experiment.title,
        "metric": experiment.metric,
        "contrast": {"axis": experiment.contrast.axis, "baseline": experiment.contrast.baseline},
        "runs": status.total,
        "done": len(status.records),
        "failed": list(status.failures.values()),
        "rows": [row.to_json(experiment.metric) for row in rows_of(experiment, status)],
        "records": str(place.results.path),
    }
