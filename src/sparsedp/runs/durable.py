"""Files that are on disk when a call returns, and have one writer. POSIX."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from sparsedp.errors import PrivacyError


def lock(file: int, path: Path) -> None:
    """Take the file for this process, or say who cannot: the lock goes with the open file, not with the process."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise PrivacyError(
            f"{path} is in use by another run; wait for it, or use another directory"
        ) from error


def publish(draft: Path, path: Path) -> None:
    """Give a finished draft its name, unless that is taken."""
    try:
        os.link(draft, path)
    except FileExistsError as error:
        raise PrivacyError(
            f"{path} exists; resume that run, or choose another directory for a new one"
        ) from error
    except OSError:  # a file system without hard links
        if path.exists():
            raise
        os.rename(draft, path)


def write(file: int, data: bytes) -> None:
    """Append all bytes and wait until they are on disk."""
    while data:
        data = data[os.write(file, data) :]
    os.fsync(file)


def sync_directory(path: Path) -> None:
    """Wait until a directory's entries are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
