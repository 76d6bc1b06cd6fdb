"""Run the cheapest recorded cell of every family again and compare it with its record.

python experiments/rerun_cells.py [FAMILY ...] [--out FILE.jsonl]

A family is a file of `experiments/results`. Of each, the cell with the cheapest run is trained once more, with the
seed of that run, by today's sources. The new number equals the record, or lies in the 95 % prediction interval of the
cell's other seeds, or differs. Families already in FILE are not run again, so a stopped run goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from scipy.special import stdtrit

from sparsedp.errors import SparseDPError
from sparsedp_experiments.runs.ablations import train_ablation
from sparsedp_experiments.runs.execute import execute
from sparsedp_experiments.runs.grid import RESULTS
from sparsedp_experiments.runs.results import append_row, read_rows
from sparsedp_experiments.runs.settings import ABLATIONS, Settings

Record = Mapping[str, Any]
LEAST_SEEDS = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is not in the file yet, then print the table of all of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", help="names of files in experiments/results; all by default")
    parser.add_argument(
        "--dataset", help="only cells of this data set, as features of others take long to compute"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/rerun.jsonl"), help="file of the new numbers")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    cells = {
        path.stem: cell
        for path in sorted(RESULTS.glob("*.jsonl"))
        if (cell := cheapest_cell(path, given.dataset))
    }
    chosen = given.families or sorted(cells, key=lambda name: cells[name][0]["seconds"])
    done = {row["family"] for row in read_rows(given.out)}
    for name in chosen:
        if name not in done:
            print(f"{name}: about {cells[name][0]['seconds']:.0f} s", file=sys.stderr)
            append_row(given.out, rerun(name, cells[name]))
    print("\n".join(table(read_rows(given.out))))
    return 0


def cheapest_cell(path: Path, dataset: str | None = None) -> list[Record]:
    """The records of the cell with the cheapest run, that run first; with few seeds only if there are no others."""
    cells: dict[str, list[Record]] = {}
    for row in read_rows(path):
        if "cell" in row and "settings" in row and dataset in (None, row["dataset"]):
            cells.setdefault(json.dumps([row["experiment"], row["cell"]]), []).append(row)
    if not cells:
        return []
    most = max(len(cell) for cell in cells.values())
    enough = [cell for cell in cells.values() if len(cell) >= min(LEAST_SEEDS, most)]
    return sorted(min(enough, key=_seconds), key=lambda row: float(row["seconds"]))


def _seconds(cell: Sequence[Record]) -> float:
    return min(float(row["seconds"]) for row in cell)


def rerun(family: str, cell: Sequence[Record]) -> dict[str, Any]:
    """Train the first record of a cell again; what happened, as JSON values."""
    record = cell[0]
    metrics = record["metrics"]
    metric = next(name for name in ("auc", "accuracy", *metrics) if metrics.get(name) is not None)
    found: dict[str, Any] = {
        "family": family,
        "experiment": record["experiment"],
        "cell": record["cell"],
        "seed": record["seed"],
        "metric": metric,
        "record": metrics[metric],
        "others": [row["metrics"][metric] for row in cell[1:]],
        "record_seconds": record["seconds"],
        "record_epsilon": record["epsilon_spent"],
    }
    began = time.monotonic()
    try:
        settings = Settings.from_json(record["settings"])
        if settings.method in ABLATIONS:
            again = train_ablation(settings)["metrics"][metric]
            return {**found, "new": again, "epsilon": None, "seconds": time.monotonic() - began}
        result = execute(settings)
    except SparseDPError as error:
        return {**found, "error": str(error).splitlines()[0][:200]}
    seconds = time.monotonic() - began
    return {**found, "new": result.metrics[metric], "epsilon": result.ledger.epsilon, "seconds": seconds}


def verdict(row: Record) -> str:
    """How the new number stands to the record and to the cell's other seeds."""
    if "error" in row:
        return f"not run: {row['error']}"
    if row["new"] == row["record"]:
        return "equal"
    if len(row["others"]) < 2:
        return "differs, and no other seeds to judge by"
    low, high = prediction_interval(row["others"])
    inside = low <= row["new"] <= high
    return "within the spread of its seeds" if inside else "**outside the spread of its seeds**"


def prediction_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Where one more value of the same normal distribution lies with this probability; anywhere below two values."""
    if len(values) < 2:
        return -math.inf, math.inf
    n = len(values)
    half = float(stdtrit(n - 1, (1 + confidence) / 2)) * stdev(values) * math.sqrt(1 + 1 / n)
    return mean(values) - half, mean(values) + half


def table(rows: Sequence[Record]) -> Iterator[str]:
    """A Markdown table, a row for each family."""
    yield "| family | cell, seed | metric | record | new | other seeds | seconds then, now | |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in sorted(rows, key=lambda one: str(one["family"])):
        cell = ", ".join(f"{axis} {label}" for axis, label in row["cell"].items())
        low, high = prediction_interval(row["others"])
        spread = f"{low:.4f} to {high:.4f} (n = {len(row['others'])})" if math.isfinite(low) else "-"
        new = "-" if "error" in row else f"{row['new']:.4f}"
        now = "-" if "error" in row else f"{row['seconds']:.0f}"
        yield (
            f"| `{row['family']}` | {row['experiment']}: {cell}; {row['seed']} | {row['metric']} | "
            f"{row['record']:.4f} | {new} | {spread} | {row['record_seconds']:.0f}, {now} | {verdict(row)} |"
        )


if __name__ == "__main__":
    sys.exit(main())
