"""The run directory: its files and their names. Everything in it is public."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from sparsedp.core.errors import DataError, SparseDPError
from sparsedp.core.files import Json, read_json, write_atomically, write_json
from sparsedp.privacy.durable import sync_directory
from sparsedp.privacy.ledger import FileLedger
from sparsedp.privacy.plan import Plan
from sparsedp.runs.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from sparsedp.runs.history import EpochReport


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where a run keeps its plan, ledger, checkpoint, metrics and record."""

    path: Path

    @property
    def plan_file(self) -> Path:
        """The plan, canonical JSON; never changes."""
        return self.path / "plan.json"

    @property
    def ledger_file(self) -> Path:
        """What was spent, written before it is spent."""
        return self.path / "ledger.jsonl"

    @property
    def checkpoint_file(self) -> Path:
        """The newest state to resume from."""
        return self.path / "checkpoint.safetensors"

    @property
    def metrics_file(self) -> Path:
        """One line per epoch."""
        return self.path / "metrics.jsonl"

    @property
    def record_file(self) -> Path:
        """What the run was and how it ended."""
        return self.path / "record.json"

    @classmethod
    def create(cls, path: Path | str, plan: Plan, start: Checkpoint, record: Json) -> RunFolder:
        """Make the folder of a new run, with an empty ledger, whole or not at all.

        Raises:
            SparseDPError: there is something there already, or it cannot be written.
        """
        final = check_new(path)
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            draft = cls(Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent)))
        except OSError as error:
            raise SparseDPError(
                f"out: cannot write a run to {final} ({error}); give another folder"
            ) from error
        try:
            write_atomically(draft.plan_file, (plan.to_json() + "\n").encode())
            with FileLedger.create(draft.ledger_file, plan) as ledger:
                state = {**start.state, "ledger": {"head": ledger.head, "length": ledger.length}}
            write_checkpoint(draft.checkpoint_file, replace(start, state=state))
            write_atomically(draft.metrics_file, b"")
            write_json(draft.record_file, record)
            draft.path.chmod(0o755)
            os.rename(draft.path, final)
        except BaseException:
            shutil.rmtree(draft.path, ignore_errors=True)
            raise
        sync_directory(final.parent)
        return cls(final)

    @classmethod
    def open(cls, path: Path | str) -> RunFolder:
        """The folder of an existing run.

        Raises:
            DataError: there is no run.
        """
        folder = cls(Path(path))
        if not folder.plan_file.is_file():
            raise DataError(f"{folder.path} holds no run (no plan.json); to start one there, drop resume")
        return folder

    def plan(self) -> Plan:
        """The run's plan."""
        return Plan.from_json(self.plan_file.read_text())

    def checkpoint(self) -> Checkpoint:
        """The newest checkpoint."""
        return read_checkpoint(self.checkpoint_file)

    def record(self) -> Json:
        """The run's record."""
        return read_json(self.record_file)

    def metrics(self) -> tuple[EpochReport, ...]:
        """The epochs so far."""
        lines = self.metrics_file.read_text().splitlines()
        try:
            return tuple(EpochReport.from_json(json.loads(line)) for line in lines)
        except (json.JSONDecodeError, TypeError) as error:
            raise DataError(f"{self.metrics_file} is damaged ({error})") from error

    def write_metrics(self, reports: Iterable[EpochReport]) -> None:
        """Write all epochs so far."""
        write_atomically(self.metrics_file, "".join(map(_line, reports)).encode())


def check_new(path: Path | str) -> Path:
    """A path where a new run may be made.

    Raises:
        SparseDPError: something is there; runs are never overwritten.
    """
    final = Path(path)
    if final.is_dir() and not any(final.iterdir()):
        return final
    if final.exists() or final.is_symlink():
        what = "a run" if (final / "plan.json").exists() else "something"
        raise SparseDPError(
            f"out: there is {what} at {final} already, and runs are never overwritten; give another folder, "
            "or resume that run"
        )
    return final


def _line(report: EpochReport) -> str:
    return json.dumps(report.to_json(), allow_nan=False) + "\n"
