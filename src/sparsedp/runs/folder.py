"""The run directory: the names of its files, and what makes room for a new one. Everything in it is public."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sparsedp.errors import DataError, SparseDPError

PLAN = "plan.json"
LEDGER = "ledger.jsonl"
CHECKPOINT = "checkpoint.safetensors"
METRICS = "metrics.jsonl"
RECORD = "record.json"
REPORT = "report.html"
NONPRIVATE = "nonprivate.json"
SNAPSHOTS = "snapshots"
TENSORBOARD = "tensorboard"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where a run keeps its plan, ledger, checkpoint, metrics and record."""

    path: Path

    @property
    def plan_file(self) -> Path:
        """The plan, canonical JSON; never changes."""
        return self.path / PLAN

    @property
    def ledger_file(self) -> Path:
        """What was spent, written before it is spent."""
        return self.path / LEDGER

    @property
    def checkpoint_file(self) -> Path:
        """The newest full state to resume from."""
        return self.path / CHECKPOINT

    @property
    def metrics_file(self) -> Path:
        """One line per epoch."""
        return self.path / METRICS

    @property
    def record_file(self) -> Path:
        """What the run was and how it ended."""
        return self.path / RECORD

    @property
    def report_file(self) -> Path:
        """The page for people."""
        return self.path / REPORT

    @property
    def nonprivate_file(self) -> Path:
        """Diagnostics that touched data without noise."""
        return self.path / NONPRIVATE

    @property
    def snapshots(self) -> Path:
        """Weights along the run."""
        return self.path / SNAPSHOTS

    @property
    def tensorboard(self) -> Path:
        """Scalars for TensorBoard."""
        return self.path / TENSORBOARD

    @property
    def exists(self) -> bool:
        """Whether there is a run."""
        return self.plan_file.is_file()


def holds_run(path: Path) -> bool:
    """Whether a folder is that of a run."""
    return (path / PLAN).is_file() or (path / LEDGER).is_file()


def find_runs(path: Path) -> list[Path]:
    """The folders of all runs at or below a folder, in order of their names; hidden folders are passed over.

    Raises:
        DataError: there is none.
    """
    found = sorted(
        file.parent
        for file in path.rglob(RECORD)
        if not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if not found:
        raise DataError(f"{path} holds no run (no {RECORD} at or below it); give the folder of a run")
    return found


def check_new(path: Path | str) -> Path:
    """A path where a new run may be made.

    Raises:
        SparseDPError: something is there; runs are never overwritten.
    """
    final = Path(path)
    if final.is_dir() and not any(final.iterdir()):
        return final
    if final.exists() or final.is_symlink():
        what = "a run" if (final / PLAN).exists() else "something"
        raise SparseDPError(
            f"out: there is {what} at {final} already, and runs are never overwritten; give another folder, "
            "or resume that run"
        )
    return final


def free_folder(parent: Path, name: str) -> Path:
    """A folder of that name, or with a number behind it, that does not exist yet."""
    candidates = [parent / name, *(parent / f"{name}-{number}" for number in range(2, 10_000))]
    return next(path for path in candidates if not path.exists())
