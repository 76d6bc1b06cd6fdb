"""Bring the pages' tables up to date with the committed measurements: `python -m benchmarks.readme [--check]`.

What stands between `<!-- begin NAME -->` and `<!-- end NAME -->` is made from files: `speed` and `models` from
`benchmarks/results/`. Where there is no file, it says so.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import ModelRows, Row

ROOT = Path(__file__).parents[1]
MEASURED_PAGES = ("README.md", "docs/engine.md")
SPEED_FILE, MODELS_FILE = "benchmarks/results/step.json", "benchmarks/results/models.json"
SHOWN_RATIO, FEW_ROWS = 0.2, 0.02

_PART = re.compile(r"(<!-- begin (\w+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)


def updated(text: str, root: Path = ROOT) -> str:
    """A text with every marked part made anew."""

    def part(found: re.Match[str]) -> str:
        return f"{found[1]}{_PARTS[found[2]](root)}{found[3]}" if found[2] in _PARTS else found[0]

    return _PART.sub(part, text)


def _speed(root: Path) -> str:
    head = [
        f"Median time of one step and peak memory, from `{SPEED_FILE}` (`make bench`; the spread is in the file).",
        f"Sparse columns are at active ratio {SHOWN_RATIO:g}, on random coordinates and on whole rows.",
    ]
    return _table(
        root, SPEED_FILE, head, {"random": ("random", SHOWN_RATIO), "rows": ("clustered", SHOWN_RATIO)}
    )


def _models(root: Path) -> str:
    head = [
        f"Median time of one step and peak memory, from `{MODELS_FILE}` (`python -m benchmarks.models`).",
        "Sparse columns are whole rows at two active ratios.",
    ]
    sparse = {f"rows, {ratio:g}": ("clustered", ratio) for ratio in (SHOWN_RATIO, FEW_ROWS)}
    return _table(root, MODELS_FILE, head, sparse)


def _table(root: Path, name: str, head: Sequence[str], sparse: Mapping[str, tuple[str, float]]) -> str:
    """A row for each model of a file of measurements; `sparse` names our columns by support and ratio."""
    file = root / name
    if not file.exists():
        return "No measurement has been committed yet; `make bench` makes one on your machine.\n"
    rows: list[Row] = json.loads(file.read_text())["rows"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    columns = ["model, batch", "SGD", "fastest Opacus", "sparsedp, dense", *sparse]
    lines = [
        *head,
        "",
        f"| {' | '.join(columns)} | memory: SGD / Opacus / sparsedp |",
        "|---" * (len(columns) + 1) + "|",
        *(_row([row for row in rows if row["model"] == model], sparse.values()) for model in models),
    ]
    return "\n".join([*lines, ""])


def _row(rows: Sequence[Row], sparse: Iterable[tuple[str, float]]) -> str:
    ran = ModelRows([row for row in rows if "error" not in row])
    ours = [_first(ran.ours("full")), *(_first(ran.ours(kind, ratio)) for kind, ratio in sparse)]
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


_PARTS: dict[str, Callable[[Path], str]] = {"speed": _speed, "models": _models}


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite the pages, or with `--check` say whether they are up to date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit with 1 if a page is out of date"
    )
    given: Any = parser.parse_args(arguments)
    old = 0
    for file in (ROOT / page for page in MEASURED_PAGES):
        text = file.read_text()
        if (new := updated(text)) == text:
            continue
        old += 1
        if not given.check:
            file.write_text(new)
    return int(given.check and old > 0)


if __name__ == "__main__":
    sys.exit(main())
