"""Who may write to the log: `dp_accounting` never, and nobody while private data are summed."""

from __future__ import annotations

import logging
import warnings
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


@contextmanager
def no_messages() -> Iterator[None]:
    """Drop Python warnings and this library's log records while inside.

    A message is an output of the run. One that is written, or not, because of a record tells of that record.

    **Edge cases.** What the user's model, loss or data set print or log themselves is theirs, and passes.
    """
    logger, silence = logging.getLogger("sparsedp"), _Nothing()
    logger.addFilter(silence)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.removeFilter(silence)


class _FromLibrary:
    def filter(self, record: logging.LogRecord) -> bool:
        return "dp_accounting" not in record.pathname


class _Nothing:
    def filter(self, record: logging.LogRecord) -> bool:
        return False
