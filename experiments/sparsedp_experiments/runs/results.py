"""Records of experiments: one line of JSON for each run, with final metrics and all it takes to run it again.

A file holds the records of a family of experiments. One process at a time appends a line; a line that a kill tore off
is no record. A record is found by its experiment and the hash of its settings.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sparsedp.errors import DataError, SparseDPError
from sparsedp_experiments.runs.grid import GridRun

FORMAT = 1

Row = Mapping[str, Any]

_FROM_RUN = (
    "dataset", "model", "method", "variant", "seed", "publishable", "private", "target_epsilon", "epsilon",
    "epsilon_spent", "delta", "accountant", "unit", "units", "d", "k", "active_ratio", "batch_size", "epochs",
    "steps", "steps_charged", "test_accuracy", "metrics", "plan", "versions",
)  # fmt: skip
"""What is taken over from a run's own record."""


def read_rows(path: Path) -> tuple[Row, ...]:
    """The rows of a file, in its order; none if there is no file. A torn last line is left out.

    Raises:
        DataError: a line before the last one is damaged.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return ()
    rows = []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(
                f"{path}, line {number}: not JSON ({error}); restore the file, or delete the line to run it again"
            ) from error
        rows.append(row)
    return tuple(rows)


def append_row(path: Path, row: Row) -> None:
    """Add a row, on disk when this returns. What a kill left of a last line is removed first.

    Raises:
        SparseDPError: the file cannot be written.
    """
    line = json.dumps(row, allow_nan=False, ensure_ascii=False, separators=(", ", ": ")).encode() + b"\n"
    make_file(path)
    with open(path, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
        file.seek(0, os.SEEK_END)
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def make_file(path: Path) -> None:
    """Make an empty file where there is none, before hours of work are done for it.

    Raises:
        SparseDPError: it cannot be made or written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        raise SparseDPError(f"cannot write to {path} ({error}); give another file") from error


@dataclass(frozen=True, slots=True)
class Results:
    """The records of one experiment, in a file that may hold those of others too."""

    path: Path
    experiment: str

    def find(self, run: GridRun) -> dict[str, Any] | None:
        """A run's record, if there is one of these settings."""
        row = self._rows().get(run.settings.digest)
        return None if row is None else dict(row)

    def row(self, digest: str) -> Row:
        """The record with this hash of its settings."""
        return self._rows()[digest]

    def keep(self, record: Row) -> None:
        """Append a run's record."""
        append_row(self.path, record)

    def stale(self, runs: Iterable[GridRun]) -> tuple[str, ...]:
        """Hashes of its records that belong to none of these runs: of another config, or of an older one."""
        known = {run.settings.digest for run in runs}
        return tuple(digest for digest in self._rows() if digest not in known)

    def _rows(self) -> Mapping[str, Row]:
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return {}
        return _by_experiment(self.path, status.st_mtime_ns, status.st_size).get(self.experiment, {})


@lru_cache(maxsize=32)
def _by_experiment(path: Path, _changed: int, _size: int) -> Mapping[str, Mapping[str, Row]]:
    """Rows by experiment and hash; the first one counts."""
    found: dict[str, dict[str, Row]] = {}
    for row in read_rows(path):
        if "experiment" in row and "config_hash" in row:
            found.setdefault(row["experiment"], {}).setdefault(row["config_hash"], row)
    return MappingProxyType(found)


def make_record(
    experiment: str, run: GridRun, finished: Mapping[str, Any], noise: Mapping[str, Any]
) -> dict[str, Any]:
    """The record of a finished run, from the run's own."""
    schema = finished["schema"]
    return {
        "format": FORMAT,
        "experiment": experiment,
        "config_hash": run.settings.digest,
        "cell": dict(run.cell),
        **{name: finished[name] for name in _FROM_RUN},
        "data_variant": schema["data_variant"],
        "evaluated_on": schema["evaluated_on"],
        "notes": schema["notes"],
        "noise": dict(noise),
        "settings": run.settings.to_json(),
        "commit": commit(),
        "seconds": finished["timing"]["seconds"],
    }


@cache
def commit() -> str | None:
    """The commit of this repository, with a + if its code was changed since; None if this is no checkout of it.

    A copy installed into an environment that lies inside another repository has no commit: that one's is not ours.
    """
    here = Path(__file__).resolve()
    top = _git(here.parent, "rev-parse", "--show-toplevel")
    if top is None or _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None
    head = _git(Path(top), "rev-parse", "HEAD")
    if head is None:
        return None
    return head + ("+" if _git(Path(top), "status", "--porcelain", "--", "*.py") else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
