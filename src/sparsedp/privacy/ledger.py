"""The ledger: what has been spent, written down before it is spent."""

from __future__ import annotations

import io
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, final

from sparsedp import _validate as checks
from sparsedp._files import append_durably, lock_file, parse_json, sync_directory
from sparsedp._serialization import FrozenMap, canonical, from_json, sha256
from sparsedp.errors import DataError, PrivacyError, SparseDPError
from sparsedp.privacy.accounting import accountant as accountant_named
from sparsedp.privacy.charge import Charge
from sparsedp.privacy.plan import Phase, Plan, SampledGaussian, merge_events


class ChargeBlock(NamedTuple):
    """Consecutive steps of one phase, paid for together."""

    phase: str
    first_step: int
    steps: int
    sampling_rate: float
    noise_multiplier: float


def _added_up(blocks: Iterable[ChargeBlock]) -> tuple[SampledGaussian, ...]:
    return merge_events(SampledGaussian(b.sampling_rate, b.noise_multiplier, b.steps) for b in blocks)


@final
@dataclass(frozen=True, slots=True)
class LedgerState:
    """A verified ledger: its header (of the plan the fingerprint), and what its lines say.

    Attributes:
        planned: every phase of the plan as one block.
        block: most steps in a block.
        heads: the hash of every complete line.
        sealed: what was charged by complete lines, in order, without gaps.
        torn: the bytes of an unfinished end of the file, which count as a block.
        files: the number of each line about files, from 1, and the SHA-256 by name that it says.
        closed: the number of the line that closed it for good, for the plans `successors`.
    """

    unit: str
    units: int
    plan: str
    delta: float | None
    created: str
    planned: tuple[ChargeBlock, ...]
    block: int
    heads: tuple[str, ...]
    sealed: tuple[ChargeBlock, ...] = ()
    torn: bytes | None = None
    files: tuple[tuple[int, FrozenMap], ...] = ()
    closed: int | None = None
    successors: tuple[Plan, ...] = ()

    def expected_digests(self, name: str) -> tuple[str, ...]:
        """The digests a file may have: the last one written down; if that line is the last, also the one before."""
        lines = [(number, str(sha256[name])) for number, sha256 in self.files if name in sha256]
        kept = 2 if lines and lines[-1][0] == self.length and self.torn is None else 1
        return tuple(digest for _, digest in lines[-kept:])

    @property
    def blocks(self) -> tuple[ChargeBlock, ...]:
        """All that counts as spent: the sealed blocks, and one for a torn end."""
        return (*self.sealed, self.next_block()) if self.torn else self.sealed

    @property
    def head(self) -> str:
        """Hash of the last line: it seals the whole file."""
        return self.heads[-1]

    @property
    def charged_head(self) -> str:
        """Hash of the last line before it was closed, if it was."""
        return self.heads[self.closed - 2] if self.closed else self.head

    @property
    def length(self) -> int:
        """Number of complete lines."""
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
        """The block that pays for the first step without a line; empty when all is charged, or it is closed."""
        first = sum(block.steps for block in self.sealed)
        for phase in self.planned:
            left = phase.first_step + phase.steps - first
            if left > 0:
                break
        return phase._replace(first_step=first, steps=0 if self.closed else min(self.block, left))

    def after(self, content: Mapping[str, Any], head: str) -> LedgerState:
        """The state with one more line, read or about to be written; it charges the plan's next block or nothing."""
        grown = replace(self, heads=(*self.heads, head), torn=None)
        if content["kind"] == "files":
            found = from_json(dict[str, str], content["sha256"], "the digests of files by name")
            if not found:
                raise PrivacyError("got a line about no file")
            return replace(grown, files=(*self.files, (grown.length, FrozenMap(found))))
        if content["kind"] == "closed":
            plans = (*self.successors, Plan.from_json(checks.text(content["successor"], "successor")))
            return replace(grown, closed=self.closed or grown.length, successors=plans)
        block, expected = ChargeBlock(*(content[name] for name in ChargeBlock._fields)), self.next_block()
        if block != expected or (not block.steps and content["kind"] == "block"):
            raise PrivacyError(f"got {block}, which the plan does not allow; expected {expected}")
        return replace(grown, sealed=(*self.sealed, block))

    def events(self) -> tuple[SampledGaussian, ...]:
        """Everything charged, equal mechanisms added up."""
        return _added_up(self.blocks)

    def committed(self) -> tuple[SampledGaussian, ...]:
        """The most its run can ever spend: the whole plan, or what was charged when the ledger was closed."""
        return self.events() if self.closed else _added_up(self.planned)

    def spent(self, delta: float | None = None, accountant: str = "pld") -> float:
        """Epsilon of everything charged, for one unit, at `delta` (the header's by default).

        Formal guarantees: Of a run stopped early it holds only if the stop did not depend on what was released.
        """
        chosen = checks.delta_in_range(self.delta if delta is None else delta)
        return accountant_named(accountant).epsilon(self.events(), chosen)

    def check_extends(self, head: str | None, length: int) -> None:
        """Refuse a ledger that does not go on from a known state (a checkpoint's, a record's)."""
        if length > self.length:
            raise PrivacyError(
                f"the ledger has {self.length} lines, but {length} were known: lines were removed; restore the file"
            )
        if length < 1 or self.heads[length - 1] != head:
            raise PrivacyError(
                f"the ledger's line {length} is not the one known before: the file was rewritten; restore it"
            )


FORMAT = 2

_KEYS = {
    "header": {"block", "created", "delta", "format", "phases", "plan", "unit", "units"},
    "block": {*ChargeBlock._fields},
    "torn": {*ChargeBlock._fields, "lost_sha256"},
    "files": {"sha256"},
    "closed": {"successor"},
}
"""What a line of each kind holds, besides its kind and its hash."""
_PHASE = ("name", "noise_multiplier", "sampling_rate", "steps")
"""What the header says of each phase."""


def closing_line(successor: Plan) -> dict[str, Any]:
    """The content of a line after which nothing is charged: the plan that gets what is left."""
    return {"kind": "closed", "successor": successor.to_json()}


def chain_line(content: Mapping[str, Any], previous: str) -> tuple[str, str]:
    """The line for some content, and its hash: of the previous hash and the content."""
    digest = sha256(previous + canonical(content))
    return canonical({**content, "hash": digest}), digest


def _first_line(plan: Plan) -> bytes:
    content = {
        "block": max(1, plan.total_steps // 100),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "delta": plan.delta,
        "format": FORMAT,
        "kind": "header",
        "phases": [{name: getattr(phase, name) for name in _PHASE} for phase in plan.phases],
        "plan": plan.fingerprint,
        "unit": plan.unit,
        "units": plan.units,
    }
    return chain_line(content, "")[0].encode() + b"\n"


def parse(data: bytes, name: str) -> LedgerState:
    """Verify a whole ledger; the first line that is not what it should be is an error.

    A line that is no JSON object was torn by a crash: the next line must account for it by its hash, if there is one.
    """
    state: LedgerState | None = None
    lost, lost_at = b"", 0
    for number, line in enumerate(io.BytesIO(data), start=1):
        try:
            content = parse_json(line, name)
        except DataError:
            content = None
        if not isinstance(content, dict):
            lost, lost_at = lost + line, lost_at or number
            continue
        if lost and (state is None or content.get("lost_sha256") != sha256(lost)):
            break
        kinds = ("header",) if state is None else ("torn",) if lost else ("block", "files", "closed")
        try:
            inner = _inner(content, line, state.head if state else "", kinds)
            state = state.after(inner, content["hash"]) if state else _opened(inner, content["hash"])
        except (SparseDPError, TypeError) as error:
            raise PrivacyError(f"{name}, line {number}: {error}") from error
        lost, lost_at = b"", 0
    else:
        if state is not None:
            return replace(state, torn=lost or None)
    problem = "not a JSON object, and no repair accounts for it; restore the file"
    if state is None:
        problem = "not a header, so the file is damaged. Restore it; what was spent cannot be told from it"
    raise PrivacyError(f"{name}, line {lost_at or 1}: {problem}")


def _inner(content: dict[str, Any], line: bytes, previous: str, kinds: Sequence[str]) -> dict[str, Any]:
    """The content of a line whose kind, keys, hash and form are right, without the hash."""
    kind = str(content.get("kind"))
    if kind not in kinds or set(content) != {"kind", "hash", *_KEYS[kind]}:
        raise PrivacyError(
            f"got kind {kind!r} with the keys {sorted(content)}, expected {' or '.join(kinds)}"
        )
    inner = {key: value for key, value in content.items() if key != "hash"}
    text, digest = chain_line(inner, previous)
    if content["hash"] != digest:
        raise PrivacyError(
            "the hash does not follow from the lines before: changed, moved or removed lines; restore them"
        )
    if line.removesuffix(b"\n") != text.encode():
        raise PrivacyError("not in canonical form, so this library did not write it; restore the file")
    return inner


def _opened(content: dict[str, Any], head: str) -> LedgerState:
    """The state after the header, whose values are checked as a plan's are."""
    if content["format"] != FORMAT or isinstance(content["format"], bool):
        raise PrivacyError(
            f"got format {content['format']!r}, expected a header of format {FORMAT}; train again"
        )
    phases = tuple(Phase(clip_norm=1.0, **phase) for phase in content["phases"])
    plan = Plan("any", phases, content["units"], 1, content["unit"], content["delta"])
    return LedgerState(
        unit=plan.unit,
        units=plan.units,
        plan=checks.text(content["plan"], "plan"),
        delta=plan.delta,
        created=checks.text(content["created"], "created"),
        planned=tuple(
            ChargeBlock(p.name, plan.first_step(p.name), p.steps, p.sampling_rate, p.noise_multiplier)
            for p in phases
        ),
        block=checks.whole(content["block"], "block", at_least=1),
        heads=(head,),
    )


@final
class Ledger:
    """What a run has paid for, in memory or in an append-only, hash-chained file; for one plan.

    `Ledger(plan)` lives as long as the process; `Ledger(plan, path)` makes a file and `resume` opens one, which is
    locked (POSIX only). A charge to a file returns when it is on disk. To keep that cheap, a step that is not covered
    yet opens a block of up to 1 % of the plan's steps in its phase, and the steps of an open block write nothing.

    Formal guarantees:
        Charges and nothing else, so it holds nothing private. It pays for the plan it was made for, step by step
        and once: another rate or noise, a step beyond the plan, a second release of a step all raise, which keeps the
        release from happening. A kill loses the steps since the last checkpoint and the open block; they stay
        charged.

    Edge cases:
        With `replay` (a seeded run, whose repeated step releases the same numbers) a charged step may be run again
        for free. With `state`, of a file that another process writes, it goes on in memory from there. A forked child
        gets a closed file; one file has one writer. `next_step` is the first step that can still be released: after
        `resume`, past the block that was in flight.
    """

    def __init__(
        self,
        plan: Plan,
        path: str | Path | None = None,
        *,
        replay: bool = False,
        state: LedgerState | None = None,
    ) -> None:
        first = _first_line(plan)
        self._plan, self._replay = plan, replay
        self.state = parse(first, "ledger") if state is None else state
        self.next_step = self.state.charged
        self._path: Path | None = None
        self._name = "the ledger"
        self._file, self._closed = -1, False
        self._close: Callable[[], object] = lambda: None
        if path is not None:
            refusal = f"{path} exists; resume that run, or choose another directory for a new one"
            with self._opening(Path(path), os.O_CREAT | os.O_EXCL, refusal):
                append_durably(self._file, first)
                sync_directory(Path(path).parent)

    @classmethod
    def resume(
        cls, path: str | Path, plan: Plan, *, replay: bool = False, even_closed: bool = False
    ) -> Ledger:
        """Open the ledger of a run to go on with it, after verifying it; a torn end gets a line of its own.

        A closed one is refused, but with `even_closed`, to close it for another plan.
        """
        path, ledger = Path(path), cls(plan, replay=replay)
        with ledger._opening(path, 0, f"no ledger at {path}: what was spent is unknown; restore it"):
            data = path.read_bytes()
            ledger.state = state = parse(data, path.name)
            ledger.next_step = state.charged
            if state.plan != plan.fingerprint:
                raise PrivacyError(f"{path} belongs to another plan; resume with the plan it was created for")
            if state.closed and not even_closed:
                raise PrivacyError(
                    f"{path} was closed and cannot be resumed: what its run had left was given to the plan "
                    f"{state.successors[0].fingerprint}; start a run with that one, or pass continue_from="
                )
            missing = b"" if data.endswith(b"\n") else b"\n"
            ledger._write(missing)
            if state.torn is not None:
                lost = sha256(state.torn + missing)
                ledger._append({"kind": "torn", "lost_sha256": lost, **state.next_block()._asdict()})
        return ledger

    @staticmethod
    def read(path: str | Path) -> LedgerState:
        """Verify a ledger file and say what it holds, without its plan and without locking or changing it."""
        path = Path(path)
        try:
            return parse(path.read_bytes(), path.name)
        except FileNotFoundError as error:
            raise PrivacyError(f"no ledger at {path}") from error

    def charge(self, charge: Charge) -> None:
        """Pay for one release of the plan, in its order: on return its block is on disk, if there is a file."""
        self._check_open()
        phase = self._plan.phase_at(charge.step)
        planned = Charge(phase.name, charge.step, phase.sampling_rate, phase.noise_multiplier)
        if charge != planned:
            raise PrivacyError(f"got {charge}, but the plan has {planned}; take all from the plan")
        if self.state.closed:
            raise PrivacyError(f"{self._name} was closed; nothing more can be charged to it")
        covered = self.state.charged
        if charge.step > covered:
            raise PrivacyError(
                f"step {charge.step} would leave steps from {covered} on unpaid; run them in order"
            )
        if charge.step < self.next_step:
            if self._replay:
                return
            raise PrivacyError(
                f"step {charge.step} was charged before; another release would cost again. Go on at {self.next_step}"
            )
        if charge.step == covered:
            self._append({"kind": "block", **self.state.next_block()._asdict()})
        self.next_step = charge.step + 1

    def retire(self, successor: Plan) -> None:
        """Write a line after which nothing is charged, and which holds the plan that gets what is left."""
        self._append(closing_line(successor))

    def record_digests(self, sha256: Mapping[str, str]) -> None:
        """Write down the digests of files that are about to be written: from then on they belong to the chain."""
        self._append({"kind": "files", "sha256": dict(sha256)})

    @property
    def place(self) -> tuple[str | None, int]:
        """Hash of the last line and number of lines, for checkpoint and record; None and 0 without a file."""
        return (None, 0) if self._path is None else (self.state.head, self.state.length)

    def close(self) -> None:
        """Release the file and its lock; charging is over."""
        _OPEN.discard(self)
        self._close()
        self._closed = True

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _opening(self, path: Path, flags: int, refusal: str) -> Iterator[None]:
        """Open and lock the file; it is closed again if the block raises."""
        try:
            file = os.open(path, os.O_RDWR | os.O_APPEND | flags, 0o644)
        except (FileExistsError, FileNotFoundError) as error:
            raise PrivacyError(refusal) from error
        self._path, self._file, self._name = path, file, f"the ledger {path}"
        self._close = weakref.finalize(self, os.close, file)
        _OPEN.add(self)
        try:
            lock_file(file, path)
            yield
        except BaseException:
            self.close()
            raise

    def _append(self, content: dict[str, Any]) -> None:
        """Add a line; on return it is on disk, if there is a file."""
        self._check_open()
        line, head = chain_line(content, self.state.head)
        state = self.state.after(content, head)
        self._write(line.encode() + b"\n")
        self.state = state

    def _write(self, data: bytes) -> None:
        if self._path is None or not data:
            return
        try:
            append_durably(self._file, data)
        except OSError as error:
            self.close()
            raise PrivacyError(
                f"could not write {self._path} ({error}); nothing was released. Make room and resume"
            ) from error

    def _check_open(self) -> None:
        if self._closed:
            raise PrivacyError(f"{self._name} is closed (or was opened by a parent process); resume it")


_OPEN: weakref.WeakSet[Ledger] = weakref.WeakSet()


def _close_in_child() -> None:
    for ledger in list(_OPEN):
        ledger.close()


os.register_at_fork(after_in_child=_close_in_child)
