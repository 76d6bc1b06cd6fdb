"""What lies below the lowest trained part of a model is a fixed public function: run it once, keep what it gives.

**Privacy.** Kept features are private records in another form: they stay on this machine, in a folder of mode 700.
The function is public and takes each record by itself, so training on features costs what training on records
costs.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.utils.data import Dataset

from sparsedp.core.errors import DataError, ModelError, SparseDPError
from sparsedp.core.folders import cache_dir
from sparsedp.evaluation.evaluate import evaluation_mode
from sparsedp.sampling.fetching import Collate, fetch_rows

logger = logging.getLogger("sparsedp")

AUTO = "auto"
"""Keep features in the user's cache, where the model has a fixed first part."""
BLOCK = 256
"""Records computed, and written to disk, at once."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class FeatureRows(Dataset[tuple[Tensor, Tensor]]):
    """Kept features and their targets, gathered many at a time."""

    features: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.features[index], self.targets[index]

    def rows_at(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Features and targets at these indices."""
        return self.features[indices], self.targets[indices]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """What is left to train, and the data sets as it sees them.

    Attributes:
        above: the model's parts from the first trained one on: the same modules, so training them trains the model.
        train: features of the training records.
        held_out: features of the held-out records, if there are any.
        below: digest of the fixed part, for the record.
    """

    above: nn.Sequential
    train: FeatureRows
    held_out: FeatureRows | None
    below: str


def keep_below(
    model: nn.Module,
    train: Dataset[Any],
    held_out: Dataset[Any] | None,
    collate: Collate | None,
    where: Path | str,
) -> Kept | None:
    """Run a model's fixed first parts over all records once; None where "auto" finds no such parts.

    Args:
        model: an `nn.Sequential` whose first parts are frozen.
        train: the training records.
        held_out: the records it is evaluated on, if any.
        collate: as for `fit`.
        where: a folder to keep features in, or "auto" for the user's cache.

    Raises:
        ModelError: a folder was given, and the model has no fixed first part.
        SparseDPError: the records are augmented, so there is nothing to keep.
    """
    try:
        below, above = split_at_lowest_trained(model)
    except ModelError as reason:
        if where != AUTO:
            raise
        logger.info("features are not kept: %s", reason)
        return None
    kept = keep_features(below, train, collate, where, "features of the training records")
    apart = None if held_out is None else keep_features(below, held_out, collate, where, "held-out features")
    return Kept(above, kept, apart, describe_below(below))


def split_at_lowest_trained(model: nn.Module) -> tuple[nn.Sequential, nn.Sequential]:
    """A model in a row, cut below its first part that has something to train: what is fixed, and what is trained.

    Raises:
        ModelError: it is not a row of parts, or nothing fixed comes first, or that is not a fixed function.
    """
    if not isinstance(model, nn.Sequential):
        raise ModelError(
            f"cache_features: got a {type(model).__name__}, expected an nn.Sequential, so that what is frozen is a "
            "first part of it; put the frozen body and the trained head in one: nn.Sequential(body, head)"
        )
    trained = [any(p.requires_grad for p in part.parameters()) for part in model]
    if not any(trained) or not any(True for _ in model[: trained.index(True)].parameters()):
        raise ModelError(
            "cache_features: the model's first parts are all trained, expected frozen ones to run once; freeze them "
            "with requires_grad_(False), or leave cache_features out"
        )
    cut = trained.index(True)
    parts = list(model.named_children())
    return nn.Sequential(OrderedDict(parts[:cut])), nn.Sequential(OrderedDict(parts[cut:]))


def keep_features(
    below: nn.Module, dataset: Dataset[Any], collate: Collate | None, where: Path | str, title: str
) -> FeatureRows:
    """The features of every record, from disk if they are there, else computed into it; goes on after a kill.

    Args:
        below: the fixed function; it runs in evaluation mode.
        dataset: of (input, target) records.
        collate: as for `fit`.
        where: a folder, or "auto" for the user's cache.
        title: of the progress bar.

    Raises:
        DataError: the records are not (input, target), or differ each time they are read (augmentation).
    """
    rows = len(cast("Any", dataset))
    read = _reader(dataset, collate)
    _refuse_random(read, rows)
    key, targets = _key_and_targets(below, read, rows)
    folder = (kept_folder() if where == AUTO else Path(where)) / key
    with evaluation_mode(below):
        shape = (rows, *below(read(0, 1)[0]).shape[1:])
        values = _File(folder, shape).filled(lambda start, stop: below(read(start, stop)[0]), title)
    return FeatureRows(values, targets)


def kept_folder() -> Path:
    """Where features are kept unless another folder is named: in the user's cache."""
    return cache_dir() / "features"


@dataclass(frozen=True, slots=True)
class _File:
    """Features in one mapped file, and beside it the digest of every block that is complete."""

    folder: Path
    shape: tuple[int, ...]

    def filled(self, compute: Callable[[int, int], Tensor], title: str) -> Tensor:
        """All features; blocks whose digest is there and right are not computed again."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self.folder / "blocks.jsonl").open("a+") as journal:
            fcntl.flock(journal, fcntl.LOCK_EX)
            room = self._room()
            done = self._complete(room, journal)
            starts = range(done * BLOCK, self.shape[0], BLOCK)
            screen = Console(stderr=True)
            shown = track(starts, title, console=screen, disable=not screen.is_terminal)
            for start in shown:
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

    def _room(self) -> npt.NDArray[np.float32]:
        try:
            room = np.load(self._path, mmap_mode="r+", allow_pickle=False)
            if room.shape == self.shape and room.dtype == np.float32:
                return cast("npt.NDArray[np.float32]", room)
            logger.warning("kept features in %s have another shape: made again", self.folder)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            logger.warning("kept features in %s cannot be read (%s): made again", self.folder, error)
        (self.folder / "blocks.jsonl").write_text("")
        return cast(
            "npt.NDArray[np.float32]",
            np.lib.format.open_memmap(self._path, mode="w+", dtype=np.float32, shape=self.shape),
        )

    def _complete(self, room: npt.NDArray[np.float32], journal: Any) -> int:
        """How many first blocks are as they were written; what comes after is dropped from the journal."""
        journal.seek(0)
        good: list[str] = []
        for number, line in enumerate(journal.read().splitlines()):
            block = room[number * BLOCK : (number + 1) * BLOCK]
            if not len(block) or line != json.dumps(_digest(block)):
                logger.warning("kept features in %s are damaged at block %d: made again", self.folder, number)
                break
            good.append(line)
        journal.seek(0)
        journal.truncate()
        journal.write("".join(f"{line}\n" for line in good))
        return len(good)


def _key_and_targets(
    below: nn.Module, read: Callable[[int, int], tuple[Tensor, Tensor]], rows: int
) -> tuple[str, Tensor]:
    """A digest of the function and of every input (others are other features), and all targets, in one reading."""
    targets = []
    digest = hashlib.blake2b(digest_size=16)
    digest.update(describe_below(below).encode())
    for start in range(0, rows, BLOCK):
        inputs, wanted = read(start, min(start + BLOCK, rows))
        targets.append(wanted)
        digest.update(f"{inputs.dtype} {tuple(inputs.shape)}".encode())
        digest.update(inputs.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest(), torch.cat(targets)


def describe_below(below: nn.Module) -> str:
    """SHA-256 of the structure and every tensor of the fixed part. Public, as the part is."""
    digest = hashlib.sha256(repr(below).encode())
    for name, value in below.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _digest(block: npt.NDArray[np.float32]) -> str:
    return hashlib.blake2b(np.ascontiguousarray(block).data, digest_size=16).hexdigest()


def _reader(dataset: Dataset[Any], collate: Collate | None) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    def read(start: int, stop: int) -> tuple[Tensor, Tensor]:
        rows = fetch_rows(dataset, np.arange(start, stop), collate)
        fits = isinstance(rows, (tuple, list)) and len(rows) == 2 and all(isinstance(x, Tensor) for x in rows)
        if not fits:
            raise DataError(
                "cache_features: expected a data set of (input, target) tensors; leave cache_features out for others"
            )
        return rows[0], rows[1]

    return read


def _refuse_random(read: Callable[[int, int], tuple[Tensor, Tensor]], rows: int) -> None:
    """Augmentation gives other features each time: nothing to keep."""
    rows = min(32, rows)
    first, again = read(0, rows)[0], read(0, rows)[0]
    if not torch.equal(first, again):
        raise SparseDPError(
            "cache_features: the same records give something else when read again (data augmentation), so their "
            "features cannot be kept; leave cache_features out, or the augmentation"
        )
