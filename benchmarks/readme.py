"""Bring README's tables up to date with the committed measurements: `python -m benchmarks.readme [--check]`.

What stands between `<!-- begin NAME -->` and `<!-- end NAME -->` is made from files: `speed` from
`benchmarks/results/step.json`, `results` from the configs and the records in `results/*/records/`
(`studies/tables/readme.py`). Where there is no file, it says so.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from studies.tables.readme import results

from benchmarks.report import ModelRows, Row

ROOT = Path(__file__).parents[1]
SPEED_FILE = "benchmarks/results/step.json"
SHOWN_RATIO = 0.2

_PART = re.compile(r"(<!-- begin (\w+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)


def updated(text: str, root: Path = ROOT) -> str:
    """A text with every marked part made anew."""

    def part(found: re.Match[str]) -> str:
        return f"{found[1]}{_PARTS[found[2]](root)}{found[3]}"

    return _PART.sub(part, text)


def _speed(root: Path) -> str:
    file = root / SPEED_FILE
    if not file.exists():
        return "No measurement has been committed yet; `make bench` makes one on your machine.\n"
    rows: list[Row] = json.loads(file.read_text())["rows"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    head = [
        f"Median time of one step and peak memory, from `{SPEED_FILE}` (`make bench`; the spread is in the file).",
        f"Sparse columns are at active ratio {SHOWN_RATIO:g}, on random coordinates and on whole rows.",
        "",
        "| model, batch | SGD | fastest Opacus | sparsedp, dense | random | rows | memory: SGD / Opacus / sparsedp |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *(_speed_row([row for row in rows if row["model"] == m]) for m in models), ""])


def _speed_row(rows: Sequence[Row]) -> str:
    ran = ModelRows([row for row in rows if "error" not in row])
    sparse = [_first(ran.ours(kind, SHOWN_RATIO)) for kind in ("random", "clustered")]
    ours = [_first(ran.ours("full")), *sparse]
    columns = [ran.sgd, ran.fastest_opacus, *ours]
    memory = [ran.sgd, ran.fastest_opacus, max(filter(None, ours), key=_memory, default=None)]
    name = f"{rows[0]['model']}, {rows[0]['batch_size']:,}"
    used = " / ".join("-" if row is None else f"{_memory(row):,.0f}" for row in memory)
    return f"| {name} | {' | '.join(map(_milliseconds, columns))} | {used} MB |"


def _first(rows: Sequence[Row]) -> Row | None:
    return rows[0] if rows else None


def _memory(row: Row) -> float:
    return float(row["peak_rss_mb"])


def _milliseconds(row: Row | None) -> str:
    return "-" if row is None else f"{1e3 * row['median_seconds']:,.0f} ms"


_PARTS: dict[str, Callable[[Path], str]] = {"results": results, "speed": _speed}


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite README.md, or with `--check` say whether it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit with 1 if README is out of date"
    )
    given: Any = parser.parse_args(arguments)
    file = ROOT / "README.md"
    old = file.read_text()
    new = updated(old)
    if given.check:
        return int(new != old)
    file.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
