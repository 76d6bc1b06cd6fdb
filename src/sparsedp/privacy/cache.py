"""A small cache on disk, per user. It may lose, refuse or garble anything: nothing depends on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sparsedp.core.files import replaced
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
    try:
        with replaced(_path(request)) as partial:
            partial.write_text(canonical({"request": request, "answer": answer}), encoding="utf-8")
    except OSError:
        return


def _path(request: dict[str, Any]) -> Path:
    return cache_dir() / "calibration" / f"{sha256(canonical(request))}.json"
