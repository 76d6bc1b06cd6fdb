"""The folder of everything that is cached."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "SPARSEDP_CACHE"


def cache_dir() -> Path:
    """The per-user cache: SPARSEDP_CACHE, else XDG_CACHE_HOME/sparsedp, else ~/.cache/sparsedp."""
    explicit = os.environ.get(CACHE_VARIABLE)
    if explicit:
        return Path(explicit)
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (caches if caches.is_absolute() else Path.home() / ".cache") / "sparsedp"
