"""The folder of everything that is cached."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

CACHE_VARIABLE = "SPARSEDP_CACHE"


def cache_dir() -> Path:
    """The per-user cache: SPARSEDP_CACHE, else the system's (on Linux XDG_CACHE_HOME/sparsedp, ~/.cache/sparsedp)."""
    explicit = os.environ.get(CACHE_VARIABLE)
    return Path(explicit) if explicit else platformdirs.user_cache_path("sparsedp", appauthor=False)
