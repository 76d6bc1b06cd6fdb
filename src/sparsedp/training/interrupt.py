"""Ctrl-C between two steps rather than inside one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Hold back the first Ctrl-C: the function given says whether there was one. A second one acts at once.

    **Edge cases.** Outside the main thread, where Python delivers no signals, nothing is held back.
    """
    asked = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, before)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield lambda: False
        return
    signal.signal(signal.SIGINT, remember)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
