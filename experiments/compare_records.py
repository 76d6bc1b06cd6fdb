"""Compare the records of an older commit, one file per run in `results/*/records`, with experiments/results.

python experiments/compare_records.py COMMIT

Exits with 1 if a number or a setting of an old record differs, or a record or an experiment is gone.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
import tomllib
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import Any

HERE = Path(__file__).parent
GONE = {"imdb-tokens"}
"""Configs that were never run and go; audits were all made again, when they got two bounds for one."""


def main(commit: str) -> int:
    """Compare; say what was found."""
    archive = subprocess.run(
        ["git", "archive", commit, "results", "configs"], cwd=HERE.parent, capture_output=True, check=True
    )
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        before = {
            PurePosixPath(item.name): tar.extractfile(item).read().decode()  # type: ignore[union-attr]
            for item in tar
            if item.isfile() and item.name.endswith((".json", ".jsonl", ".toml"))
        }
    after = Counter(
        _key(json.loads(line))
        for file in (HERE / "results").glob("*.jsonl")
        for line in file.read_text().splitlines()
    )
    old = Counter(_key(row) for row in _old_rows(before))
    wrong = [f"record differs or is gone: {row[:160]}" for row in (old - after)]
    now = {
        name
        for file in (HERE / "configs").glob("*.toml")
        for name in tomllib.loads(file.read_text(encoding="utf-8"))
    }
    was = {path.stem for path in before if path.parts[0] == "configs" and path.suffix == ".toml"}
    wrong += [f"experiment is gone: {name}" for name in sorted(was - GONE - now)]
    print("\n".join(wrong))
    print(f"{old.total()} records and {len(was)} configs compared, {len(wrong)} differences")
    return int(bool(wrong))


def _old_rows(files: dict[PurePosixPath, str]) -> list[dict[str, Any]]:
    rows = []
    for path, text in files.items():
        if path.suffix == ".jsonl":
            rows += [json.loads(line) for line in text.splitlines()]
        elif path.name == "noise.json":
            rows += json.loads(text)["answers"]
        elif path.suffix == ".json":
            rows.append(json.loads(text))
    return [row for row in rows if "canaries" not in row]


def _key(row: dict[str, Any]) -> str:
    """Everything of a row but the names it was given since."""
    kept = {key: value for key, value in row.items() if key not in ("experiment", "study")}
    if "for_release" in kept:
        kept["publishable"] = kept.pop("for_release")
    if row.get("experiment") in ("rs-table3", "adadpigu-table3"):
        kept.pop("config_hash", None)
    return json.dumps(kept, sort_keys=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
