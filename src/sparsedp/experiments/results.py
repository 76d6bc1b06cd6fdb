"""Records of an experiment: one small JSON file per run, final metrics only, with all it takes to run it again."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import sparsedp
from sparsedp.core.errors import DataError, SparseDPError
from sparsedp.core.files import read_json, write_json
from sparsedp.experiments.grid import GridRun

FORMAT = 1

_FROM_RUN = (
    "dataset", "model", "method", "variant", "seed", "for_release", "private", "target_epsilon", "epsilon",
    "epsilon_spent", "delta", "accountant", "unit", "units", "d", "k", "active_ratio", "batch_size", "epochs",
    "steps", "steps_charged", "test_accuracy", "metrics", "plan", "versions",
)  # fmt: skip
"""What is taken over from a run's own record."""


@dataclass(frozen=True, slots=True)
class Results:
    """A folder of records."""

    path: Path

    def make(self) -> None:
        """Make the folder, before hours of work are done for it.

        Raises:
            SparseDPError: it cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SparseDPError(f"cannot write to {self.path} ({error}); give another folder") from error

    def file(self, run: GridRun) -> Path:
        """Where a run's record is."""
        return self.path / f"{run.name}.json"

    def find(self, run: GridRun) -> dict[str, Any] | None:
        """A run's record, if it is there and belongs to these settings.

        Raises:
            DataError: it is damaged.
        """
        file = self.file(run)
        if not file.exists():
            return None
        try:
            found = read_json(file)
        except DataError as error:
            raise DataError(f"{error}; delete it to run it again") from error
        same = isinstance(found, dict) and found.get("config_hash") == run.settings.digest
        return found if same else None

    def keep(self, run: GridRun, record: Mapping[str, Any]) -> None:
        """Write a run's record."""
        self.make()
        write_json(self.file(run), dict(record))

    def strangers(self, runs: Iterable[GridRun]) -> list[Path]:
        """Records in the folder that are of none of these runs: of another config, or of an older one."""
        known = {self.file(run) for run in runs}
        return sorted(file for file in self.path.glob("*.json") if file not in known)


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
    """The commit of the source in use, with a + if it was changed since; None outside a checkout."""
    source = Path(sparsedp.__file__).parent
    head = _git(source, "rev-parse", "HEAD")
    if head is None:
        return None
    return head + ("+" if _git(source, "status", "--porcelain", "--", str(source)) else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
