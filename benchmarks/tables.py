"""Time one step on large embedding tables: `python -m benchmarks.tables`.

Two questions. On a table of a million rows and more, what does a step on the 10,000 most frequent rows cost beside
plain SGD, with dense and with sparse gradients, beside Opacus, and beside our own dense step? And with the active
rows fixed, does the cost grow with the table? Every contender runs in a process of its own; they take turns.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.contenders import Job
from benchmarks.report import Verdict, print_json
from benchmarks.step import Effort, measure
from benchmarks.table_workloads import WIDTH, TableWorkload

Row = dict[str, Any]

ACTIVE_ROWS, BATCH = 10_000, 1024
LARGE = (1_000_000, 1_500_000)
"""Rows of the large tables; d is 64 times as many."""
FEW_ROWS, SMALL_BATCH = 156, 256
"""For the growth with d: 10,000 active coordinates."""
SIZES = tuple(round(d / WIDTH) for d in (1e5, 1e6, 1e7, 1e8))
DENSE = ("sgd", "sgd-sparse", "opacus-ghost", "opacus-hooks", "sparsedp")

MOST_OVER_SPARSE_SGD, LEAST_SPEEDUP, MOST_MEMORY, MOST_SLOPE = 1.5, 20.0, 1.2, 0.05
FULL = Effort(turns=7, seconds=1.0, ratios=())
QUICK = Effort(turns=2, seconds=0.5, ratios=())


def large_jobs(rows: int) -> list[Job]:
    """Every contender on a large table: the dense ones, then ours on the frequent rows."""
    name = TableWorkload(rows, BATCH).name
    return [*(Job(name, contender) for contender in DENSE), _ours(name, ACTIVE_ROWS)]


def growth_jobs(sizes: Sequence[int]) -> list[Job]:
    """Ours on a fixed number of rows of ever larger tables."""
    return [_ours(TableWorkload(rows, SMALL_BATCH).name, FEW_ROWS) for rows in sizes]


def _ours(name: str, words: int) -> Job:
    d = TableWorkload.named(name).dimension
    return Job(name, "sparsedp", (words * WIDTH + 2 * WIDTH + 2) / d, f"frequent:{words}")


def with_dimension(row: Row) -> Row:
    """A measured row with d in front."""
    return {"d": TableWorkload.named(row["model"]).dimension, **row}


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """The bars, as far as what they compare has run."""
    found: list[Verdict] = []
    for d in sorted({row["d"] for row in rows if row["batch_size"] == BATCH}):
        ran = [row for row in rows if row["d"] == d and row["batch_size"] == BATCH and row["median_seconds"]]
        ours = next((r for r in ran if r["contender"] == "sparsedp" and r["active_ratio"] < 1), None)
        if ours is None:
            continue
        seconds = {r["contender"]: r["median_seconds"] for r in ran if r is not ours}
        if "sgd-sparse" in seconds:
            ratio = ours["median_seconds"] / seconds["sgd-sparse"]
            found.append(Verdict(f"d={d:.1e}: time over sparse SGD", ratio, MOST_OVER_SPARSE_SGD))
        opacus = [value for name, value in seconds.items() if name.startswith("opacus")]
        for name, value in (
            ("our dense step", seconds.get("sparsedp")),
            ("Opacus", min(opacus, default=None)),
        ):
            if value is not None:
                speedup = value / ours["median_seconds"]
                found.append(
                    Verdict(f"d={d:.1e}: speed-up over {name}", speedup, LEAST_SPEEDUP, at_least=True)
                )
        memory = ours["peak_rss_mb"] / ours["ready_rss_mb"]
        found.append(Verdict(f"d={d:.1e}: peak memory over model and inputs", memory, MOST_MEMORY))
    return found + _growth(rows)


def _growth(rows: Sequence[Row]) -> list[Verdict]:
    """Growth per decade of d, from the smallest table to the largest."""
    grown = sorted(
        (r for r in rows if r["batch_size"] == SMALL_BATCH and r["median_seconds"]), key=lambda r: r["d"]
    )
    if len(grown) < 2:
        return []
    first, last = grown[0], grown[-1]
    decades = math.log10(last["d"] / first["d"])

    def slope(before: float, after: float) -> float:
        return float((after / before) ** (1 / decades) - 1)

    added = [r["peak_rss_mb"] - r["ready_rss_mb"] for r in (first, last)]
    found = [
        Verdict(
            "growth of time per decade of d",
            slope(first["median_seconds"], last["median_seconds"]),
            MOST_SLOPE,
        )
    ]
    found.append(
        Verdict(
            "growth of a step's own memory, MB over all decades", added[1] - added[0], 0.05 * added[0] + 16
        )
    )
    return found


def print_report(rows: Sequence[Row]) -> None:
    """The table and the verdicts."""
    console = Console(width=max(120, Console().width))
    table = Table("d", "batch", "contender", "active", "ms", "peak MB", "with model and inputs")
    for row in rows:
        what = [f"{row['d']:.2e}", str(row["batch_size"]), row["contender"], f"{row['active_ratio']:.2g}"]
        if row["median_seconds"] is None:
            table.add_row(*what, "cannot", "", escape(str(row["error"])))
        else:
            peak, ready = f"{row['peak_rss_mb']:,.0f}", f"{row['ready_rss_mb']:,.0f}"
            table.add_row(*what, f"{1000 * row['median_seconds']:,.1f}", peak, ready)
    console.print(table)
    for verdict in verdicts(rows):
        word = "at least" if verdict.at_least else "at most"
        console.print(
            f"{'met   ' if verdict.met else 'MISSED'} {verdict.bar}: {verdict.value:.3g} ({word} {verdict.limit:.3g})"
        )


def main() -> None:
    """Measure, then print the table and the verdicts, or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="three minutes or so: one large table, fewer steps"
    )
    parser.add_argument("--json", action="store_true", help="only JSON on standard output")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=cores, help="default: all cores")
    arguments = parser.parse_args()
    effort = QUICK if arguments.quick else FULL
    groups = [large_jobs(rows) for rows in (LARGE[:1] if arguments.quick else LARGE)]
    groups.append(growth_jobs(SIZES))
    rows: list[Row] = []
    for jobs in groups:
        load = f"load average {os.getloadavg()[0]:.1f} before it"
        print(f"{len(jobs)} processes, {effort.turns} turns each, {load}", file=sys.stderr, flush=True)
        rows += [with_dimension(row) for row in measure(jobs, effort, arguments.threads)]
    if arguments.json:
        print_json(rows, arguments.threads)
    else:
        print_report(rows)


if __name__ == "__main__":
    main()
