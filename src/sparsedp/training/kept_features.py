"""What lies below the lowest trained part of a model is a fixed public function: run it once, keep what it gives.

**Privacy.** Kept features are private records in another form: they stay on this machine, in a folder of mode 700.
The function is public and takes each record by itself, so training on features costs what training on records
costs.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from sparsedp.core.errors import DataError, ModelError, SparseDPError
from sparsedp.core.folders import cache_dir
from sparsedp.guards.independent_rows import check_rows_stand_alone
from sparsedp.sampling.fetching import Collate, fetch_rows
from sparsedp.sampling.shapes import FixedShapes
from sparsedp.training.feature_file import BLOCK, FeatureFile
from sparsedp.training.fixed_part import FixedPart, describe_below, split_at_lowest_trained

logger = logging.getLogger("sparsedp")

AUTO = "auto"
"""Keep features in the user's cache, where the model has a fixed first part."""
FROZEN_PART = "frozen_part"
"""What a record calls the digest of the fixed part."""
PROBE_ROWS, SOME = 32, 4
"""Records that the fixed part is tried with, and those whose kept features are made again to see whose they are."""

Read = Callable[[int, int], tuple[Tensor, Tensor]]
"""Inputs and targets of the records from one number to another."""

_AUGMENTED = (
    "cache_features: the same records give something else when read again (data augmentation), so their features "
    "cannot be kept; leave cache_features out, or the augmentation"
)


@final
@dataclass(frozen=True, slots=True, eq=False)
class FeatureRows(Dataset[tuple[Tensor, Tensor]]):
    """Kept features and their targets, gathered many at a time."""

    features: Tensor
    targets: Tensor
    dtype: torch.dtype
    """What the fixed part gave; the file may hold a wider type."""

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.features[index].to(self.dtype), self.targets[index]

    def rows_at(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Features and targets at these indices."""
        return self.features[indices].to(self.dtype), self.targets[indices]


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
        ModelError: the function is not fixed, or does not take every record by itself.
        PrivacyError: `collate` does not.
    """
    rows = len(cast("Any", dataset))
    read = _reader(dataset, collate)
    check_rows_stand_alone(dataset, collate, FixedShapes())
    some = read(0, min(PROBE_ROWS, rows))[0]
    if not torch.equal(some, read(0, min(PROBE_ROWS, rows))[0]):
        raise SparseDPError(_AUGMENTED)
    part = FixedPart(below)
    part.refuse_if_not_fixed(some)
    found = part.features(some[:1])
    inputs = _Inputs.read_all(read, rows)
    key = inputs.key(below)

    def compute(start: int, stop: int) -> Tensor:
        return _storable(part.features(inputs.again(start, stop)))

    def same(kept: Tensor) -> bool:
        few = slice(0, min(SOME, len(kept)))
        return part.made(inputs.again(0, few.stop, whole=False), kept[few])

    file = FeatureFile(
        (kept_folder() if where == AUTO else Path(where)) / key,
        (rows, *found.shape[1:]),
        _storable(found).numpy().dtype,
    )
    return FeatureRows(file.filled(compute, same, title), inputs.targets, found.dtype)


def kept_folder() -> Path:
    """Where features are kept unless another folder is named: in the user's cache."""
    return cache_dir() / "features"


def _storable(features: Tensor) -> Tensor:
    """NumPy has no bfloat16; float32 holds its numbers exactly."""
    return features.float() if features.dtype == torch.bfloat16 else features


@dataclass(frozen=True, slots=True, eq=False)
class _Inputs:
    """Every record read once: its targets, and a digest of each block of inputs. Private."""

    read: Read
    targets: Tensor
    digests: tuple[bytes, ...]

    @classmethod
    def read_all(cls, read: Read, rows: int) -> _Inputs:
        """All of them, block by block."""
        targets, digests = [], []
        for start in range(0, rows, BLOCK):
            inputs, wanted = read(start, min(start + BLOCK, rows))
            targets.append(wanted)
            digests.append(_digest(inputs))
        return cls(read, torch.cat(targets), tuple(digests))

    def key(self, below: nn.Module) -> str:
        """A digest of the function and of every input: others are other features."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(describe_below(below).encode())
        for each in self.digests:
            digest.update(each)
        return digest.hexdigest()

    def again(self, start: int, stop: int, *, whole: bool = True) -> Tensor:
        """The inputs of a block once more, which must be what they were.

        Raises:
            SparseDPError: they are not.
        """
        inputs = self.read(start, stop)[0]
        if whole and _digest(inputs) != self.digests[start // BLOCK]:
            raise SparseDPError(_AUGMENTED)
        return inputs


def _digest(inputs: Tensor) -> bytes:
    digest = hashlib.blake2b(f"{inputs.dtype} {tuple(inputs.shape)}".encode(), digest_size=16)
    digest.update(inputs.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def _reader(dataset: Dataset[Any], collate: Collate | None) -> Read:
    def read(start: int, stop: int) -> tuple[Tensor, Tensor]:
        rows = fetch_rows(dataset, np.arange(start, stop), collate)
        fits = isinstance(rows, (tuple, list)) and len(rows) == 2 and all(isinstance(x, Tensor) for x in rows)
        if not fits:
            raise DataError(
                "cache_features: expected a data set of (input, target) tensors; leave cache_features out for others"
            )
        return rows[0], rows[1]

    return read
