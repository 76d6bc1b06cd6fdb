"""Time one training step of SGD, Opacus and sparsedp: `python -m benchmarks.step`.

Every row of the table is measured in its own process. The processes take turns, one working at a time, so that a
slow moment of the machine falls on all of them alike.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.contenders import CONTENDERS, Job
from benchmarks.workloads import WORKLOADS, workload_of

MASKED_RATIOS = (0.5, 0.2, 0.05, 0.01)
QUICK_RATIOS = (0.2, 0.01)


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure: turns per process, and seconds of steps per turn."""

    turns: int
    seconds: float
    ratios: tuple[float, ...]


FULL = Effort(turns=9, seconds=0.5, ratios=MASKED_RATIOS)
QUICK = Effort(turns=2, seconds=0.5, ratios=QUICK_RATIOS)


@dataclass(slots=True)
class Worker:
    """A contender's process, and what it has measured so far."""

    job: Job
    process: subprocess.Popen[str]
    seconds: list[float] = field(default_factory=list)
    peak_rss_mb: float | None = None
    ready_rss_mb: float | None = None
    error: str | None = None

    def receive(self) -> None:
        """Read the process's next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": "the process died (out of memory?)"}
        self.error = answer.get("error")
        self.seconds += answer.get("seconds", [])
        self.peak_rss_mb = answer.get("peak_rss_mb", self.peak_rss_mb)
        self.ready_rss_mb = answer.get("ready_rss_mb", self.ready_rss_mb)

    def take_turn(self, seconds: float) -> None:
        """Let the process work for a while, alone."""
        if self.error is None:
            self.begin_turn(seconds)
            self.receive()

    def begin_turn(self, seconds: float) -> None:
        """Let the process work for a while; `receive` waits for it."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()

    def row(self) -> dict[str, object]:
        """The measurement as a row of the report."""
        fields = asdict(self.job)
        rows = fields.pop("rows")
        row = {**fields, "batch_size": rows or workload_of(self.job.model).batch_size}
        if self.error is not None:
            return {**row, "median_seconds": None, "peak_rss_mb": None, "error": self.error}
        low, median, high = np.quantile(self.seconds, [0.25, 0.5, 0.75])
        return {
            **row,
            "median_seconds": float(median),
            "quartile_seconds": [float(low), float(high)],
            "steps": len(self.seconds),
            "peak_rss_mb": self.peak_rss_mb,
            "ready_rss_mb": self.ready_rss_mb,
        }


def jobs_of(model: str, ratios: Sequence[float], rows: int | None = None) -> list[Job]:
    """Every row of one model: the dense contenders, then ours on random and clustered supports."""
    dense = [Job(model, contender, rows=rows) for contender in CONTENDERS]
    masked = [
        Job(model, "sparsedp", ratio, kind, rows) for kind in ("random", "clustered") for ratio in ratios
    ]
    return dense + masked


def measure(jobs: Sequence[Job], effort: Effort, threads: int) -> list[dict[str, object]]:
    """Run the jobs of one model side by side, taking turns."""
    with ExitStack() as stack:
        workers = [stack.enter_context(started(job, threads)) for job in jobs]
        for worker in workers:
            worker.receive()
        for _ in range(effort.turns):
            for worker in workers:
                worker.take_turn(effort.seconds)
        return [worker.row() for worker in workers]


@contextmanager
def started(job: Job, threads: int) -> Iterator[Worker]:
    """A contender's process while it is needed; it says once when it is there."""
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.worker", json.dumps({"job": asdict(job), "threads": threads})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)},
    ) as process:
        yield Worker(job, process)


def read_arguments(title: str, known: Iterable[str], quick: str) -> argparse.Namespace:
    """What a benchmark of some models was asked for; `quick` says what --quick does."""
    names = list(known)
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--models", default=",".join(names), help="comma-separated, of %(default)s")
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", action="store_true", help="only JSON on standard output")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores"
    )
    arguments = parser.parse_args()
    arguments.models = arguments.models.split(",")
    unknown = sorted(set(arguments.models) - set(names))
    if unknown:
        parser.error(f"no model named {', '.join(unknown)}; there are {', '.join(names)}")
    return arguments


def main() -> None:
    """Measure, then print the table and the verdicts, or JSON."""
    from benchmarks.report import print_json, print_report

    title = __doc__.splitlines()[0]
    arguments = read_arguments(title, WORKLOADS, "two minutes or so: fewer ratios, fewer steps")
    effort = QUICK if arguments.quick else FULL
    rows: list[dict[str, object]] = []
    for model in arguments.models:
        jobs = jobs_of(model, effort.ratios)
        load = f"load average {os.getloadavg()[0]:.1f} before it"
        print(
            f"{model}: {len(jobs)} processes, {effort.turns} turns each, {load}", file=sys.stderr, flush=True
        )
        rows += measure(jobs, effort, arguments.threads)
    if arguments.json:
        print_json(rows, arguments.threads)
    else:
        print_report(rows)


if __name__ == "__main__":
    main()
