"""The ledger's file: one JSON object a line, each sealed with the hash of all before it.

Line 1 is the header: what is protected, and the plan's costs phase by phase. A block of steps is a line written
before their releases. Files of the run are a line as well, with their digests, written before the files are. A line
cut short by a crash cannot be told from one whose release was made, so it counts as a block; the repair that follows
it says so in a line of its own and rewrites nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from sparsedp.errors import PrivacyError
from sparsedp.privacy import checks
from sparsedp.privacy.canonical import canonical, sha256
from sparsedp.privacy.plan import Plan
from sparsedp.runs.verified_ledger import FORMAT, PaidSteps, Torn, VerifiedLedger

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


def seal(content: dict[str, Any], previous: str) -> tuple[str, str]:
    """The line for some content, and its hash: of the previous hash and the content."""
    digest = sha256(previous + canonical(content))
    return canonical({**content, "hash": digest}), digest


def block_line(block: PaidSteps) -> dict[str, Any]:
    """A block as a line, not sealed yet."""
    return {**block._asdict(), "kind": "block"}


def files_line(sha256: Mapping[str, str]) -> dict[str, Any]:
    """Digests of files as a line, not sealed yet."""
    return {"kind": "files", "sha256": dict(sha256)}


def closing_line(successor: Plan) -> dict[str, Any]:
    """The line after which nothing is charged, not sealed yet: the plan that gets what is left."""
    return {"kind": "closed", "successor": successor.to_json()}


def torn_line(block: PaidSteps, lost: bytes) -> dict[str, Any]:
    """The line that accounts for unfinished bytes, not sealed yet: their hash, and the block they count as."""
    return {**block._asdict(), "kind": "torn", "lost_sha256": sha256(lost)}


def parse(data: bytes, name: str) -> VerifiedLedger:
    """Read and verify a whole ledger.

    Raises:
        PrivacyError: the first line that is not what it should be, by number, and why.
    """
    record: VerifiedLedger | None = None
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
    return replace(record, torn=Torn(data[lost_from[1] :], record.next_block())) if lost_from else record


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


def _header(content: dict[str, Any], digest: str, where: str) -> VerifiedLedger:
    if content["kind"] != "header" or content["format"] != FORMAT or isinstance(content["format"], bool):
        found = f"kind {content['kind']!r}, format {content.get('format')!r}"
        raise PrivacyError(
            f"{where}: got {found}, expected a header of format {FORMAT}; runs of older formats are not read any "
            "more, train again"
        )
    planned, first = [], 0
    for phase in content["phases"]:
        rate, noise = (phase.get(key) for key in ("sampling_rate", "noise_multiplier"))
        block = PaidSteps(
            phase=checks.text(phase.get("name"), f"{where}: phase name"),
            first_step=first,
            steps=checks.whole(phase.get("steps"), f"{where}: steps", at_least=1),
            sampling_rate=checks.probability(rate, f"{where}: sampling_rate"),
            noise_multiplier=checks.number(noise, f"{where}: noise_multiplier", at_least=0.0),
        )
        planned.append(block)
        first += block.steps
    return VerifiedLedger(
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


def _noting(record: VerifiedLedger, entry: dict[str, Any], digest: str, where: str) -> VerifiedLedger:
    files = entry["sha256"]
    if not isinstance(files, dict) or not files or not all(isinstance(one, str) for one in files.values()):
        raise PrivacyError(f"{where}: got {files!r}, expected the digests of files by name")
    return record.noting(files, digest)


def _closed(record: VerifiedLedger, entry: dict[str, Any], digest: str, where: str) -> VerifiedLedger:
    return record.closed(Plan.from_json(checks.text(entry["successor"], f"{where}: successor")), digest)


def _extended(record: VerifiedLedger, entry: dict[str, Any], digest: str, where: str) -> VerifiedLedger:
    block, expected = PaidSteps(*(entry[name] for name in PaidSteps._fields)), record.next_block()
    if block != expected or (expected.steps == 0 and entry["kind"] == "block"):
        raise PrivacyError(f"{where}: got {block}, which the plan does not allow; expected {expected}")
    return record.extended(block, digest)


_READERS = {"files": _noting, "closed": _closed}
