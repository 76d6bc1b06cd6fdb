"""Audit what has no record yet, then write the table: python -m sparsedp_experiments.audits [--table]."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sparsedp.runs.record import versions
from sparsedp_experiments.audits.table import update
from sparsedp_experiments.runs.audited import audit_settings
from sparsedp_experiments.runs.results import append_row, read_rows
from sparsedp_experiments.runs.settings import Settings

ROOT = Path(__file__).resolve().parents[3]
CONFIG = ROOT / "experiments" / "configs" / "audit.toml"
RESULTS = ROOT / "experiments" / "results" / "audit.jsonl"


def main() -> None:
    """Measure, then write."""
    config = tomllib.loads(CONFIG.read_text())
    if "--table" not in sys.argv[1:]:
        for name, wanted, how in _studies(config):
            _measure(name, wanted, how)
    update(RESULTS, config)


def _studies(config: Mapping[str, Any]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Name, number of audits, and how each is made."""
    for method in config["methods"]:
        settings = {**config["base"], "method": method}
        yield method, config["repeats"], {"settings": settings, "confidence": config["confidence"]}
    alarms = config["alarms"]
    settings = {**config["base"], "method": alarms["method"]}
    yield "alarms", alarms["audits"], {"settings": settings, "confidence": alarms["confidence"]}


def _measure(name: str, wanted: int, how: Mapping[str, Any]) -> None:
    """Audit until there are as many records as wanted; each says how it was made."""
    done = sum(row["experiment"] == f"audit-{name}" for row in read_rows(RESULTS))
    for number in range(done, wanted):
        found = audit_settings(Settings.from_json(how["settings"]), confidence=how["confidence"])
        kept = {key: value for key, value in found.to_json().items() if key not in ("summary", "run")}
        append_row(RESULTS, {"experiment": f"audit-{name}", **how, **kept, "versions": dict(versions())})
        print(f"{name} {number + 1}/{wanted}: {found.lower_bound:.3f} of {found.claimed_epsilon:.3f}")


if __name__ == "__main__":
    main()
