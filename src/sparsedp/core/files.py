"""Files that are either the old or the new, never half of one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from sparsedp.core.errors import DataError

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
    """Write a JSON document atomically, for people to read."""
    write_atomically(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Json:
    """Read a JSON document.

    Raises:
        DataError: the file is missing or not JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing; is {path.parent} the folder of a run?") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is damaged: not JSON ({error})") from error
