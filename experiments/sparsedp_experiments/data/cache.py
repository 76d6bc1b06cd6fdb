"""A disk cache of decoded data: written atomically, readable by its owner alone, and never in the way.

A cache that cannot be read or written costs time, not correctness: it is logged and the work is done again.

**Privacy.** Cached files hold private records, decoded. They stay on this machine, in a folder of mode 700.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from sparsedp._files import cache_dir, replaced

logger = logging.getLogger(__name__)

Arrays = dict[str, npt.NDArray[Any]]


def cached_arrays(fingerprint: str, expected: tuple[str, ...], make: Callable[[], Arrays]) -> Arrays:
    """The arrays `make` returns, from disk when they were made before under the same fingerprint."""
    path = cache_path(fingerprint, ".safetensors")
    if path.exists():
        try:
            arrays = load_file(path)
            if set(arrays) == set(expected):
                return arrays
            logger.warning("cache file %s holds %s, expected %s: made again", path, sorted(arrays), expected)
        except (OSError, SafetensorError) as error:
            logger.warning("cache file %s cannot be read (%s): made again", path, error)
    made = {name: np.ascontiguousarray(array) for name, array in make().items()}
    try:
        with replaced(path) as partial:
            save_file(made, partial)
    except (OSError, SafetensorError) as error:
        logger.warning("cache file %s cannot be written (%s): it will be made again next time", path, error)
    return made


def cache_path(fingerprint: str, suffix: str) -> Path:
    """The cache file of a fingerprint."""
    return cache_dir() / "decoded" / (hashlib.sha256(fingerprint.encode()).hexdigest()[:32] + suffix)
