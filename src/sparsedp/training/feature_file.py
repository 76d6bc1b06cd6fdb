"""Features in one mapped file, and beside it the digest of every block that is complete: checked, gone on with."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from sparsedp.core.errors import DataError

logger = logging.getLogger("sparsedp")

BLOCK = 256
"""Records computed, and written to disk, at once."""

Compute = Callable[[int, int], Tensor]
"""The features of the records from one number to another."""


@final
@dataclass(frozen=True, slots=True)
class FeatureFile:
    """Features of a public shape and type, records first, in a folder of their own."""

    folder: Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def filled(
        self, compute: Compute, same: Callable[[Tensor], bool], title: str, *, shown: bool = True
    ) -> Tensor:
        """All features; blocks whose digest is there and right are not computed again.

        `same` is shown what was kept before: where it says no, something else has made it, and all is made again.
        `shown` is whether to draw a progress bar on a terminal.

        Raises:
            DataError: the folder cannot be one.
        """
        self._make_folder()
        with (self.folder / "blocks.jsonl").open("a+") as journal:
            fcntl.flock(journal, fcntl.LOCK_EX)
            room = self._room()
            done = self._complete(room, journal)
            kept = min(done * BLOCK, self.shape[0])
            if kept and not same(torch.from_numpy(np.array(room[:kept], copy=False))):
                logger.warning("features in %s are not those of this network: made again", self.folder.parent)
                journal.truncate(0)
                done = 0
            screen = Console(stderr=True)
            starts = range(done * BLOCK, self.shape[0], BLOCK)
            for start in track(starts, title, console=screen, disable=not (shown and screen.is_terminal)):
                stop = min(start + BLOCK, self.shape[0])
                room[start:stop] = compute(start, stop).contiguous().numpy()
                cast("np.memmap[Any, Any]", room).flush()
                journal.write(json.dumps(_digest(room[start:stop])) + "\n")
                journal.flush()
                os.fsync(journal.fileno())
        return torch.from_numpy(np.load(self._path, mmap_mode="c", allow_pickle=False))

    @property
    def _path(self) -> Path:
        return self.folder / "features.npy"

    def _make_folder(self) -> None:
        """The folder and the one around it, for the owner alone: its name is a digest of private records."""
        try:
            self.folder.parent.parent.mkdir(parents=True, exist_ok=True)
            self.folder.parent.mkdir(exist_ok=True, mode=0o700)
            self.folder.mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            raise DataError(
                f"cache_features: got {self.folder.parent}, expected a folder to keep features in ({error.strerror})"
            ) from error

    def _room(self) -> npt.NDArray[Any]:
        try:
            room = np.load(self._path, mmap_mode="r+", allow_pickle=False)
            if room.shape == self.shape and room.dtype == self.dtype:
                return cast("npt.NDArray[Any]", room)
            logger.warning("kept features in %s have another shape: made again", self.folder.parent)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, EOFError) as error:
            kind = type(error).__name__  # its text may name the folder
            logger.warning("kept features in %s cannot be read (%s): made again", self.folder.parent, kind)
        (self.folder / "blocks.jsonl").write_text("")
        return np.lib.format.open_memmap(self._path, mode="w+", dtype=self.dtype, shape=self.shape)

    def _complete(self, room: npt.NDArray[Any], journal: Any) -> int:
        """How many first blocks are as they were written; what comes after is dropped from the journal."""
        journal.seek(0)
        good: list[str] = []
        for number, line in enumerate(journal.read().splitlines()):
            block = room[number * BLOCK : (number + 1) * BLOCK]
            if not len(block) or line != json.dumps(_digest(block)):
                logger.warning(
                    "kept features in %s are damaged at block %d: made again", self.folder.parent, number
                )
                break
            good.append(line)
        journal.seek(0)
        journal.truncate()
        journal.write("".join(f"{line}\n" for line in good))
        return len(good)


def _digest(block: npt.NDArray[Any]) -> str:
    return hashlib.blake2b(np.ascontiguousarray(block).data, digest_size=16).hexdigest()
