"""Features that take long to compute, kept on disk in a file that is mapped into memory, its digest beside it.

**Privacy.** The file holds private records, one by one. It stays on this machine, in a folder of mode 700.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparsedp._files import read_json, replaced, write_json
from sparsedp.errors import DataError
from sparsedp_experiments.data.bundle import DataBundle, Split
from sparsedp_experiments.data.cache import cache_path
from sparsedp_experiments.data.features import Dense
from sparsedp_experiments.data.files import shown

logger = logging.getLogger(__name__)

STEP = 512
"""Records computed at once."""


Compute = Callable[[Tensor], Tensor]
"""The features of the records at some indices."""


def with_features(
    bundle: DataBundle,
    compute: Callable[[Split, str], Compute],
    shape: tuple[int, ...],
    dtype: npt.DTypeLike,
    *,
    key: str | None,
    title: str,
) -> DataBundle:
    """A bundle with features in place of its inputs, on both sides; see `kept_features`.

    `compute` gives, for the records of a side and its name, what makes their features; `shape` is that of one record.
    `key`, what the features depend on besides the side, is the new bundle's fingerprint.
    """

    def featurize(split: Split, side: str) -> Split:
        values = kept_features(
            compute(split, side),
            (len(split), *shape),
            dtype,
            None if key is None else f"{key}|{side}|{len(split)}",
            f"{title}, {side}",
        )
        return replace(split, features=Dense(values))

    return replace(
        bundle,
        train=featurize(bundle.train, "train"),
        test=featurize(bundle.test, "test"),
        fingerprint=key,
    )


def kept_features(
    compute: Compute,
    shape: tuple[int, ...],
    dtype: npt.DTypeLike,
    key: str | None,
    title: str,
) -> Tensor:
    """Features of all `shape[0]` records, from their file or computed into it; in memory where there can be none.

    Args:
        compute: the features of the records at some indices.
        shape: of all features, records first.
        dtype: they are kept in.
        key: what they depend on; None keeps nothing on disk.
        title: of the progress bar.
    """
    path = None if key is None else cache_path(key, ".npy")
    if path is not None:
        existing = _mapped(path, shape, dtype)
        if existing is not None:
            return torch.from_numpy(existing)
        try:
            with replaced(path) as partial:
                room = np.lib.format.open_memmap(partial, mode="w+", dtype=dtype, shape=shape)
                _fill(compute, room, title)
                room.flush()
            _note(path)
            written = _mapped(path, shape, dtype)
            if written is not None:
                return torch.from_numpy(written)
        except OSError as error:
            logger.warning("features cannot be kept in %s (%s): they stay in memory", path, error)
    memory = np.empty(shape, dtype=dtype)
    _fill(compute, memory, title)
    return torch.from_numpy(memory)


def _fill(compute: Compute, room: npt.NDArray[Any], title: str) -> None:
    for start in shown(range(0, len(room), STEP), title):
        stop = min(start + STEP, len(room))
        room[start:stop] = compute(torch.arange(start, stop)).numpy()


def _mapped(path: Path, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any] | None:
    """The file mapped into memory (changes stay private), or None when it is not there or not what it should be."""
    if not path.exists():
        return None
    try:
        values: npt.NDArray[Any] = np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        logger.warning("cache file %s cannot be read (%s): made again", path, error)
        return None
    if values.dtype != dtype or values.shape != shape:
        logger.warning(
            "cache file %s holds %s %s, expected %s %s", path, values.dtype, values.shape, dtype, shape
        )
        return None
    if not _as_written(path):
        logger.warning("cache file %s is not as it was written: made again", path)
        return None
    return values


def _note(path: Path) -> None:
    """Write down what a file is, beside it."""
    write_json(_beside(path), {**_touched(path), "blake2b": _digest(path)})


def _as_written(path: Path) -> bool:
    """Whether a file is what was noted; read through only if it was touched since."""
    try:
        noted = read_json(_beside(path))
    except DataError:
        return False
    if not isinstance(noted, dict) or noted.get("blake2b") is None:
        return False
    if _touched(path).items() <= noted.items():
        return True
    return bool(noted["blake2b"] == _digest(path))


def _beside(path: Path) -> Path:
    return path.with_suffix(".json")


def _touched(path: Path) -> dict[str, int]:
    found = path.stat()
    return {"size": found.st_size, "changed_ns": found.st_mtime_ns}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
