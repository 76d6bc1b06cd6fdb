"""Compare the records in experiments/results with the folders of records of an older commit, number by number.

python experiments/compare_records.py COMMIT

COMMIT has one file per run in `results/*/records` and one config per experiment in `configs`. Run in the commit that
moves the records; exits with 1 if a number, a setting or a config differs.
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
"""Configs that were never run and go."""


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
    wrong += [f"record is new: {row[:160]}" for row in (after - old)]
    now = {
        name: _without_words(content)
        for file in (HERE / "configs").glob("*.toml")
        if file.stem != "audit"
        for name, content in tomllib.loads(file.read_text()).items()
    }
    was = {
        path.stem: _without_words(tomllib.loads(text))
        for path, text in before.items()
        if path.parts[0] == "configs" and path.suffix == ".toml" and path.stem not in GONE
    }
    wrong += [f"config differs: {name}" for name in {**was, **now} if was.get(name) != now.get(name)]
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
    return rows


def _key(row: dict[str, Any]) -> str:
    """Everything of a row but the names it was given with the move."""
    kept = {key: value for key, value in row.items() if key not in ("experiment", "study")}
    if row.get("experiment") in ("rs-table3", "adadpigu-table3"):
        kept.pop("config_hash", None)
    return json.dumps(kept, sort_keys=True)


def _without_words(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in ("description", "about")}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
