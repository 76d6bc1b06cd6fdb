"""What commands print, and what they exit with."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

from rich.console import Console

from sparsedp.errors import DataError


class Exit(IntEnum):
    """Exit codes; `sparsedp --help` lists them."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    DATA = 3
    PRIVACY = 4
    MISMATCH = 5
    FAILED_RUNS = 6
    INTERRUPTED = 130


EXIT_CODES: Mapping[Exit, str] = {
    Exit.OK: "all went well",
    Exit.INTERNAL: "a bug in sparsedp: there is a traceback, please report it",
    Exit.USAGE: "a wrong flag, name or value; or a folder that cannot be used",
    Exit.DATA: "data or a file of a run is missing or damaged",
    Exit.PRIVACY: "refused: it would break, overstate or overspend a guarantee",
    Exit.MISMATCH: "verify found something that does not fit, or audit a leak",
    Exit.FAILED_RUNS: "some runs of a comparison or a sweep failed",
    Exit.INTERRUPTED: "stopped by Ctrl-C; it can be continued",
}


def run_folder(path: Path) -> Path:
    """The folder of a run, as typed.

    Raises:
        DataError: there is no run.
    """
    from sparsedp.runs.directory import holds_run

    if not path.is_dir():
        raise DataError(f"{path} is no folder; give the folder of a run")
    if not holds_run(path):
        raise DataError(f"{path} holds no run; give the folder of a run")
    return path


def people(as_json: bool) -> Console:
    """Where results for people go: standard output, or nowhere when a machine reads it."""
    return Console(quiet=as_json, highlight=False, emoji=False)


def aside() -> Console:
    """Where progress, warnings and errors go: standard error."""
    return Console(stderr=True, highlight=False, emoji=False)


def emit(value: Any) -> None:
    """One JSON document on standard output; infinity is null."""
    sys.stdout.write(json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
