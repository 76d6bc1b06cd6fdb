"""What a diagnostic costs: seconds, and the memory it takes beyond what was in use."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

_PROCESS = Path("/proc/self")
_RESET_PEAK = "5"


@final
class Costs:
    """Collects the cost of named pieces of work."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, float]] = {}

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Measure what is done inside; a name used twice keeps the dearer one.

        **Edge cases.** Memory is Linux's peak resident set; elsewhere it is left out.
        """
        before = _restart_peak()
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        peak = _memory("VmHWM")
        cost = {"seconds": seconds}
        if before is not None and peak is not None:
            cost["megabytes"] = max(0.0, peak - before)
        known = self._found.get(name)
        if known is None or seconds > known["seconds"]:
            self._found[name] = cost

    def to_json(self) -> dict[str, dict[str, float]]:
        """By name."""
        return dict(self._found)


def _restart_peak() -> float | None:
    """Forget the peak so far; gives the memory in use, MB."""
    try:
        (_PROCESS / "clear_refs").write_text(_RESET_PEAK)
    except OSError:
        return None
    return _memory("VmRSS")


def _memory(name: str) -> float | None:
    try:
        lines = (_PROCESS / "status").read_text().splitlines()
    except OSError:
        return None
    found = next((line.split()[1] for line in lines if line.startswith(name)), None)
    return None if found is None else int(found) / 1024
