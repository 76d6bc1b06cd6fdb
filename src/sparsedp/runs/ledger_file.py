"""The ledger of a run on disk: append-only, hash-chained, one writer."""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, final

from sparsedp.errors import PrivacyError
from sparsedp.privacy.events import Spend
from sparsedp.privacy.ledger import Charge
from sparsedp.privacy.plan import Plan
from sparsedp.runs import durable
from sparsedp.runs.ledger_lines import (
    block_line,
    closing_line,
    files_line,
    opening,
    parse,
    seal,
    torn_line,
)
from sparsedp.runs.verified_ledger import VerifiedLedger


@final
class FileLedger:
    """An append-only, hash-chained ledger file for one plan. POSIX only (it locks the file).

    A charge returns when it is on disk. To keep that cheap, a step that is not covered yet opens a block of up to 1 %
    of the plan's steps in its phase, and the steps of an open block write nothing.

    **Privacy.** Charges and nothing else, so it holds nothing private. It pays for the plan it was made for, step by
    step and once: another rate or noise, a step beyond the plan, a second release of a step all raise, which keeps
    the release from happening. A kill loses the steps since the last checkpoint and the open block; they stay
    charged.
    **Edge cases.** With `replay` (a seeded run, whose repeated step releases the same numbers) a charged step may be
    run again for free. A forked child gets a closed ledger; one file has one writer.
    """

    __slots__ = (
        "__weakref__",
        "_close",
        "_file",
        "_next",
        "_path",
        "_plan",
        "_record",
        "_replay",
        "_terminated",
    )

    def __init__(self, path: Path, file: int, record: VerifiedLedger, plan: Plan, replay: bool) -> None:
        """Use `create` or `resume`."""
        self._path, self._file, self._plan, self._replay = path, file, plan, replay
        self._record = record
        self._next = record.charged
        self._terminated = True
        self._close: Callable[[], object] = weakref.finalize(self, os.close, file)
        _OPEN.add(self)

    @classmethod
    def create(cls, path: str | Path, plan: Plan, *, replay: bool = False) -> FileLedger:
        """Start a plan's ledger: the file appears whole, locked and on disk, or not at all.

        Raises:
            PrivacyError: there is a file already.
        """
        path = Path(path)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        line, _ = seal(opening(plan, datetime.now(UTC).isoformat(timespec="seconds")), "")
        file = os.open(draft, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            durable.lock(file, path)
            durable.write(file, line.encode() + b"\n")
            durable.publish(draft, path)
        except (OSError, PrivacyError):
            os.close(file)
            raise
        finally:
            draft.unlink(missing_ok=True)
        durable.sync_directory(path.parent)
        return cls(path, file, parse(line.encode() + b"\n", path.name), plan, replay)

    @classmethod
    def resume(cls, path: str | Path, plan: Plan, *, replay: bool = False) -> FileLedger:
        """Open the ledger of a run to go on with it, after verifying it.

        A torn end is accounted for in a line of its own.

        Raises:
            PrivacyError: no ledger, another plan's, one that does not verify, one in use, or a closed one.
        """
        ledger = cls.lock(path, plan, replay=replay)
        if ledger.record.closings:
            ledger.close()
            raise PrivacyError(
                f"{path} was closed: what its run had left was given to the plan "
                f"{ledger.record.closings[0].successor.fingerprint}, so the run cannot be resumed. "
                "Start a run with that plan, or make another one with sparsedp.runs.continuing.continue_runs"
            )
        return ledger

    @classmethod
    def lock(cls, path: str | Path, plan: Plan, *, replay: bool = False) -> Self:
        """Open a plan's ledger, closed or not, for writing.

        Raises:
            PrivacyError: no ledger, another plan's, one that does not verify, or one in use.
        """
        path = Path(path)
        try:
            file = os.open(path, os.O_RDWR | os.O_APPEND)
        except FileNotFoundError as error:
            raise PrivacyError(
                f"no ledger at {path}: what was spent is unknown, so the run cannot go on"
            ) from error
        try:
            durable.lock(file, path)
            data = path.read_bytes()
            record = parse(data, path.name)
            if record.plan != plan.fingerprint:
                raise PrivacyError(f"{path} belongs to another plan; resume with the plan it was created for")
        except (OSError, PrivacyError):
            os.close(file)
            raise
        ledger = cls(path, file, record, plan, replay)
        ledger._terminated = data.endswith(b"\n")
        ledger._repair()
        return ledger

    @staticmethod
    def read(path: str | Path) -> VerifiedLedger:
        """Verify a ledger and say what it holds, without its plan and without locking or changing it.

        Raises:
            PrivacyError: the first line that does not verify, by number, and why.
        """
        path = Path(path)
        try:
            return parse(path.read_bytes(), path.name)
        except FileNotFoundError as error:
            raise PrivacyError(f"no ledger at {path}") from error

    def charge(self, charge: Charge) -> None:
        """Pay for one release: on return its block is on disk.

        Raises:
            PrivacyError: the charge is not the plan's, was made before, skips steps, or could not be written.
        """
        self._check_open()
        phase = self._plan.phase_at(charge.step)
        planned = Charge(phase.name, charge.step, phase.sampling_rate, phase.noise_multiplier)
        if charge != planned:
            raise PrivacyError(
                f"got {charge}, but the plan has {planned}; the mechanism must take all from the plan"
            )
        if self._record.closings:
            raise PrivacyError(f"{self._path} was closed; nothing more can be charged to it")
        covered = self._record.charged
        if charge.step > covered:
            raise PrivacyError(
                f"step {charge.step} would leave the steps from {covered} on unpaid; run them in order"
            )
        if charge.step < self._next:
            if self._replay:
                return
            raise PrivacyError(
                f"step {charge.step} was charged before; releasing it again would cost again. Go on at {self._next}"
            )
        if charge.step == covered:
            block = self._record.next_block()
            self._record = self._record.extended(block, self._append(block_line(block)))
        self._next = charge.step + 1

    def retire(self, successor: Plan) -> None:
        """Write a line after which nothing is charged, and which holds the plan that gets what is left."""
        self._check_open()
        self._record = self._record.closed(successor, self._append(closing_line(successor)))

    def note_files(self, sha256: Mapping[str, str]) -> None:
        """Write down the digests of files that are about to be written: from then on they belong to the chain."""
        self._check_open()
        self._record = self._record.noting(sha256, self._append(files_line(sha256)))

    @property
    def record(self) -> VerifiedLedger:
        """What the file holds now."""
        return self._record

    @property
    def head(self) -> str:
        """Hash of the last line, for checkpoint and record."""
        return self._record.head

    @property
    def length(self) -> int:
        """Number of lines, for checkpoint and record."""
        return self._record.length

    @property
    def charged(self) -> int:
        """Steps paid for; the open block counts whole."""
        return self._record.charged

    @property
    def next_step(self) -> int:
        """The first step that can still be released. After `resume`: past the block that was in flight, now lost."""
        return self._next

    def spends(self) -> tuple[Spend, ...]:
        """Everything charged, equal mechanisms added up."""
        return self._record.spends()

    def spent(self, delta: float | None = None, accountant: str = "pld") -> float:
        """Epsilon of everything charged; see `VerifiedLedger.spent`."""
        return self._record.spent(delta, accountant)

    def expect(self, head: str, length: int) -> None:
        """Check that the ledger goes on from a checkpoint's head and length."""
        self._record.expect(head, length)

    def close(self) -> None:
        """Release the file and its lock; charging is over."""
        _OPEN.discard(self)
        self._close()
        self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _repair(self) -> None:
        torn = self._record.torn
        if torn is not None:
            lost = torn.lost if self._terminated else torn.lost + b"\n"
            self._record = self._record.extended(torn.block, self._append(torn_line(torn.block, lost)))

    def _append(self, content: dict[str, Any]) -> str:
        line, digest = seal(content, self._record.head)
        try:
            durable.write(self._file, (b"" if self._terminated else b"\n") + line.encode() + b"\n")
        except OSError as error:
            self.close()
            raise PrivacyError(
                f"could not write {self._path} ({error}); nothing was released. Make room and resume"
            ) from error
        self._terminated = True
        return digest

    def _check_open(self) -> None:
        if self._file < 0:
            raise PrivacyError(
                f"the ledger {self._path} is closed (or was opened by a parent process); resume it"
            )


_OPEN: weakref.WeakSet[FileLedger] = weakref.WeakSet()


def _close_in_child() -> None:
    for ledger in list(_OPEN):
        ledger.close()


os.register_at_fork(after_in_child=_close_in_child)
