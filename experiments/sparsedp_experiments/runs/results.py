"""Records of experiments and their statistics.

A record is one line of JSON for each run, with final metrics and all it takes to run it again. A file holds the
records of a family of experiments. One process at a time appends a line; a line that a kill tore off is no record. A
record is found by its experiment and the hash of its settings.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, final

from scipy.special import stdtrit

from sparsedp.errors import DataError, SparseDPError
from sparsedp_experiments.runs.grid import Contrast, GridRun

FORMAT = 1

Record = Mapping[str, Any]

_FROM_RUN = (
    "dataset", "model", "method", "variant", "seed", "publishable", "private", "target_epsilon", "epsilon",
    "epsilon_spent", "delta", "accountant", "unit", "units", "d", "k", "active_ratio", "batch_size", "epochs",
    "steps", "steps_charged", "test_accuracy", "metrics", "plan", "versions",
)  # fmt: skip
"""What is taken over from a run's own record."""


def read_rows(path: Path) -> tuple[Record, ...]:
    """The rows of a file, in its order; none if there is no file. A torn last line is left out."""
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


def append_row(path: Path, row: Record) -> None:
    """Add a row, on disk when this returns. What a kill left of a last line is removed first."""
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


def measured(path: Path, key: Record, measure: Callable[[], Record]) -> Record:
    """The row of a file that has these values, measured and added now if there is none."""
    for row in read_rows(path):
        if all(row.get(name) == value for name, value in key.items()):
            return row
    found = {**key, **measure()}
    append_row(path, found)
    return found


def make_file(path: Path) -> None:
    """Make an empty file where there is none, before hours of work are done for it."""
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

    def row(self, digest: str) -> Record:
        """The record with this hash of its settings."""
        return self._rows()[digest]

    def stale(self, runs: Iterable[GridRun]) -> tuple[str, ...]:
        """Hashes of its records that belong to none of these runs: of another config, or of an older one."""
        known = {run.settings.digest for run in runs}
        return tuple(digest for digest in self._rows() if digest not in known)

    def _rows(self) -> Mapping[str, Record]:
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return {}
        return _by_experiment(self.path, status.st_mtime_ns, status.st_size).get(self.experiment, {})


@lru_cache(maxsize=32)
def _by_experiment(path: Path, _changed: int, _size: int) -> Mapping[str, Mapping[str, Record]]:
    """Rows by experiment and hash; the first one counts."""
    found: dict[str, dict[str, Record]] = {}
    for row in read_rows(path):
        if "experiment" in row and "config_hash" in row:
            found.setdefault(row["experiment"], {}).setdefault(row["config_hash"], row)
    return found


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
        **{name: finished.get(name, True) if name == "private" else finished[name] for name in _FROM_RUN},
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


CONFIDENCE = 0.95
LESS_IS_BETTER = ("loss",)
"""Metrics of which a smaller value is better."""


@final
@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds."""

    count: int  # how many values
    mean: float  # their mean
    std: float | None  # their standard deviation (n - 1); None for a single value
    low: float | None  # lower end of the interval of the mean (Student's t); None for a single value
    high: float | None  # upper end

    def text(self) -> str:
        """With a sign, as a difference, and its interval where there is one."""
        inside = "" if self.low is None or self.high is None else f" ({self.low:+.4f} to {self.high:+.4f})"
        return f"{self.mean:+.4f}{inside}"


def estimate(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Mean, standard deviation and interval of some values, 95 % unless told otherwise.

    >>> found = estimate([1.0, 2.0, 3.0])
    >>> found.mean, found.std, round(found.high, 3)
    (2.0, 1.0, 4.484)
    """
    n = len(values)
    if n == 0:
        raise SparseDPError("estimate: got no values, expected at least one")
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(1, mean, None, None, None)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    half = half_width(std, n, confidence)
    return Estimate(n, mean, std, mean - half, mean + half)


def half_width(std: float, count: int, confidence: float = CONFIDENCE) -> float:
    """How far Student's interval of a mean reaches to each side, from the standard deviation of so many values."""
    return float(stdtrit(count - 1, (1 + confidence) / 2)) * std / math.sqrt(count)


def paired_difference(values: Mapping[int, float], baseline: Mapping[int, float]) -> Estimate | None:
    """The mean of value less baseline over the seeds both have; None if they share none.

    Runs of one seed share batches and noise stream, so their difference varies less than they do.
    """
    common = sorted(values.keys() & baseline.keys())
    return estimate([values[seed] - baseline[seed] for seed in common]) if common else None


@dataclass(frozen=True, slots=True)
class Row:
    """One cell."""

    cell: Mapping[str, str]  # the label of every axis
    seeds: tuple[int, ...]  # those with a result
    score: Estimate  # the metric over seeds
    difference: (
        Estimate | None
    )  # to the baseline at equal seeds; None for the baseline itself, and without one
    epsilon: float | None  # the largest spent by any of its runs; None if not private


def sign_of(metric: str) -> int:
    """1 where more of a metric is better, -1 where less is."""
    return -1 if metric in LESS_IS_BETTER else 1


def make_rows(records: Iterable[Record], metric: str, contrast: Contrast) -> tuple[Row, ...]:
    """The rows of some records, in the order their cells first appear; cells without the metric are left out."""
    cells: dict[tuple[tuple[str, str], ...], list[Record]] = {}
    for record in records:
        if record["metrics"].get(metric) is not None:
            cells.setdefault(tuple(record["cell"].items()), []).append(record)
    return tuple(_row(key, cells, metric, contrast) for key in cells)


def _row(
    key: tuple[tuple[str, str], ...],
    cells: Mapping[tuple[tuple[str, str], ...], Sequence[Record]],
    metric: str,
    contrast: Contrast,
) -> Row:
    records = cells[key]
    scores = _by_seed(records, metric)
    rival = tuple((axis, contrast.baseline if axis == contrast.axis else label) for axis, label in key)
    against = cells.get(rival, ()) if rival != key else ()
    spent = [record["epsilon_spent"] for record in records]
    return Row(
        cell=dict(key),
        seeds=tuple(sorted(scores)),
        score=estimate([scores[seed] for seed in sorted(scores)]),
        difference=paired_difference(scores, _by_seed(against, metric)),
        epsilon=None if None in spent else max(spent),
    )


def _by_seed(records: Iterable[Record], metric: str) -> dict[int, float]:
    return {record["seed"]: record["metrics"][metric] for record in records}
