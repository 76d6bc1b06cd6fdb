"""Freed memory kept for the next batch."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt."""
_NEVER, _LARGE = 2**31 - 1, 2**30
_kept = False


def keep_freed_memory() -> bool:
    """Let this process keep freed memory below a gigabyte a piece instead of giving it back page by page.

    Every batch needs the same tens of megabytes again, and the page faults of asking for them anew can cost more than
    the arithmetic. For the whole process, so the command line calls it and `fit` does not; call it first thing in a
    program of your own. Results are the same to the bit.

    Returns:
        Whether the C library knows how; only glibc does.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    kept = bool(mallopt(_TRIM_THRESHOLD, _NEVER)) and bool(mallopt(_MMAP_THRESHOLD, _LARGE))
    global _kept
    _kept = _kept or kept
    return kept


def give_back_freed_memory() -> None:
    """Give memory that was freed back to the system, unless `keep_freed_memory` was asked to keep it.

    For use before something large is made; the pages are asked for again when they are needed.
    """
    if _kept:
        return
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):
        return
