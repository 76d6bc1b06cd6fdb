"""Audit what has no record yet, then write the table: python -m studies.audits [--table]."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sparsedp.experiments.audited import audit_settings
from sparsedp.experiments.settings import Settings
from sparsedp.runs.record import versions
from studies.audits.table import update

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results" / "audit"


def main() -> None:
    """Measure, then write."""
    config = tomllib.loads((ROOT / "studies" / "audits" / "audit.toml").read_text())
    if "--table" not in sys.argv[1:]:
        for name, wanted, how in _studies(config):
            _measure(RESULTS / f"{name}.jsonl", wanted, how)
    update(RESULTS, config)


def _studies(config: Mapping[str, Any]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Name, number of audits, and how each is made."""
    for method in config["methods"]:
        settings = {**config["base"], "method": method}
        yield method, config["repeats"], {"settings": settings, "confidence": config["confidence"]}
    alarms = config["alarms"]
    settings = {**config["base"], "method": alarms["method"]}
    yield "alarms", alarms["audits"], {"settings": settings, "confidence": alarms["confidence"]}


def _measure(file: Path, wanted: int, how: Mapping[str, Any]) -> None:
    """Audit until the file has as many lines as wanted; each says how it was made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    done = len(file.read_text().splitlines()) if file.exists() else 0
    for number in range(done, wanted):
        found = audit_settings(Settings.from_json(how["settings"]), confidence=how["confidence"])
        kept = {key: value for key, value in found.to_json().items() if key not in ("words", "run", "model")}
        line = json.dumps({**how, **kept, "versions": dict(versions())}, allow_nan=False)
        with open(file, "a") as open_file:
            open_file.write(line + "\n")
        print(f"{file.stem} {number + 1}/{wanted}: {found.lower_bound:.3f} of {found.claimed_epsilon:.3f}")


if __name__ == "__main__":
    main()
