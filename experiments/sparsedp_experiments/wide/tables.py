"""The study of wide data as a table: `python -m sparsedp_experiments.wide.tables RESULTS`."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparsedp_experiments.runs.results import Estimate, estimate, paired_difference
from sparsedp_experiments.wide.study import CELL, VALIDATION, best_rates

Row = Mapping[str, Any]
RANKED = ("msprime", "msprime-array", "blocks", "hospital", "molecules")
"""Data whose metric is AUC; the others' is accuracy."""


Cell = tuple[dict[str, Any], dict[str, dict[int, float]], dict[str, float]]
"""What it is, and for each of its arms the scores of the test seeds at its rate and the mean size of its support."""


def cells_of(rows: Sequence[Row]) -> Iterator[Cell]:
    """Every cell of the study."""
    by_cell: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        by_cell.setdefault((row["part"], *(row[name] for name in CELL)), []).append(row)
    for name, found in by_cell.items():
        cell = dict(zip(("part", *CELL), name, strict=True))
        metric = "auc" if cell["data"] in RANKED else "accuracy"
        chosen = best_rates(found, metric)
        scores: dict[str, dict[int, float]] = {}
        kept: dict[str, list[float]] = {}
        for row in found:
            if row["seed"] >= VALIDATION:
                continue
            rates = row.get("rates", {"": row})
            one = rates[chosen[row["arm"]] if row["arm"] in chosen else next(iter(rates))]
            scores.setdefault(row["arm"], {})[row["seed"]] = one[metric]
            kept.setdefault(row["arm"], []).append(one.get("kept", math.nan))
        yield cell, scores, {arm: float(np.mean(sizes)) for arm, sizes in kept.items()}


def table(rows: Sequence[Row]) -> str:
    """Every cell and arm: mean over the test seeds, and the paired gain over dense with its 95 % interval."""
    heads = "| part | data | d | causes | ε | N | arm | kept | mean | over dense | seeds |"
    lines = [heads, "|---" * (heads.count("|") - 1) + "|"]
    for cell, scores, kept in cells_of(rows):
        for arm, by_seed in scores.items():
            gain = paired_difference(by_seed, scores.get("dense", {}))
            about = (*(cell[name] for name in ("part", *CELL)), arm, f"{kept[arm]:.0f}")
            lines.append(
                f"| {' | '.join(map(str, about))} | {estimate(list(by_seed.values())).mean:.4f} | "
                f"{'' if gain is None or arm == 'dense' else _interval(gain)} | {len(by_seed)} |"
            )
    return "\n".join(lines) + "\n"


def _interval(gain: Estimate) -> str:
    inside = "" if gain.low is None or gain.high is None else f" [{gain.low:+.4f}, {gain.high:+.4f}]"
    return f"{gain.mean:+.4f}{inside}"


if __name__ == "__main__":
    sys.stdout.write(table([json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]))
