"""Several processes: bytes on the wire and time of a step, beside Opacus's own: `python -m benchmarks.ranks`.

Every model is stepped by two processes of one thread (ours at three ratios, Opacus's data-parallel training) and by
one process of two threads. Bytes are counted at the collectives, for one rank: what it gives to sums, and what it
gets from them. The exchange's share of a step is that of the rank that waits least for others.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.report import print_json

MODELS = ("dp-cnn", "mnist-cnn", "transformer")
RATIOS = (1.0, 0.2, 0.02)
MOST_EXCHANGE, MOST_EXCHANGE_WHEN_SPARSE = 0.10, 0.03
"""Bars: shares of a step of the DP-CNN that the exchange may take, dense and at the smallest ratio."""
STEPS, QUICK_STEPS = 20, 3


def jobs(steps: int, models: list[str]) -> list[tuple[int, dict[str, Any]]]:
    """How many processes each job takes, and what they do."""
    found: list[tuple[int, dict[str, Any]]] = []
    for model in models:
        common = {"model": model, "support": "full", "ratio": 1.0, "steps": steps, "threads": 1}
        for ratio in RATIOS:
            support = "full" if ratio == 1 else "random"
            asked = {**common, "contender": "sparsedp", "ratio": ratio, "support": support}
            found.append((2, asked))
            found.append((1, {**asked, "contender": "alone", "threads": 2}))
        found.append((2, {**common, "contender": "opacus-ddp"}))
    return found


def measure(processes: int, asked: dict[str, Any]) -> dict[str, Any]:
    """Run a job under torchrun; what rank 0 says."""
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join([root, f"{root}/src", *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={processes}",
            "-m",
            "benchmarks.rank_worker",
            json.dumps(asked),
        ],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(asked["threads"])},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    if ended.returncode or not lines:
        return {**asked, "processes": processes, "error": ended.stderr.strip()[-300:]}
    return {"processes": processes, **json.loads(lines[-1])}


def show(row: dict[str, Any]) -> str:
    """A row of the table."""
    what = f"{row['model']:12} {row['contender']:10} {row['processes']} x {row['threads']}  k/d {row['ratio']:<5}"
    if "error" in row:
        return f"{what} failed: {row['error'].splitlines()[-1]}"
    share = row["exchange_seconds"] / row["seconds"]
    wire = f"{row['bytes_sent'] / 1e3:10.1f} kB out {row['bytes_got'] / 1e3:10.1f} kB in"
    return f"{what} {row['seconds'] * 1e3:8.1f} ms  exchange {share:6.1%}  {wire}"


def verdicts(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Every bar, and whether it is held."""
    for row in rows:
        if row["contender"] != "sparsedp" or "error" in row:
            continue
        what, wire = f"{row['model']} k/d {row['ratio']:g}", {8 * row["k"]}
        exact = {row["bytes_sent"], row["bytes_got"]} == wire
        yield f"{what}: {row['bytes_sent']} bytes a step each way, 8 k: {'yes' if exact else 'NO'}"
        if row["model"] == "dp-cnn":
            bar = MOST_EXCHANGE_WHEN_SPARSE if row["ratio"] == min(RATIOS) else MOST_EXCHANGE
            share = row["exchange_seconds"] / row["seconds"]
            yield f"{what}: exchange {share:.1%} of a step, bar {bar:.0%}: {'yes' if share < bar else 'NO'}"


def main() -> None:
    """Measure everything, one job at a time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated, of %(default)s")
    parser.add_argument("--steps", type=int, help=f"timed steps of each job; {STEPS} unless told")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps: to see that it works")
    parser.add_argument("--json", action="store_true", help="only JSON on standard output")
    arguments = parser.parse_args()
    steps = arguments.steps or (QUICK_STEPS if arguments.quick else STEPS)
    told = sys.stderr if arguments.json else sys.stdout
    rows = []
    for processes, asked in jobs(steps, arguments.models.split(",")):
        rows.append(measure(processes, asked))
        print(show(rows[-1]), file=told, flush=True)
    print(*verdicts(rows), sep="\n", file=told)
    if arguments.json:
        print_json(rows, 2)


if __name__ == "__main__":
    main()
