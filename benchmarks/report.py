"""The benchmark's table, and a verdict on each bar it has to clear."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

Row = Mapping[str, Any]

LEAST_SPEEDUP, AIMED_SPEEDUP = 1.5, 2.0
MOST_OVER_SGD = {"mnist-cnn": 1.4, "dp-cnn": 1.4, "scatter-cnn": 2.0, "scatter-linear": 1.15}
"""At active ratio 0.2."""
MOST_MEMORY_OVER_SGD = 1.25
CLEARLY_BELOW = 0.9
"""What the step at ratio 0.01 may cost of the step at 0.2, both clustered."""
TABLE_WIDTH = 120
"""At the least, also where the output is no terminal."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One bar: what was measured, and whether it is cleared."""

    bar: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether the bar is cleared."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    @property
    def missed_by(self) -> float:
        """By which share of the limit it is missed; 0 when it is met."""
        return 0.0 if self.met else abs(self.value / self.limit - 1)


@dataclass(frozen=True, slots=True)
class ModelRows:
    """The rows of one model that ran, with what all ratios refer to."""

    rows: Sequence[Row]

    @property
    def sgd(self) -> Row:
        """Plain SGD."""
        return next(row for row in self.rows if row["contender"] == "sgd")

    @property
    def fastest_opacus(self) -> Row | None:
        """The fastest Opacus mode that can run the model."""
        opacus = [row for row in self.rows if row["contender"].startswith("opacus")]
        return min(opacus, key=lambda row: row["median_seconds"], default=None)

    def ours(self, support: str | None = None, active_ratio: float | None = None) -> list[Row]:
        """Our rows of a support kind and ratio (any, if not given)."""
        return [
            row
            for row in self.rows
            if row["contender"] == "sparsedp"
            and support in (None, row["support"])
            and active_ratio in (None, row["active_ratio"])
        ]


def verdicts(model: str, rows: Sequence[Row]) -> Iterator[Verdict]:
    """Every bar that applies to a model."""
    ran = ModelRows([row for row in rows if "error" not in row])
    sgd, opacus = ran.sgd, ran.fastest_opacus
    for kind in ("full", "random", "clustered"):
        found = ran.ours(kind)
        if found and opacus:
            slowest = max(row["median_seconds"] for row in found)
            value = opacus["median_seconds"] / slowest
            yield Verdict(f"{model}: speed-up over {opacus['contender']}, {kind}", value, LEAST_SPEEDUP, True)
    for kind in ("random", "clustered"):
        for row in ran.ours(kind, 0.2):
            if model in MOST_OVER_SGD:
                value = row["median_seconds"] / sgd["median_seconds"]
                yield Verdict(f"{model}: step over SGD's at 0.2, {kind}", value, MOST_OVER_SGD[model])
    if ran.ours():
        memory = max(row["peak_rss_mb"] for row in ran.ours()) / sgd["peak_rss_mb"]
        yield Verdict(f"{model}: peak memory over SGD's, worst row", memory, MOST_MEMORY_OVER_SGD)
    for low in ran.ours("clustered", 0.01):
        for high in ran.ours("clustered", 0.2):
            value = low["median_seconds"] / high["median_seconds"]
            yield Verdict(f"{model}: step at 0.01 over step at 0.2, clustered", value, CLEARLY_BELOW)


def conditions(threads: int) -> dict[str, object]:
    """What a measurement depends on besides the code: processor, memory, threads, versions, load, and the day."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": named[0] if named else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
        "threads": threads,
        "load_average_at_the_end": round(os.getloadavg()[0], 1),
        "versions": {"python": platform.python_version()}
        | {name: metadata.version(name) for name in ("sparsedp", "torch", "opacus", "numpy")},
    }


def print_json(rows: Sequence[Any], threads: int) -> None:
    """Rows and conditions as the file that is committed to `benchmarks/results/`."""
    print(json.dumps({"conditions": conditions(threads), "rows": rows}, indent=1))


Bars = Callable[[str, Sequence[Row]], Iterator[Verdict]]


def print_report(rows: Sequence[Row], bars_of: Bars = verdicts, least: float = LEAST_SPEEDUP) -> None:
    """Tables and verdicts for people."""
    console = Console(width=max(Console().width, TABLE_WIDTH))
    models = list(dict.fromkeys(row["model"] for row in rows))
    for model in models:
        console.print(_table(model, [row for row in rows if row["model"] == model]))
    bars = Table(title=f"Bars (speed-up: at least {least}, aim {AIMED_SPEEDUP})")
    for heading in ("bar", "value", "limit", "verdict"):
        bars.add_column(heading, justify="left" if heading == "bar" else "right")
    for model in models:
        for verdict in bars_of(model, [row for row in rows if row["model"] == model]):
            sign = ">=" if verdict.at_least else "<="
            said = "[green]met" if verdict.met else f"[red]missed by {verdict.missed_by:.0%}"
            bars.add_row(verdict.bar, f"{verdict.value:.2f}", f"{sign} {verdict.limit}", said)
    console.print(bars)


def _table(model: str, rows: Sequence[Row]) -> Table:
    ran = ModelRows([row for row in rows if "error" not in row])
    opacus = ran.fastest_opacus
    cannot = "\n".join(f"{row['contender']} cannot: {row['error']}" for row in rows if "error" in row)
    table = Table(title=f"{model}, batch size {rows[0]['batch_size']}", caption=escape(cannot) or None)
    table.add_column("contender")
    for heading in ("ratio", "support", "ms", "quartiles", "over SGD", "Opacus over it", "MB", "MB over SGD"):
        table.add_column(heading, justify="right")
    for row in rows:
        name = (row["contender"], f"{row['active_ratio']:g}", row["support"])
        if "error" in row:
            table.add_row(*name, "cannot")
            continue
        low, high = row["quartile_seconds"]
        table.add_row(
            *name,
            f"{1e3 * row['median_seconds']:.1f}",
            f"{1e3 * low:.1f} .. {1e3 * high:.1f}",
            f"{row['median_seconds'] / ran.sgd['median_seconds']:.2f}",
            f"{opacus['median_seconds'] / row['median_seconds']:.2f}" if opacus else "-",
            f"{row['peak_rss_mb']:.0f}",
            f"{row['peak_rss_mb'] / ran.sgd['peak_rss_mb']:.2f}",
        )
    return table
