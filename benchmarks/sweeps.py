"""How a sweep uses the cores best: `python -m benchmarks.sweeps`.

A process of one thread on every core, all at work at once, against one process with a thread on every core. Both are
there all the time and take turns, so that a slow moment of the machine falls on both alike; what counts is the ratio
of the steps they take in the same time.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from dataclasses import asdict, dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.contenders import Job
from benchmarks.report import TABLE_WIDTH, print_json
from benchmarks.step import FULL, QUICK, Effort, Worker, read_arguments, started

SWEPT = ("mnist-cnn", "scatter-linear", "scatter-cnn")
"""What the papers' tables train."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """Median seconds a step: of each of several processes at work at once, and of one with all threads."""

    model: str
    processes: int
    together: float
    alone: float

    @property
    def gain(self) -> float:
        """How many times the steps of one process the several take in the same time."""
        return self.processes * self.alone / self.together


def measure(model: str, effort: Effort, cores: int, rows: int | None = None) -> Throughput:
    """Private dense steps of a model, both ways in turn."""
    job = Job(model, "sparsedp", rows=rows)
    with ExitStack() as stack:
        crowd = [stack.enter_context(started(job, 1)) for _ in range(cores)]
        alone = stack.enter_context(started(job, cores))
        for worker in (*crowd, alone):
            worker.receive()
        for _ in range(effort.turns):
            _work_at_once(crowd, effort.seconds)
            alone.take_turn(effort.seconds)
        for worker in (*crowd, alone):
            if worker.error is not None:
                raise RuntimeError(f"{model}: {worker.error}")
        together = float(np.median([seconds for worker in crowd for seconds in worker.seconds]))
        return Throughput(model, cores, together, float(np.median(alone.seconds)))


def _work_at_once(crowd: list[Worker], seconds: float) -> None:
    for worker in crowd:
        worker.begin_turn(seconds)
    for worker in crowd:
        worker.receive()


def table(rows: list[Throughput]) -> Table:
    """For a person."""
    shown = Table("model", "processes", "ms a step, each", "ms a step, all threads", "steps in the same time")
    for row in rows:
        shown.add_row(
            row.model,
            f"{row.processes}",
            f"{1e3 * row.together:.0f}",
            f"{1e3 * row.alone:.0f}",
            f"{row.gain:.2f} times",
        )
    return shown


def main() -> None:
    """Measure every model asked for and print the table."""
    title = (__doc__ or "").splitlines()[0]
    arguments: argparse.Namespace = read_arguments(title, SWEPT, "a minute or so: fewer steps")
    effort = QUICK if arguments.quick else FULL
    rows = [measure(model, effort, arguments.threads) for model in arguments.models]
    if arguments.json:
        print_json([{**asdict(row), "gain": row.gain} for row in rows], arguments.threads)
    else:
        Console(width=TABLE_WIDTH).print(table(rows))


if __name__ == "__main__":
    main()
