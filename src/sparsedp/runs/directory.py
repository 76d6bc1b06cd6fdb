"""The run directory: names of its files, creation, resuming, and writes that the ledger's chain binds. All public."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar, final

from sparsedp import distributed
from sparsedp._files import parse_json, readable_json, sync_directory, write_atomically
from sparsedp._serialization import sha256
from sparsedp.errors import DataError, PrivacyError, SparseDPError
from sparsedp.privacy.ledger import Ledger, LedgerState
from sparsedp.privacy.plan import Plan
from sparsedp.runs.checkpoint import Checkpoint, checkpoint_bytes, read_checkpoint
from sparsedp.runs.record import EpochMetrics, RunRecord, metrics_bytes, plan_bytes, read_record

T = TypeVar("T")

PLAN = "plan.json"
"""The plan, canonical JSON; never changes."""
LEDGER = "ledger.jsonl"
"""What was spent, written before it is spent."""
CHECKPOINT = "checkpoint.safetensors"
"""The newest full state to resume from."""
METRICS = "metrics.jsonl"
"""One line per epoch."""
RECORD = "record.json"
"""What the run was and how it ended."""
REPORT = "report.html"


def holds_run(path: Path) -> bool:
    """Whether a directory is that of a run."""
    return (path / PLAN).is_file() or (path / LEDGER).is_file()


def check_new(path: Path | str) -> Path:
    """Return a path where a new run may be made."""
    final = Path(path)
    if final.is_dir() and not any(final.iterdir()):
        return final
    if final.exists() or final.is_symlink():
        what = "a run" if (final / PLAN).exists() else "something"
        raise SparseDPError(
            f"run_dir: there is {what} at {final} already, and runs are never overwritten; give another folder, "
            "or resume that run"
        )
    return final


def digest_of(name: str, content: bytes) -> str:
    """Compute the SHA-256 by which the ledger knows a file; of the record without its timing.

    Formal guarantees: How long a run took may depend on the data, so nothing public, no hash either, is made from it.
    """
    if name == RECORD:
        content = readable_json({**parse_json(content, name), "timing": None})
    return sha256(content)


def check_file(ledger: LedgerState, file: Path) -> None:
    """Check that a file is the one the ledger's chain knows."""
    if file.exists() and digest_of(file.name, file.read_bytes()) not in ledger.expected_digests(file.name):
        raise PrivacyError(
            f"{file.name} is not the one the ledger knows: it was changed after the run wrote it, or lines were "
            "removed from the ledger; restore them"
        )


@final
@dataclass(frozen=True, slots=True)
class RunDirectory:
    """A run's directory, open for writing: its ledger is locked, so no other process continues the run.

    A run that is not kept has none, and among several ranks the main process alone writes: there `path` is None or
    the main process's, the ledger is in memory, and nothing is written.

    The digest of a file is in the ledger before the file is written, and the file is on disk before the ledger's
    next line: what a file says is part of the chain at every moment.

    Attributes:
        path: the directory; None for a run that is not kept.
        ledger: its ledger.
        seconds: how long the run took before it was opened here.
    """

    path: Path | None
    ledger: Ledger
    seconds: float = 0.0

    @classmethod
    def create(
        cls, path: Path | str, plan: Plan, start: Callable[[], Checkpoint], record: RunRecord, *, replay: bool
    ) -> RunDirectory:
        """Make the directory of a new run with its first checkpoint and record: whole, or not at all."""
        final = check_new(path)
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            draft = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
        except OSError as error:
            raise SparseDPError(
                f"run_dir: cannot write a run to {final} ({error}); give another folder"
            ) from error
        try:
            with Ledger(plan, draft / LEDGER) as ledger:
                first = cls(draft, ledger)
                write_atomically(draft / PLAN, plan_bytes(plan))
                state = first._with_place(start())
                first._write({CHECKPOINT: state, METRICS: b"", RECORD: readable_json(record)})
            draft.chmod(0o755)
            os.rename(draft, final)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        sync_directory(final.parent)
        return cls(final, Ledger.resume(final / LEDGER, plan, replay=replay))

    def write_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint that knows its place in the ledger."""
        if self._writes:
            self._write({CHECKPOINT: self._with_place(checkpoint)})

    def write_metrics(self, epochs: Sequence[EpochMetrics]) -> None:
        """Write the metrics of all epochs so far."""
        if self._writes:
            self._write({METRICS: metrics_bytes(epochs)})

    def write_record(self, record: RunRecord) -> None:
        """Write the record."""
        if self._writes:
            self._write({RECORD: readable_json(record)})

    def close(self) -> None:
        """Release the ledger file."""
        self.ledger.close()

    @property
    def _writes(self) -> bool:
        return self.path is not None and distributed.is_main_process()

    def _with_place(self, checkpoint: Checkpoint) -> bytes:
        place = dict(zip(("head", "length"), self.ledger.place, strict=True))
        return checkpoint_bytes(replace(checkpoint, state={**checkpoint.state, "ledger": place}))

    def _write(self, files: Mapping[str, bytes]) -> None:
        assert self.path is not None
        before = {name: self.ledger.state.expected_digests(name) for name in files}
        self.ledger.record_digests({name: digest_of(name, content) for name, content in files.items()})
        try:
            for name, content in files.items():
                write_atomically(self.path / name, content)
        except OSError:
            with suppress(OSError):  # without room for a line the file before the last one still counts
                _repair_digests(self.path, self.ledger, before)
            raise
        sync_directory(self.path)


def _repair_digests(path: Path, ledger: Ledger, known: Mapping[str, Sequence[str]]) -> None:
    """Append the digest of a known file on disk that is older than the chain says, as a failed write leaves it."""
    found = {name: digest_of(name, (path / name).read_bytes()) for name in known if (path / name).exists()}
    newest = {name: ledger.state.expected_digests(name)[-1] for name in found}
    stale = {name: one for name, one in found.items() if one in known[name] and one != newest[name]}
    if stale:
        ledger.record_digests(stale)


class SavedRun(NamedTuple):
    """A run to resume, and the state it is at."""

    directory: RunDirectory
    checkpoint: Checkpoint


def _resumed(path: Path, plan: Plan, replay: bool) -> tuple[RunDirectory, Checkpoint]:
    """Open a run to continue it: verify and lock its ledger, and read its checkpoint."""
    if not (path / PLAN).is_file():
        raise DataError(f"{path} holds no run (no {PLAN}); to start one there, drop resume")
    ledger = Ledger.resume(path / LEDGER, plan, replay=replay)
    try:
        checkpoint, record = read_checkpoint(path / CHECKPOINT), read_record(path / RECORD)
        place = checkpoint.state["ledger"]
        ledger.state.check_extends(place["head"], place["length"])
        check_file(ledger.state, path / CHECKPOINT)
        known = ledger.state.expected_digests(CHECKPOINT)
        if len(known) > 1:
            _repair_digests(path, ledger, {CHECKPOINT: known})
    except BaseException:
        ledger.close()
        raise
    return RunDirectory(path, ledger, record["timing"]["seconds"]), checkpoint


def resumes(out: Path | str | None, resume: bool) -> bool:
    """Whether the run at `out` is resumed: if that was asked for, or if `torchrun` has started this launch again.

    Another launch's run is not taken up, however often the launcher tries.
    """
    return distributed.broadcast_from_main(
        lambda: (
            resume or (out is not None and distributed.begun_by_this_launch(Path(out), holds_run(Path(out))))
        )
    )


def find_run(out: Path | str | None, resume: bool, plan: Plan, *, replay: bool) -> SavedRun | None:
    """Open the run to resume, on the main process; None for a new one, after checking that there is room for it."""

    def find() -> tuple[RunDirectory, Checkpoint] | None:
        if resume and out is None:
            raise SparseDPError("resume: got no out, expected the folder of the run to go on with")
        if resume and out is not None:
            return _resumed(Path(out), plan, replay)
        _ = out is not None and check_new(out)
        return None

    found = _opened_by_main(find, plan, replay)
    return None if found is None else SavedRun(*found)


def new_run(
    out: Path | str | None, plan: Plan, start: Callable[[], Checkpoint], record: RunRecord, *, replay: bool
) -> RunDirectory:
    """Make the directory of a new run, on the main process; without `out` the run is not kept."""
    if out is None:
        return RunDirectory(None, Ledger(plan, replay=replay))

    def make() -> tuple[RunDirectory, None]:
        with distributed.begins_run(Path(out)):
            return RunDirectory.create(out, plan, start, record, replay=replay), None

    made = _opened_by_main(make, plan, replay)
    assert made is not None
    return made[0]


def _opened_by_main(
    make: Callable[[], tuple[RunDirectory, T] | None], plan: Plan, replay: bool
) -> tuple[RunDirectory, T] | None:
    """The directory that the main process opens, and what goes with it; other ranks have its ledger in memory."""
    opened: list[tuple[RunDirectory, T] | None] = []

    def told() -> tuple[Path | None, LedgerState, float, T] | None:
        opened.append(found := make())
        return found and (found[0].path, found[0].ledger.state, found[0].seconds, found[1])

    copied = distributed.broadcast_from_main(told)
    if opened or copied is None:
        return opened[0] if opened else None
    path, state, seconds, more = copied
    return RunDirectory(path, Ledger(plan, state=state, replay=replay), seconds), more


@contextmanager
def closed_on_error(found: SavedRun | None) -> Iterator[None]:
    """Close a run that was opened if the block raises, so that it can be opened again."""
    try:
        yield
    except BaseException:
        if found is not None:
            found.directory.close()
        raise
