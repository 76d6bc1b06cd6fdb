"""What keeps a run while it is trained: a folder, or nothing. Training writes through it and asks nothing else."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Protocol, final

from sparsedp._files import sync_directory, write_atomically
from sparsedp.errors import SparseDPError
from sparsedp.privacy.ledger import FileLedger, MemoryLedger, RunLedger
from sparsedp.privacy.plan import Plan
from sparsedp.runs.checkpoint import Checkpoint, checkpoint_bytes
from sparsedp.runs.documents import digest_of, metrics_bytes, plan_bytes, record_bytes
from sparsedp.runs.folder import CHECKPOINT, METRICS, RECORD, RunFolder, check_new
from sparsedp.runs.history import EpochReport
from sparsedp.runs.reader import Run, check_file
from sparsedp.runs.record import Record


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

    def keep_record(self, record: Record) -> None:
        """Keep what the run is, or how it ended."""
        ...

    def close(self) -> None:
        """Release the ledger."""
        ...


@final
@dataclass(frozen=True, slots=True)
class NoStore:
    """Keeps nothing but the charges, as long as the process lives; `path` is where another process keeps the rest."""

    ledger: RunLedger = field(default_factory=MemoryLedger)
    path: Path | None = None
    seconds: float = 0.0

    def save(self, checkpoint: Checkpoint) -> None:
        """Nothing to keep it in."""

    def keep_epochs(self, epochs: Sequence[EpochReport]) -> None:
        """Nothing to keep them in."""

    def keep_record(self, record: Record) -> None:
        """Nothing to keep it in."""

    def close(self) -> None:
        """Nothing to release."""


@final
@dataclass(frozen=True, slots=True)
class FolderStore:
    """Keeps a run in its folder, whose ledger is locked: nobody else goes on with it.

    Before a file is written the ledger holds its digest, and before the next line of the ledger the file is on disk:
    so what a file says is part of the chain at every moment.
    """

    folder: RunFolder
    ledger: FileLedger
    seconds: float = 0.0

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.folder.path

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint that knows its place in the ledger."""
        self._write({CHECKPOINT: self._with_place(checkpoint)})

    def keep_epochs(self, epochs: Sequence[EpochReport]) -> None:
        """Write the epochs."""
        self._write({METRICS: metrics_bytes(epochs)})

    def keep_record(self, record: Record) -> None:
        """Write the record."""
        self._write({RECORD: record_bytes(record)})

    def close(self) -> None:
        """Release the ledger file."""
        self.ledger.close()

    def _begin(self, plan: Plan, start: Checkpoint, record: Record) -> None:
        write_atomically(self.folder.plan_file, plan_bytes(plan))
        first = {CHECKPOINT: self._with_place(start), METRICS: b"", RECORD: record_bytes(record)}
        self._write(first)

    def _with_place(self, checkpoint: Checkpoint) -> bytes:
        place = {"head": self.ledger.head, "length": self.ledger.length}
        return checkpoint_bytes(replace(checkpoint, state={**checkpoint.state, "ledger": place}))

    def _write(self, files: Mapping[str, bytes]) -> None:
        before = {name: self.ledger.record.known(name) for name in files}
        self.ledger.note_files({name: digest_of(name, content) for name, content in files.items()})
        try:
            for name, content in files.items():
                write_atomically(self.path / name, content)
        except OSError:
            with suppress(OSError):  # without room for a line the file before the last one still counts
                self.note_again(before)
            raise
        sync_directory(self.path)

    def note_again(self, known: Mapping[str, Sequence[str]]) -> None:
        """Let the chain's last word on each of these files be the one that is there, if it is one of those known."""
        there = {name: self.path / name for name in known}
        found = {name: digest_of(name, file.read_bytes()) for name, file in there.items() if file.exists()}
        stale = {
            name: digest
            for name, digest in found.items()
            if digest in known[name] and digest != self.ledger.record.known(name)[-1]
        }
        if stale:
            self.ledger.note_files(stale)


class ExistingRun(NamedTuple):
    """A run to go on with, and the state it is at."""

    store: RunStore
    checkpoint: Checkpoint

    @property
    def public_seed(self) -> int:
        """What its public draws are made from."""
        return int(self.checkpoint.identity["public_seed"])


def find_run(out: Path | str | None, resume: bool, plan: Plan, *, replay: bool) -> ExistingRun | None:
    """The run to resume; None for a new one, after checking that there is room for it.

    Raises:
        PrivacyError: its ledger is in use, does not verify, or knows another checkpoint than the one that is there.
    """
    if not resume:
        if out is not None:
            check_new(out)
        return None
    if out is None:
        raise SparseDPError("resume: got no out, expected the folder of the run to go on with")
    run = Run.open(out)
    ledger = FileLedger.resume(run.folder.ledger_file, plan, replay=replay)
    try:
        checkpoint, record = run.checkpoint, run.record
        ledger.expect(checkpoint.state["ledger"]["head"], checkpoint.state["ledger"]["length"])
        check_file(ledger.record, run.folder.checkpoint_file)
        store = FolderStore(run.folder, ledger, record["timing"]["seconds"])
        known = ledger.record.known(CHECKPOINT)
        if len(known) > 1:
            store.note_again({CHECKPOINT: known})
    except BaseException:
        ledger.close()
        raise
    return ExistingRun(store, checkpoint)


@contextmanager
def given_up_on_failure(found: ExistingRun | None) -> Iterator[None]:
    """Release a run that was found if what is made of it fails: whoever corrects the mistake can have it again."""
    try:
        yield
    except BaseException:
        if found is not None:
            found.store.close()
        raise


def new_store(
    out: Path | str | None, plan: Plan, start: Callable[[], Checkpoint], record: Record, *, replay: bool
) -> RunStore:
    """Where a new run is kept: a folder made for it, whole or not at all; nothing if none is named.

    Raises:
        SparseDPError: there is something there already, or it cannot be written.
    """
    if out is None:
        return NoStore()
    final = check_new(out)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        draft = RunFolder(Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent)))
    except OSError as error:
        raise SparseDPError(f"out: cannot write a run to {final} ({error}); give another folder") from error
    try:
        with FileLedger.create(draft.ledger_file, plan) as ledger:
            FolderStore(draft, ledger)._begin(plan, start(), record)
        draft.path.chmod(0o755)
        os.rename(draft.path, final)
    except BaseException:
        shutil.rmtree(draft.path, ignore_errors=True)
        raise
    sync_directory(final.parent)
    folder = RunFolder(final)
    return FolderStore(folder, FileLedger.resume(folder.ledger_file, plan, replay=replay))
