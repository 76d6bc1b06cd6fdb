"""The ledger: what has been spent, written down before it is spent."""

from __future__ import annotations

import json
import math
import os
import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol, final

from sparsedp import _validate as checks
from sparsedp._files import append_durably, lock_file, publish, sync_directory
from sparsedp._serialization import FrozenMap, canonical, sha256
from sparsedp.errors import PrivacyError
from sparsedp.privacy.accounting import accountant as accountant_named
from sparsedp.privacy.plan import Plan, SampledGaussian, merge_events


@dataclass(frozen=True, slots=True)
class Charge:
    """The privacy cost of one release: one step of a Poisson-subsampled Gaussian mechanism.

    `step` counts from 0 over the whole plan. A `sampling_rate` of 1 is a plain Gaussian release (feature statistics).
    A `noise_multiplier` of 0 means no protection: the release is not private. `release` tells apart several releases
    of one step, which share its charge (`SplitCharge`).
    """

    phase: str
    step: int
    sampling_rate: float
    noise_multiplier: float
    release: int = 0

    @property
    def key(self) -> tuple[int, ...]:
        """What a seeded run's noise is drawn by: no two releases have the same."""
        return (self.step, self.release) if self.release else (self.step,)


class Chargeable(Protocol):
    """Takes a charge before the release it pays for, or raises and so prevents the release."""

    def charge(self, charge: Charge) -> None:
        """Record the cost; on return it is durable."""
        ...


@final
@dataclass(slots=True)
class ChargeLog:
    """A list of charges that no plan is checked against: for audits and experiments that make single releases."""

    charges: list[Charge] = field(default_factory=list)

    def charge(self, charge: Charge) -> None:
        """Append the charge."""
        self.charges.append(charge)


_ROUNDING = 1e-12


@final
class SplitCharge:
    """A ledger for the releases of one step: pays for the step before the first, and sees that they add up to it.

    Formal guarantees:
        Gaussian releases of the same sampled units with noise multipliers s_1, s_2, ..., each chosen in the light of
        those before, cost what one with `(s_1^-2 + s_2^-2 + ...)^(-1/2)` costs (Ghazi et al. 2023, Sec. 3.2). That
        one is the plan's, so a release that would exceed it is refused.
    """

    def __init__(self, ledger: Chargeable, whole: Charge) -> None:
        self._ledger, self._whole = ledger, whole
        self._precision = 0.0
        self._releases: set[int] = set()

    def charge(self, charge: Charge) -> None:
        """Take one release's part of the step's charge.

        Raises:
            PrivacyError: it is of another step, would draw an earlier one's noise, or there is too little left.
        """
        whole = replace(charge, noise_multiplier=self._whole.noise_multiplier, release=self._whole.release)
        if whole != self._whole or charge.release in self._releases:
            raise PrivacyError(f"got {charge}, expected another release of {self._whole}")
        if charge.noise_multiplier <= 0:
            raise PrivacyError(f"got {charge}, expected noise in every release of the step")
        precision = self._precision + charge.noise_multiplier**-2
        if precision > self._whole.noise_multiplier**-2 * (1 + _ROUNDING):
            raise PrivacyError(
                f"{charge} and the releases before it cost more than {self._whole}; the plan says how a step's "
                "noise is shared"
            )
        if not self._releases:
            self._ledger.charge(self._whole)
        self._precision = precision
        self._releases.add(charge.release)


FORMAT = 2
"""Format 1, of unreleased versions, did not bind the run's other files to the chain; it is refused."""


class ChargeBlock(NamedTuple):
    """Consecutive steps of one phase, paid for together."""

    phase: str
    first_step: int
    steps: int
    sampling_rate: float
    noise_multiplier: float


class TruncatedTail(NamedTuple):
    """An unfinished end of the file, and the block it counts as."""

    lost: bytes
    block: ChargeBlock


class FilesLine(NamedTuple):
    """Files that were about to be written: the line's number, from 1, and their SHA-256 by name."""

    number: int
    sha256: FrozenMap


class Closing(NamedTuple):
    """A line after which nothing more is charged: its number, from 1, and the plan that got what was left."""

    number: int
    successor: Plan


@final
@dataclass(frozen=True, slots=True)
class LedgerState:
    """A verified ledger.

    Attributes:
        unit: what one unit of privacy is.
        units: how many there are.
        plan: fingerprint of the plan it was opened for.
        delta: the plan's delta; None for a plan without one.
        created: when, in UTC.
        planned: every phase of the plan as one block.
        block: most steps in a block.
        sealed: what was charged by complete lines, in order, without gaps.
        heads: the hash of every complete line.
        torn: an unfinished end of the file, if there is one.
        files: what was to be written when, in order.
        closings: the lines that closed it, the first for good; none while its run can still be resumed.
    """

    unit: str
    units: int
    plan: str
    delta: float | None
    created: str
    planned: tuple[ChargeBlock, ...]
    block: int
    sealed: tuple[ChargeBlock, ...]
    heads: tuple[str, ...]
    torn: TruncatedTail | None = None
    files: tuple[FilesLine, ...] = ()
    closings: tuple[Closing, ...] = ()

    def expected_digests(self, name: str) -> tuple[str, ...]:
        """The digests a file of the run may have: the last one written down.

        Edge cases:
            A file is written after its line. So if that line is the last one of all, the file may still be the one
            before: the run was killed in between.
        """
        lines = [line for line in self.files if name in line.sha256]
        kept = 2 if lines and lines[-1].number == self.length and self.torn is None else 1
        return tuple(str(line.sha256[name]) for line in lines[-kept:])

    @property
    def blocks(self) -> tuple[ChargeBlock, ...]:
        """All that counts as spent: the sealed blocks, and one for a torn end."""
        return (*self.sealed, self.torn.block) if self.torn else self.sealed

    @property
    def head(self) -> str:
        """Hash of the last line: it seals the whole file."""
        return self.heads[-1]

    @property
    def charged_head(self) -> str:
        """Hash of the last line before it was closed; of the last line if it is open."""
        return self.heads[self.closings[0].number - 2] if self.closings else self.head

    @property
    def length(self) -> int:
        """Number of sealed lines."""
        return len(self.heads)

    @property
    def charged(self) -> int:
        """Steps paid for."""
        return sum(block.steps for block in self.blocks)

    @property
    def planned_steps(self) -> int:
        """Steps of the whole plan."""
        return sum(block.steps for block in self.planned)

    def next_block(self) -> ChargeBlock:
        """The block that pays for the first step not charged: at most 1 % of the plan, within one phase.

        Edge cases:
            With everything charged, and in a closed ledger, it has no steps.
        """
        first = self.charged
        for phase in self.planned:
            left = phase.first_step + phase.steps - first
            if left > 0:
                break
        return phase._replace(first_step=first, steps=0 if self.closings else min(self.block, left))

    def extended(self, block: ChargeBlock, head: str) -> LedgerState:
        """The record with one more line."""
        return replace(self, sealed=(*self.sealed, block), heads=(*self.heads, head), torn=None)

    def noting(self, files: Mapping[str, str], head: str) -> LedgerState:
        """The record with one more line about files."""
        line = FilesLine(self.length + 1, FrozenMap(files))
        return replace(self, files=(*self.files, line), heads=(*self.heads, head))

    def closed(self, successor: Plan, head: str) -> LedgerState:
        """The record with one more line, after which nothing is charged."""
        closing = Closing(self.length + 1, successor)
        return replace(self, closings=(*self.closings, closing), heads=(*self.heads, head))

    def events(self) -> tuple[SampledGaussian, ...]:
        """Everything charged, equal mechanisms added up."""
        return _added_up(self.blocks)

    def committed(self) -> tuple[SampledGaussian, ...]:
        """The most its run can ever spend: the whole plan, or what was charged when the ledger was closed."""
        return self.events() if self.closings else _added_up(self.planned)

    def spent(self, delta: float | None = None, accountant: str = "pld") -> float:
        """Epsilon of everything charged, for one unit, at `delta` (the header's by default).

        Formal guarantees:
            Of a run stopped early this holds only if the stop did not depend on what was released; the planned
            epsilon holds always.
        """
        chosen = self.delta if delta is None else delta
        if chosen is None:
            raise PrivacyError(
                "delta: the ledger names none; pass delta=, well below 1 / the number of units"
            )
        return accountant_named(accountant).epsilon(self.events(), chosen)

    def check_extends(self, head: str | None, length: int) -> None:
        """Check that this ledger goes on from a known state (a checkpoint's, a record's).

        Raises:
            PrivacyError: it is shorter, or differs in what was there already: lines were removed or rewritten.
        """
        if length > self.length:
            raise PrivacyError(
                f"the ledger has {self.length} lines, but {length} were known: lines were removed; restore the file"
            )
        if length < 1 or self.heads[length - 1] != head:
            raise PrivacyError(
                f"the ledger's line {length} is not the one known before: the file was rewritten; restore it"
            )


def _added_up(blocks: Iterable[ChargeBlock]) -> tuple[SampledGaussian, ...]:
    return merge_events(SampledGaussian(b.sampling_rate, b.noise_multiplier, b.steps) for b in blocks)


HEADER_KEYS = {"block", "created", "delta", "format", "hash", "kind", "phases", "plan", "unit", "units"}
BLOCK_KEYS = {"first_step", "hash", "kind", "noise_multiplier", "phase", "sampling_rate", "steps"}
TORN_KEYS = {*BLOCK_KEYS, "lost_sha256"}
FILES_KEYS = {"hash", "kind", "sha256"}
CLOSED_KEYS = {"hash", "kind", "successor"}


def opening(plan: Plan, created: str) -> dict[str, Any]:
    """The header line of a plan's ledger, not sealed yet."""
    phases = [
        {
            "name": phase.name,
            "noise_multiplier": phase.noise_multiplier,
            "sampling_rate": phase.sampling_rate,
            "steps": phase.steps,
        }
        for phase in plan.phases
    ]
    return {
        "block": max(1, plan.total_steps // 100),
        "created": created,
        "delta": plan.delta,
        "format": FORMAT,
        "kind": "header",
        "phases": phases,
        "plan": plan.fingerprint,
        "unit": plan.unit,
        "units": plan.units,
    }


def chain_line(content: dict[str, Any], previous: str) -> tuple[str, str]:
    """The line for some content, and its hash: of the previous hash and the content."""
    digest = sha256(previous + canonical(content))
    return canonical({**content, "hash": digest}), digest


def block_line(block: ChargeBlock) -> dict[str, Any]:
    """A block as a line, not sealed yet."""
    return {**block._asdict(), "kind": "block"}


def files_line(sha256: Mapping[str, str]) -> dict[str, Any]:
    """Digests of files as a line, not sealed yet."""
    return {"kind": "files", "sha256": dict(sha256)}


def closing_line(successor: Plan) -> dict[str, Any]:
    """The line after which nothing is charged, not sealed yet: the plan that gets what is left."""
    return {"kind": "closed", "successor": successor.to_json()}


def torn_line(block: ChargeBlock, lost: bytes) -> dict[str, Any]:
    """The line that accounts for unfinished bytes, not sealed yet: their hash, and the block they count as."""
    return {**block._asdict(), "kind": "torn", "lost_sha256": sha256(lost)}


def parse(data: bytes, name: str) -> LedgerState:
    """Read and verify a whole ledger.

    Raises:
        PrivacyError: the first line that is not what it should be, by number, and why.
    """
    record: LedgerState | None = None
    lost_from: tuple[int, int] | None = None
    for number, offset, line in _lines(data):
        where = f"{name}, line {number}"
        content = _object(line)
        if content is None:
            lost_from = lost_from or (number, offset)
            continue
        if record is None:
            if lost_from:
                break
            record = _header(_unsealed(content, line, "", where), content["hash"], where)
            continue
        if lost_from:
            lost = sha256(data[lost_from[1] : offset])
            if content.get("kind") != "torn" or content.get("lost_sha256") != lost:
                raise PrivacyError(
                    f"{name}, line {lost_from[0]}: not a JSON object, and no repair accounts for it; restore the file"
                )
        elif content.get("kind") not in ("block", "files", "closed"):
            raise PrivacyError(
                f"{where}: kind is {content.get('kind')!r}, expected a block, files or a closing"
            )
        lost_from = None
        entry = _unsealed(content, line, record.head, where)
        add = _READERS.get(entry["kind"], _extended)
        record = add(record, entry, content["hash"], where)
    if record is None:
        raise PrivacyError(
            f"{name}, line 1: not a header, though a ledger is created with one: the file is damaged. "
            "Restore it; what was spent cannot be told from it"
        )
    return (
        replace(record, torn=TruncatedTail(data[lost_from[1] :], record.next_block()))
        if lost_from
        else record
    )


def _lines(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    offset = 0
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line or offset < len(data):
            yield number, offset, line
        offset += len(line) + 1


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large for a number")
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _unsealed(content: dict[str, Any], line: bytes, previous: str, where: str) -> dict[str, Any]:
    """The content of a line whose seal, form and keys are right."""
    kinds = {
        "header": HEADER_KEYS,
        "block": BLOCK_KEYS,
        "torn": TORN_KEYS,
        "files": FILES_KEYS,
        "closed": CLOSED_KEYS,
    }
    keys = kinds.get(str(content.get("kind")))
    if keys is None or set(content) != keys:
        raise PrivacyError(f"{where}: got kind {content.get('kind')!r} with the keys {sorted(content)}")
    inner = {key: value for key, value in content.items() if key != "hash"}
    text, digest = chain_line(inner, previous)
    if content["hash"] != digest:
        raise PrivacyError(
            f"{where}: the hash does not follow from the lines before: changed, moved or removed lines; restore them"
        )
    if line != text.encode():
        raise PrivacyError(
            f"{where}: not in canonical form, so this library did not write it; restore the file"
        )
    return inner


def _header(content: dict[str, Any], digest: str, where: str) -> LedgerState:
    if content["kind"] != "header" or content["format"] != FORMAT or isinstance(content["format"], bool):
        found = f"kind {content['kind']!r}, format {content.get('format')!r}"
        raise PrivacyError(
            f"{where}: got {found}, expected a header of format {FORMAT}; runs of older formats are not read any "
            "more, train again"
        )
    planned, first = [], 0
    for phase in content["phases"]:
        rate, noise = (phase.get(key) for key in ("sampling_rate", "noise_multiplier"))
        block = ChargeBlock(
            phase=checks.text(phase.get("name"), f"{where}: phase name"),
            first_step=first,
            steps=checks.whole(phase.get("steps"), f"{where}: steps", at_least=1),
            sampling_rate=checks.probability(rate, f"{where}: sampling_rate"),
            noise_multiplier=checks.number(noise, f"{where}: noise_multiplier", at_least=0.0),
        )
        planned.append(block)
        first += block.steps
    return LedgerState(
        unit=checks.text(content["unit"], f"{where}: unit"),
        units=checks.whole(content["units"], f"{where}: units", at_least=1),
        plan=checks.text(content["plan"], f"{where}: plan"),
        delta=None if content["delta"] is None else checks.delta_in_range(content["delta"]),
        created=checks.text(content["created"], f"{where}: created"),
        planned=tuple(planned),
        block=checks.whole(content["block"], f"{where}: block", at_least=1),
        sealed=(),
        heads=(digest,),
    )


def _noting(record: LedgerState, entry: dict[str, Any], digest: str, where: str) -> LedgerState:
    files = entry["sha256"]
    if not isinstance(files, dict) or not files or not all(isinstance(one, str) for one in files.values()):
        raise PrivacyError(f"{where}: got {files!r}, expected the digests of files by name")
    return record.noting(files, digest)


def _closed(record: LedgerState, entry: dict[str, Any], digest: str, where: str) -> LedgerState:
    return record.closed(Plan.from_json(checks.text(entry["successor"], f"{where}: successor")), digest)


def _extended(record: LedgerState, entry: dict[str, Any], digest: str, where: str) -> LedgerState:
    block, expected = ChargeBlock(*(entry[name] for name in ChargeBlock._fields)), record.next_block()
    if block != expected or (expected.steps == 0 and entry["kind"] == "block"):
        raise PrivacyError(f"{where}: got {block}, which the plan does not allow; expected {expected}")
    return record.extended(block, digest)


_READERS = {"files": _noting, "closed": _closed}


@final
class Ledger:
    """What a run has paid for, in memory or in an append-only, hash-chained file; for one plan.

    `Ledger(plan)` lives as long as the process; `create` and `resume` open a file, which is locked (POSIX only). A
    charge to a file returns when it is on disk. To keep that cheap, a step that is not covered yet opens a block of
    up to 1 % of the plan's steps in its phase, and the steps of an open block write nothing.

    Formal guarantees:
        Charges and nothing else, so it holds nothing private. It pays for the plan it was made for, step by step
        and once: another rate or noise, a step beyond the plan, a second release of a step all raise, which keeps the
        release from happening. A kill loses the steps since the last checkpoint and the open block; they stay
        charged.

    Edge cases:
        With `replay` (a seeded run, whose repeated step releases the same numbers) a charged step may be run again
        for free. A forked child gets a closed file; one file has one writer.
    """

    __slots__ = (
        "__weakref__",
        "_close",
        "_closed",
        "_file",
        "_next",
        "_path",
        "_plan",
        "_replay",
        "_state",
        "_terminated",
    )

    def __init__(self, plan: Plan, *, state: LedgerState | None = None, replay: bool = False) -> None:
        """Start a ledger in memory, or go on in memory from the state of a file that another process writes."""
        self._plan, self._replay = plan, replay
        self._state = parse(_first_line(plan), "ledger") if state is None else state
        self._next = self._state.charged
        self._path: Path | None = None
        self._file = -1
        self._closed, self._terminated = False, True
        self._close: Callable[[], object] = lambda: None

    @classmethod
    def _opened(cls, path: Path, file: int, plan: Plan, data: bytes, replay: bool) -> Ledger:
        ledger = cls(plan, state=parse(data, path.name), replay=replay)
        ledger._path, ledger._file = path, file
        ledger._close = weakref.finalize(ledger, os.close, file)
        _OPEN.add(ledger)
        return ledger

    @classmethod
    def create(cls, path: str | Path, plan: Plan, *, replay: bool = False) -> Ledger:
        """Start a plan's ledger in a file, which appears whole, locked and on disk, or not at all.

        Raises:
            PrivacyError: there is a file already.
        """
        path = Path(path)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        line = _first_line(plan)
        file = os.open(draft, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            lock_file(file, path)
            append_durably(file, line)
            publish(draft, path)
        except (OSError, PrivacyError):
            os.close(file)
            raise
        finally:
            draft.unlink(missing_ok=True)
        sync_directory(path.parent)
        return cls._opened(path, file, plan, line, replay)

    @classmethod
    def resume(cls, path: str | Path, plan: Plan, *, replay: bool = False) -> Ledger:
        """Open the ledger of a run to go on with it, after verifying it.

        A torn end is accounted for in a line of its own.

        Raises:
            PrivacyError: no ledger, another plan's, one that does not verify, one in use, or a closed one.
        """
        ledger = cls.lock(path, plan, replay=replay)
        if ledger.state.closings:
            ledger.close()
            raise PrivacyError(
                f"{path} was closed: what its run had left was given to the plan "
                f"{ledger.state.closings[0].successor.fingerprint}, so the run cannot be resumed. "
                "Start a run with that plan, or make another one with sparsedp.runs.run.continue_runs"
            )
        return ledger

    @classmethod
    def lock(cls, path: str | Path, plan: Plan, *, replay: bool = False) -> Ledger:
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
            lock_file(file, path)
            data = path.read_bytes()
            if parse(data, path.name).plan != plan.fingerprint:
                raise PrivacyError(f"{path} belongs to another plan; resume with the plan it was created for")
        except (OSError, PrivacyError):
            os.close(file)
            raise
        ledger = cls._opened(path, file, plan, data, replay)
        ledger._terminated = data.endswith(b"\n")
        ledger._repair()
        return ledger

    @staticmethod
    def read(path: str | Path) -> LedgerState:
        """Verify a ledger file and say what it holds, without its plan and without locking or changing it.

        Raises:
            PrivacyError: the first line that does not verify, by number, and why.
        """
        path = Path(path)
        try:
            return parse(path.read_bytes(), path.name)
        except FileNotFoundError as error:
            raise PrivacyError(f"no ledger at {path}") from error

    def charge(self, charge: Charge) -> None:
        """Pay for one release: on return its block is on disk, if there is a file.

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
        if self._state.closings:
            raise PrivacyError(f"{self._name} was closed; nothing more can be charged to it")
        covered = self._state.charged
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
            block = self._state.next_block()
            self._state = self._state.extended(block, self._append(block_line(block)))
        self._next = charge.step + 1

    def retire(self, successor: Plan) -> None:
        """Write a line after which nothing is charged, and which holds the plan that gets what is left."""
        self._check_open()
        self._state = self._state.closed(successor, self._append(closing_line(successor)))

    def record_digests(self, sha256: Mapping[str, str]) -> None:
        """Write down the digests of files that are about to be written: from then on they belong to the chain."""
        self._check_open()
        self._state = self._state.noting(sha256, self._append(files_line(sha256)))

    @property
    def state(self) -> LedgerState:
        """What it holds now."""
        return self._state

    @property
    def head(self) -> str | None:
        """Hash of the last line, for checkpoint and record; None without a file."""
        return None if self._path is None else self._state.head

    @property
    def length(self) -> int:
        """Number of lines, for checkpoint and record; 0 without a file."""
        return 0 if self._path is None else self._state.length

    @property
    def charged(self) -> int:
        """Steps paid for; the open block counts whole."""
        return self._state.charged

    @property
    def next_step(self) -> int:
        """The first step that can still be released. After `resume`: past the block that was in flight, now lost."""
        return self._next

    def events(self) -> tuple[SampledGaussian, ...]:
        """Everything charged, equal mechanisms added up."""
        return self._state.events()

    def close(self) -> None:
        """Release the file and its lock; charging is over."""
        _OPEN.discard(self)
        self._close()
        self._closed = True

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _name(self) -> str:
        return "the ledger" if self._path is None else f"the ledger {self._path}"

    def _repair(self) -> None:
        torn = self._state.torn
        if torn is not None:
            lost = torn.lost if self._terminated else torn.lost + b"\n"
            self._state = self._state.extended(torn.block, self._append(torn_line(torn.block, lost)))

    def _append(self, content: dict[str, Any]) -> str:
        line, digest = chain_line(content, self._state.head)
        if self._path is None:
            return digest
        try:
            append_durably(self._file, (b"" if self._terminated else b"\n") + line.encode() + b"\n")
        except OSError as error:
            self.close()
            raise PrivacyError(
                f"could not write {self._path} ({error}); nothing was released. Make room and resume"
            ) from error
        self._terminated = True
        return digest

    def _check_open(self) -> None:
        if self._closed:
            raise PrivacyError(f"{self._name} is closed (or was opened by a parent process); resume it")


def _first_line(plan: Plan) -> bytes:
    line, _ = chain_line(opening(plan, datetime.now(UTC).isoformat(timespec="seconds")), "")
    return line.encode() + b"\n"


_OPEN: weakref.WeakSet[Ledger] = weakref.WeakSet()


def _close_in_child() -> None:
    for ledger in list(_OPEN):
        ledger.close()


os.register_at_fork(after_in_child=_close_in_child)
