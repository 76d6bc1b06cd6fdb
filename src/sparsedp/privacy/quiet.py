"""Keep `dp_accounting` from writing to the user's log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Drop log records from `dp_accounting`, and nothing else, while inside."""
    loggers = [logging.getLogger("absl"), logging.getLogger()]
    silence = _FromLibrary()
    for logger in loggers:
        logger.addFilter(silence)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(silence)


class _FromLibrary:
    def filter(self, record: logging.LogRecord) -> bool:
        return "dp_accounting" not in record.pathname
