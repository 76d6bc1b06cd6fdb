"""The ledger's file: one JSON object a line, each sealed with the hash of all before it.

Line 1 is the header: what is protected, and the plan's costs phase by phase. Every later line is a block of steps,
written before their releases. A line cut short by a crash cannot be told from one whose release was made, so it
counts as a block; the repair that follows it says so in a line of its own and rewrites nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

from sparsedp.core.errors import PrivacyError
from sparsedp.privacy import checks
from sparsedp.privacy.accountants import accountant as accountant_named
from sparsedp.privacy.canonical import canonical, sha256
from sparsedp.privacy.events import Spend, event_of, merged
from sparsedp.privacy.plan import Plan

FORMAT = 1
HEADER_KEYS = {"block", "created", "delta", "format", "hash", "kind", "phases", "plan", "unit", "units"}
BLOCK_KEYS = {"first_step", "hash", "kind", "noise_multiplier", "phase", "sampling_rate", "steps"}
TORN_KEYS = {*BLOCK_KEYS, "lost_sha256"}


class Block(NamedTuple):
    """Consecutive steps of one phase, paid for together."""

    phase: str
    first_step: int
    steps: int
    sampling_rate: float
    noise_multiplier: float


class Torn(NamedTuple):
    """An unfinished end of the file, and the block it counts as."""

    lost: bytes
    block: Block


@final
@dataclass(frozen=True, slots=True)
class LedgerRecord:
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
    """

    unit: str
    units: int
    plan: str
    delta: float | None
    created: str
    planned: tuple[Block, ...]
    block: int
    sealed: tuple[Block, ...]
    heads: tuple[str, ...]
    torn: Torn | None = None

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All that counts as spent: the sealed blocks, and one for a torn end."""
        return (*self.sealed, self.torn.block) if self.torn else self.sealed

    @property
    def head(self) -> str:
        """Hash of the last line: it seals the whole file."""
        return self.heads[-1]

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

    def next_block(self) -> Block:
        """The block that pays for the first step not charged: at most 1 % of the plan, within one phase.

        **Edge cases.** With everything charged it has no steps.
        """
        first = self.charged
        for phase in self.planned:
            left = phase.first_step + phase.steps - first
            if left > 0:
                break
        return phase._replace(first_step=first, steps=min(self.block, left))

    def extended(self, block: Block, head: str) -> LedgerRecord:
        """The record with one more line."""
        return replace(self, sealed=(*self.sealed, block), heads=(*self.heads, head), torn=None)

    def event(self) -> Any:
        """Everything charged, as a `dp_accounting` event."""
        return event_of(merged(Spend(b.sampling_rate, b.noise_multiplier, b.steps) for b in self.blocks))

    def spent(self, delta: float | None = None, accountant: str = "pld") -> float:
        """Epsilon of everything charged, for one unit, at `delta` (the header's by default).

        **Privacy.** Of a run stopped early this holds only if the stop did not depend on what was released; the
        planned epsilon holds always.
        """
        chosen = self.delta if delta is None else delta
        if chosen is None:
            raise PrivacyError(
                "delta: the ledger names none; pass delta=, well below 1 / the number of units"
            )
        return accountant_named(accountant).epsilon(self.event(), chosen)

    def expect(self, head: str, length: int) -> None:
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


def seal(content: dict[str, Any], previous: str) -> tuple[str, str]:
    """The line for some content, and its hash: of the previous hash and the content."""
    digest = sha256(previous + canonical(content))
    return canonical({**content, "hash": digest}), digest


def block_line(block: Block) -> dict[str, Any]:
    """A block as a line, not sealed yet."""
    return {**block._asdict(), "kind": "block"}


def torn_line(block: Block, lost: bytes) -> dict[str, Any]:
    """The line that accounts for unfinished bytes, not sealed yet: their hash, and the block they count as."""
    return {**block._asdict(), "kind": "torn", "lost_sha256": sha256(lost)}


def parse(data: bytes, name: str) -> LedgerRecord:
    """Read and verify a whole ledger.

    Raises:
        PrivacyError: the first line that is not what it should be, by number, and why.
    """
    record: LedgerRecord | None = None
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
        elif content.get("kind") != "block":
            raise PrivacyError(f"{where}: kind is {content.get('kind')!r}, expected a block")
        lost_from = None
        entry = _unsealed(content, line, record.head, where)
        record = _extended(record, entry, content["hash"], where)
    if record is None:
        raise PrivacyError(
            f"{name}, line 1: not a header, though a ledger is created with one: the file is damaged. "
            "Restore it; what was spent cannot be told from it"
        )
    return replace(record, torn=Torn(data[lost_from[1] :], record.next_block())) if lost_from else record


def _lines(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    offset = 0
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line or offset < len(data):
            yield number, offset, line
        offset += len(line) + 1


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _unsealed(content: dict[str, Any], line: bytes, previous: str, where: str) -> dict[str, Any]:
    """The content of a line whose seal, form and keys are right."""
    keys = {"header": HEADER_KEYS, "block": BLOCK_KEYS, "torn": TORN_KEYS}.get(str(content.get("kind")))
    if keys is None or set(content) != keys:
        raise PrivacyError(f"{where}: got kind {content.get('kind')!r} with the keys {sorted(content)}")
    inner = {key: value for key, value in content.items() if key != "hash"}
    text, digest = seal(inner, previous)
    if content["hash"] != digest:
        raise PrivacyError(
            f"{where}: the hash does not follow from the lines before: changed, moved or removed lines; restore them"
        )
    if line != text.encode():
        raise PrivacyError(
            f"{where}: not in canonical form, so this library did not write it; restore the file"
        )
    return inner


def _header(content: dict[str, Any], digest: str, where: str) -> LedgerRecord:
    if content["kind"] != "header" or content["format"] != FORMAT:
        found = f"kind {content['kind']!r}, format {content.get('format')!r}"
        raise PrivacyError(f"{where}: got {found}, expected a header of format {FORMAT}")
    planned, first = [], 0
    for phase in content["phases"]:
        rate, noise = (phase.get(key) for key in ("sampling_rate", "noise_multiplier"))
        block = Block(
            phase=checks.text(phase.get("name"), f"{where}: phase name"),
            first_step=first,
            steps=checks.whole(phase.get("steps"), f"{where}: steps", at_least=1),
            sampling_rate=checks.probability(rate, f"{where}: sampling_rate"),
            noise_multiplier=checks.number(noise, f"{where}: noise_multiplier", at_least=0.0),
        )
        planned.append(block)
        first += block.steps
    return LedgerRecord(
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


def _extended(record: LedgerRecord, entry: dict[str, Any], digest: str, where: str) -> LedgerRecord:
    block, expected = Block(*(entry[name] for name in Block._fields)), record.next_block()
    if block != expected or (expected.steps == 0 and entry["kind"] == "block"):
        raise PrivacyError(f"{where}: got {block}, which the plan does not allow; expected {expected}")
    return record.extended(block, digest)
