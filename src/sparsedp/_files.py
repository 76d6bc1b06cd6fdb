"""Files that are either the old or the new, never half of one; JSON that is read strictly."""

from __future__ import annotations

import fcntl
import json
import math
import os
from pathlib import Path
from typing import Any

from sparsedp.errors import DataError, PrivacyError

Json = Any
"""None, bool, int, float, str, and lists and string-keyed dicts of them."""


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file's content so that a reader, a kill or a power cut sees the old or the new, whole.

    The content is on disk before it gets its name; the name itself may come to disk a little later.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Json) -> None:
    write_atomically(path, readable_json(value))


def readable_json(value: Json) -> bytes:
    """A JSON document for people to read; one value has one text."""
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()


def read_json(path: Path) -> Json:
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing; is {path.parent} the folder of a run?") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error})") from error
    return parse_json(content, str(path))


def parse_json(content: bytes | str, name: str) -> Json:
    """The value of a JSON text, in which every key stands once and every number is finite."""
    try:
        return json.loads(
            content, object_pairs_hook=_object, parse_constant=_finite_float, parse_float=_finite_float
        )
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name} is damaged: not JSON ({error})") from error


def _object(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in an object")
    return found


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def lock_file(file: int, path: Path) -> None:
    """Take the file for this process, or say who cannot: the lock goes with the open file, not with the process."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise PrivacyError(
            f"{path} is in use by another run; wait for it, call its pause() if this process started it, or use "
            "another directory"
        ) from error


def append_durably(file: int, data: bytes) -> None:
    """Append all bytes and wait until they are on disk."""
    while data:
        data = data[os.write(file, data) :]
    os.fsync(file)


def sync_directory(path: Path) -> None:
    """Wait until a directory's entries are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
