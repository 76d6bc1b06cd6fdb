"""A small cache on disk, per user. It may lose, refuse or garble anything: nothing depends on it."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from sparsedp.core.folders import cache_dir
from sparsedp.privacy.canonical import canonical, sha256


def load(request: dict[str, Any]) -> Any:
    """What was stored for exactly this request, or None."""
    try:
        entry = json.loads(_path(request).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or entry.get("request") != json.loads(canonical(request)):
        return None
    return entry.get("answer")


def store(request: dict[str, Any], answer: Any) -> None:
    """Remember an answer, atomically; does nothing where it cannot write."""
    path = _path(request)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    except OSError:
        return
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(canonical({"request": request, "answer": answer}))
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)


def _path(request: dict[str, Any]) -> Path:
    return cache_dir() / "calibration" / f"{sha256(canonical(request))}.json"
