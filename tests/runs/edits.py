"""Random edits of a run's files, and what the files claim: an edit that is accepted must not change a claim."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from torch import Tensor

from sparsedp.runs.run import Run
from sparsedp.runs.verify import verify

FILES = ("plan.json", "ledger.jsonl", "checkpoint.safetensors", "metrics.jsonl", "record.json")
SCRAPS = (
    b"\xff", b"\x00", b"\n", b" ", b"0", b"9", b"-", b"e9", b"1e999", b"NaN", b"Infinity", b"[]", b"{}", b"null",
    b"true", b"false", b'"', b",", b'"epsilon":0.1,', b'"epsilon": 0.1,', b"[" * 5000, b'{"a":' * 3000, b"\\ud800",
    b'"format":1,', b'"status": "running",', b"9" * 5000,
)  # fmt: skip


def edited(content: bytes, chance: random.Random) -> bytes:
    """A file after one edit: a bit flipped, bytes cut, doubled, moved, replaced or put in."""
    start = chance.randrange(len(content) + 1)
    stop = min(len(content), start + chance.choice((0, 1, 1, 2, 5, 40)))
    before, piece, after = content[:start], content[start:stop], content[stop:]
    kind = chance.randrange(7)
    if kind == 0 and after:
        return before + piece + bytes([after[0] ^ (1 << chance.randrange(8))]) + after[1:]
    if kind == 1:
        return before + after
    if kind == 2:
        return before + piece + piece + after
    if kind == 3:
        return before + bytes(chance.randrange(256) for _ in piece) + after
    if kind == 4:
        return before + chance.choice(SCRAPS) + after
    if kind == 5:
        return before + chance.choice(SCRAPS) + content[stop + 1 :]
    return before if chance.random() < 0.5 else changed_value(content, chance)


def changed_value(content: bytes, chance: random.Random) -> bytes:
    """The same JSON with one digit or letter another, laid out as before: what a forger would do by hand."""
    places = [i for i, byte in enumerate(content) if chr(byte).isalnum()]
    if not places:
        return content
    place = chance.choice(places)
    return content[:place] + chance.choice(b"0123456789abcxyz").to_bytes(1, "big") + content[place + 1 :]


def claims(path: Path) -> Any:
    """Everything a run's files say, as plain values that compare; but for the timing, which verify names."""
    run = Run.open(path)
    saved = run.checkpoint
    record = {name: value for name, value in run.record.items() if name != "timing"}
    return (run.plan, run.ledger, record, run.epochs, saved.step, saved.identity, plain(saved.state))


def plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (str(value.dtype), tuple(value.shape), value.detach().contiguous().numpy().tobytes())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def try_edits(path: Path, count: int, seed: int) -> dict[str, int]:
    """Edit a run `count` times, one file at a time, and put it back; counts what `verify` said."""
    chance, original, seen = random.Random(seed), claims(path), {"refused": 0, "same": 0, "changed": 0}
    for _ in range(count):
        file = path / chance.choice(FILES)
        content = file.read_bytes()
        file.write_bytes(edited(content, chance))
        found = verify(path, independent=False)
        if not found.passed:
            seen["refused"] += 1
        else:
            seen["same" if claims(path) == original else "changed"] += 1
        json.dumps([found.reasons, found.unchecked])
        file.write_bytes(content)
    return seen
