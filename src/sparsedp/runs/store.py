"""What keeps a run while it is trained: a folder, or nothing. Training writes through it and asks nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Protocol, final

from sparsedp.core.errors import SparseDPError
from sparsedp.core.files import Json, write_json
from sparsedp.privacy.ledger import FileLedger, MemoryLedger, RunLedger
from sparsedp.privacy.plan import Plan
from sparsedp.runs.checkpoint import Checkpoint, write_checkpoint
from sparsedp.runs.folder import RunFolder, check_new
from sparsedp.runs.history import EpochReport
from sparsedp.runs.identity import SETUP


class RunStore(Protocol):
    """Where a run is kept, with the ledger that it pays to."""

    @property
    def path(self) -> Path | None:
        """The run directory, if there is one."""
        ...

    @property
    def ledger(self) -> RunLedger:
        """What the run pays to."""
        ...

    @property
    def seconds(self) -> float:
        """How long the run took before it was opened here."""
        ...

    def save(self, checkpoint: Checkpoint) -> None:
        """Keep a state to resume from."""
        ...

    def keep_epochs(self, epochs: Sequence[EpochReport]) -> None:
        """Keep what all epochs so far showed."""
        ...

    def keep_record(self, record: Json) -> None:
        """Keep what the run is, or how it ended."""
        ...

    def close(self) -> None:
        """Release the ledger."""
        ...


@final
@dataclass(frozen=True, slots=True)
class NoStore:
    """Keeps nothing but the charges, as long as the process lives."""

    ledger: MemoryLedger = field(default_factory=MemoryLedger)
    path: None = None
    seconds: float = 0.0

    def save(self, checkpoint: Checkpoint) -> None:
        """Nothing to keep it in."""

    def keep_epochs(self, epochs: Sequence[EpochReport]) -> None:
        """Nothing to keep them in."""

    def keep_record(self, record: Json) -> None:
        """Nothing to keep it in."""

    def close(self) -> None:
        """Nothing to release."""


@final
@dataclass(frozen=True, slots=True)
class FolderStore:
    """Keeps a run in its folder, whose ledger is locked: nobody else goes on with it."""

    folder: RunFolder
    ledger: FileLedger
    seconds: float = 0.0

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.folder.path

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint that knows its place in the ledger."""
        place = {"head": self.ledger.head, "length": self.ledger.length}
        kept = replace(checkpoint, state={**checkpoint.state, "ledger": place})
        write_checkpoint(self.folder.checkpoint_file, kept)

    def keep_epochs(self, epochs: Sequence[EpochReport]) -> None:
        """Write the epochs; a resumed run takes up where its checkpoint is."""
        self.folder.write_metrics(epochs)

    def keep_record(self, record: Json) -> None:
        """Write the record."""
        write_json(self.folder.record_file, record)

    def close(self) -> None:
        """Release the ledger file."""
        self.ledger.close()


class ExistingRun(NamedTuple):
    """A run to go on with, and the state it is at."""

    store: FolderStore
    checkpoint: Checkpoint


def find_run(out: Path | str | None, resume: bool, plan: Plan, *, replay: bool) -> ExistingRun | None:
    """The run to resume; None for a new one, after checking that there is room for it.

    Raises:
        PrivacyError: its ledger is in use, does not verify, or is not the one its checkpoint knows.
    """
    if not resume:
        if out is not None:
            check_new(out)
        return None
    if out is None:
        raise SparseDPError("resume: got no out, expected the folder of the run to go on with")
    folder = RunFolder.open(out)
    ledger = FileLedger.resume(folder.ledger_file, plan, replay=replay)
    checkpoint = folder.checkpoint()
    ledger.expect(checkpoint.state["ledger"]["head"], checkpoint.state["ledger"]["length"])
    record = folder.record()
    older = {name: record["settings"][name] for name in SETUP if name not in checkpoint.identity}
    checkpoint = replace(checkpoint, identity={**checkpoint.identity, **older})
    return ExistingRun(FolderStore(folder, ledger, record["timing"]["seconds"]), checkpoint)


def new_store(
    out: Path | str | None, plan: Plan, start: Checkpoint, record: Json, *, replay: bool
) -> RunStore:
    """Where a new run is kept: the folder made for it, or nothing if none is named."""
    if out is None:
        return NoStore()
    folder = RunFolder.create(out, plan, start, record)
    return FolderStore(folder, FileLedger.resume(folder.ledger_file, plan, replay=replay))
