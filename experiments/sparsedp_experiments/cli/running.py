"""Running a grid on the screen: progress while it goes, a table when it is done."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sparsedp._validate import rounded_up
from sparsedp.cli import Exit, stderr_console
from sparsedp.errors import SparseDPError
from sparsedp_experiments.comparison.statistics import Estimate
from sparsedp_experiments.runs.config import Experiment
from sparsedp_experiments.runs.grid import GridRun
from sparsedp_experiments.runs.runner import Status, Workplace, run_all
from sparsedp_experiments.runs.table import UNRESOLVED, Row, make_rows, verdict

_REFRESH_SECONDS = 0.25


def run_on_screen(experiment: Experiment, runs: Sequence[GridRun], place: Workplace, as_json: bool) -> Status:
    """Run everything that is not done, showing how it goes on standard error; Ctrl-C exits with 130."""
    screen = Console(stderr=True, quiet=as_json, highlight=False)
    try:
        if screen.is_terminal and not as_json:
            with Live(console=screen, auto_refresh=False, transient=True) as live:
                status = run_all(experiment.name, runs, place, _LiveView(live, runs, place.workers))
        else:
            status = run_all(
                experiment.name, runs, place, _LineView(screen, runs, experiment.metric, place.workers)
            )
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


def seconds_left(status: Status, runs: Sequence[GridRun], workers: int) -> float | None:
    """A guess from the runs this process has done: those of the same size where there are any."""
    if not status.new:
        return None
    known: dict[tuple[Any, ...], list[float]] = {}
    for number, seconds in status.new.items():
        known.setdefault(_size(runs[number]), []).append(seconds)
    overall = sum(status.new.values()) / len(status.new)
    total = 0.0
    for number, run in enumerate(runs):
        if number in status.records or number in status.failures:
            continue
        alike = known.get(_size(run))
        done = status.at_work.get(number, 0) / max(1, run.settings.epochs or 1)
        total += (sum(alike) / len(alike) if alike else overall) * (1 - min(1.0, done))
    return total / max(1, min(workers, status.left))


def results_table(experiment: Experiment, rows: Sequence[Row]) -> Table:
    """Mean and spread over seeds, and the paired difference to the baseline with its 95 % interval."""
    axes = [axis.name for axis in experiment.axes]
    counts = {len(row.seeds) for row in rows}
    uneven = ["seeds"] if len(counts) > 1 else []
    n = min(counts, default=0)
    seeds = "" if uneven else f", {n} seed" + ("" if n == 1 else "s")
    table = Table(
        *(*axes, *uneven, experiment.metric, f"minus {experiment.contrast.baseline}", "spent", "active"),
        title=f"{experiment.title}{seeds}",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for row in rows:
        deviation = "" if row.score.std is None else f" ± {row.score.std:.4f}"
        table.add_row(
            *(row.cell[axis] for axis in axes),
            *([str(len(row.seeds))] if uneven else []),
            f"{row.score.mean:.4f}{deviation}",
            _difference(row.difference),
            "not private" if row.epsilon is None else rounded_up(row.epsilon),
            f"{row.active_ratio:.0%}",
        )
    return table


def resolved(rows: Sequence[Row], baseline: str) -> str:
    """In words, which differences the seeds resolve."""
    found = [
        f"{', '.join(row.cell.values())} is {verdict(row.difference)}"
        for row in rows
        if row.difference is not None and verdict(row.difference) != UNRESOLVED
    ]
    if not any(row.difference is not None and row.difference.low is not None for row in rows):
        return f"One seed resolves no difference to {baseline}; give more."
    if not found:
        return f"No difference to {baseline} is resolved by these seeds."
    return f"Resolved at 95 %, one cell at a time: {'; '.join(found)}."


def summary(experiment: Experiment, status: Status, place: Workplace) -> dict[str, Any]:
    """The outcome as JSON values."""
    rows = rows_of(experiment, status)
    return {
        "experiment": experiment.name,
        "title": experiment.title,
        "metric": experiment.metric,
        "contrast": {"axis": experiment.contrast.axis, "baseline": experiment.contrast.baseline},
        "runs": status.total,
        "done": len(status.records),
        "failed": list(status.failures.values()),
        "rows": [row.to_json() for row in rows],
        "records": str(place.results.path),
    }


def rows_of(experiment: Experiment, status: Status) -> tuple[Row, ...]:
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


def _difference(found: Estimate | None) -> str:
    if found is None:
        return "-"
    if found.low is None or found.high is None:
        return f"{found.mean:+.4f}"
    return f"{found.mean:+.4f} [{found.low:+.4f}, {found.high:+.4f}]"


def _size(run: GridRun) -> tuple[Any, ...]:
    chosen = run.settings
    return (chosen.dataset, chosen.model, chosen.epochs, chosen.batch_size, chosen.subset)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "time left: not known yet"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"about {hours} h {minutes} min left" if hours else f"about {minutes} min {rest} s left"


class _LiveView:
    """A bar over all runs and a line for each at work."""

    def __init__(self, live: Live, runs: Sequence[GridRun], workers: int) -> None:
        self._live, self._runs, self._workers = live, runs, workers
        self._last = 0.0

    def __call__(self, status: Status, finished: int | None) -> None:
        now = time.monotonic()
        if finished is None and now - self._last < _REFRESH_SECONDS:
            return
        self._last = now
        done = len(status.records) + len(status.failures)
        head = f"{done} of {status.total} runs, {_duration(seconds_left(status, self._runs, self._workers))}"
        lines = Table.grid()
        lines.add_row(ProgressBar(total=max(1, status.total), completed=done, width=60))
        lines.add_row(Text(head))
        if status.preparing:
            lines.add_row(Text(f"  loading {status.preparing}"))
        for number, epoch in sorted(status.at_work.items()):
            run = self._runs[number]
            lines.add_row(Text(f"  {run.title}: epoch {epoch} of {run.settings.epochs}"))
        self._live.update(lines, refresh=True)


class _LineView:
    """A line for each run that is done."""

    def __init__(self, screen: Console, runs: Sequence[GridRun], metric: str, workers: int) -> None:
        self._screen, self._runs, self._metric, self._workers = screen, runs, metric, workers

    def __call__(self, status: Status, finished: int | None) -> None:
        if finished is None or finished not in status.records:
            return
        done = len(status.records) + len(status.failures)
        value = status.records[finished]["metrics"].get(self._metric)
        score = "" if value is None else f"{self._metric} {value:.4f}, "
        left = _duration(seconds_left(status, self._runs, self._workers))
        line = f"[{done}/{status.total}] {self._runs[finished].title}: {score}{left}"
        self._screen.print(line, markup=False, soft_wrap=True)
