"""A run's JSON documents, plan, metrics and record: their one text, and back with every field's type checked."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from sparsedp._files import Json, parse_json, readable_json
from sparsedp._serialization import canonical, sha256
from sparsedp.errors import DataError, SparseDPError
from sparsedp.privacy.plan import Plan
from sparsedp.runs.folder import RECORD
from sparsedp.runs.history import EpochReport
from sparsedp.runs.record import FORMAT, Record


def plan_bytes(plan: Plan) -> bytes:
    """The plan as a file."""
    return (plan.to_json() + "\n").encode()


def metrics_bytes(epochs: Iterable[EpochReport]) -> bytes:
    """The epochs as a file: one line each."""
    return b"".join(_line(report.to_json()) for report in epochs)


def record_bytes(record: Record) -> bytes:
    """The record as a file, for people to read."""
    return readable_json(record)


def parse_plan(content: bytes, file: Path) -> Plan:
    """The plan in a file.

    Raises:
        DataError: the file is damaged.
        PrivacyError: it holds no plan that this version reads.
    """
    with intact(file):
        parse_json(content, str(file))
        return Plan.from_json(content.decode())


def parse_metrics(content: bytes, file: Path) -> tuple[EpochReport, ...]:
    """The epochs in a file.

    Raises:
        DataError: the file is damaged.
    """
    with intact(file):
        reports = []
        for number, line in enumerate(content.split(b"\n")[:-1], start=1):
            value = parse_json(line, f"{file}, line {number}")
            _check(value, EpochReport, f"{file}, line {number}")
            reports.append(EpochReport.from_json(value))
        if not content.endswith(b"\n") and content:
            raise DataError(f"{file} is damaged: its last line is cut short")
        return tuple(reports)


def parse_record(content: bytes, file: Path) -> Record:
    """The record in a file.

    Raises:
        DataError: the file is damaged, or of another format.
    """
    with intact(file):
        value = parse_json(content, str(file))
        found = value.get("format") if isinstance(value, dict) else type(value).__name__
        if found != FORMAT or isinstance(found, bool):
            raise DataError(
                f"{file}: got format {found!r}, expected {FORMAT}; records of other formats are not read"
            )
        _check(value, Record, str(file))
        return cast("Record", value)


def digest_of(name: str, content: bytes) -> str:
    """The SHA-256 of a file by which the ledger knows it; of the record without its timing.

    **Privacy.** How long a run took may depend on the data, so nothing public, a hash included, is made from it.

    Raises:
        DataError: the record is damaged.
    """
    if name == RECORD:
        content = readable_json({**parse_json(content, name), "timing": None})
    return sha256(content)


def is_canonical_plan(content: bytes) -> bool:
    """Whether a plan's file is the one text of its value."""
    return content == (canonical(parse_json(content, "plan")) + "\n").encode()


def is_canonical_record(content: bytes) -> bool:
    """Whether a record's file is the one text of its value."""
    return content == readable_json(parse_json(content, "record"))


def is_canonical_metrics(content: bytes) -> bool:
    """Whether a file of metrics is the one text of its lines."""
    lines = content.split(b"\n")[:-1]
    return content == b"".join(_line(parse_json(line, "metrics")) for line in lines)


@contextmanager
def intact(file: Path) -> Iterator[None]:
    """Say that a file is damaged, whatever reading it stumbles over.

    Raises:
        DataError: it is.
    """
    try:
        yield
    except SparseDPError:
        raise
    except Exception as error:
        raise DataError(
            f"{file} is damaged ({type(error).__name__}: {error}); restore it from a copy, or start a new run "
            "elsewhere"
        ) from error


def _line(value: Json) -> bytes:
    return (json.dumps(value, allow_nan=False) + "\n").encode()


def _check(value: Json, kind: type, where: str) -> None:
    """Refuse an object that lacks a field of `kind`, or has one of another type."""
    if not isinstance(value, dict):
        raise DataError(f"{where}: got a {type(value).__name__}, expected an object")
    for name, hint in typing.get_type_hints(kind).items():
        if name not in value:
            raise DataError(f"{where}: {name} is missing; restore the file from a copy")
        if not _fits(value[name], hint):
            raise DataError(f"{where}: got {name} {value[name]!r}, expected {hint}")


def _fits(value: Json, hint: Any) -> bool:
    """Whether a JSON value is of a type, told by an annotation."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in arguments)
    if origin in (dict, Mapping):
        return isinstance(value, dict) and all(_fits(item, arguments[1]) for item in value.values())
    if origin in (list, Sequence):
        return isinstance(value, list) and all(_fits(item, arguments[0]) for item in value)
    if typing.is_typeddict(hint):
        hints = typing.get_type_hints(hint)
        return isinstance(value, dict) and all(n in value and _fits(value[n], h) for n, h in hints.items())
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
