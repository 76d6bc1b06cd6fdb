"""What lies below the lowest trained part of a model is a fixed public function: run it once, keep what it gives.

**Privacy.** Kept features are private records in another form: they stay on this machine, in a folder of mode 700.
The function is public and takes each record by itself, so training on features costs what training on records
costs.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from sparsedp.core.batch import PerSampleLoss, Rows
from sparsedp.core.errors import DataError, ModelError, SparseDPError
from sparsedp.core.folders import cache_dir
from sparsedp.core.generators import SEED_BYTES, own_generators
from sparsedp.grad_sample.alone import tolerance
from sparsedp.guards.independent_rows import check_rows_stand_alone
from sparsedp.sampling.fetching import Collate, fetch_rows
from sparsedp.sampling.shapes import FixedShapes
from sparsedp.training.feature_file import BLOCK, FeatureFile
from sparsedp.training.fixed_part import (
    FixedPart,
    HeldBefore,
    MemoryWatch,
    describe_below,
    split_at_lowest_trained,
)
from sparsedp.training.held_settings import describe_held

logger = logging.getLogger("sparsedp")

AUTO = "auto"
"""Keep features in the user's cache, where the model has a fixed first part."""
FROZEN_PART = "frozen_part"
"""What a record calls the digest of the fixed part."""
PROBE_ROWS, SOME = 32, 16
"""Records that the fixed part is tried with, and those all over whose kept features are made again to see whose."""

Read = Callable[[int, int], tuple[Tensor, Tensor]]
"""Inputs and targets of the records from one number to another."""

_AUGMENTED = (
    "cache_features: the same records give something else when read again (data augmentation), so their features "
    "cannot be kept; leave cache_features out, or the augmentation"
)
_LOOKS_AT_INPUTS = (
    "cache_features: the loss is another on kept features than on the records (it looks at inputs itself, or changes "
    "them), expected one that hands the inputs to the model as they are; change records in the data set, or leave "
    "cache_features out"
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
    *,
    loss: PerSampleLoss | None = None,
    shown: bool = True,
) -> Kept | None:
    """Run a model's fixed first parts over all records once; None where "auto" finds that there is nothing to keep.

    Args:
        model: an `nn.Sequential` whose first parts are frozen.
        train: the training records.
        held_out: the records it is evaluated on, if any.
        collate: as for `fit`.
        where: a folder to keep features in, or "auto" for the user's cache.
        loss: one that calls the model itself, and so might look at inputs.
        shown: whether to draw progress bars on a terminal.

    Raises:
        ModelError: a folder was given, and the model has no fixed first part, or the loss looks at inputs.
        SparseDPError: the records are augmented, so there is nothing to keep.
    """
    try:
        below, above = split_at_lowest_trained(model)
    except ModelError as reason:
        _tell_why_nothing_is_kept(where, reason)
        return None
    tried = _tried(below, train, collate)
    if loss is not None and not tried.mean_the_same_to(loss, model, above):
        _tell_why_nothing_is_kept(where, ModelError(_LOOKS_AT_INPUTS))
        return None
    kept = tried.kept(where, "features of the training records", shown=shown)
    apart = None
    if held_out is not None:
        apart = keep_features(below, held_out, collate, where, "held-out features", shown=shown)
    return Kept(above, kept, apart, tried.name)


def _tell_why_nothing_is_kept(where: Path | str, reason: ModelError) -> None:
    if where != AUTO:
        raise reason
    logger.info("features are not kept: %s", reason)


def keep_features(
    below: nn.Module,
    dataset: Dataset[Any],
    collate: Collate | None,
    where: Path | str,
    title: str,
    *,
    shown: bool = True,
) -> FeatureRows:
    """The features of every record, from disk if they are there, else computed into it; goes on after a kill.

    Args:
        below: the fixed function; it runs in evaluation mode.
        dataset: of (input, target) records.
        collate: as for `fit`.
        where: a folder, or "auto" for the user's cache.
        title: of the progress bar.
        shown: whether to draw it on a terminal.

    Raises:
        DataError: the records are not (input, target), or differ each time they are read (augmentation).
        ModelError: the function is not fixed, or does not take every record by itself.
        PrivacyError: `collate` does not, or the function keeps something of the records.
    """
    return _tried(below, dataset, collate).kept(where, title, shown=shown)


@dataclass(frozen=True, slots=True, eq=False)
class _Tried:
    """Records and the fixed part that has been tried with the first of them.

    Attributes:
        part: the fixed part.
        watch: begun before it saw a record.
        name: its digest from that time.
        held: digest of what else its modules held then.
        read: reads records.
        rows: how many there are.
        some: the first ones, with their targets.
        features: of those.
    """

    part: FixedPart
    watch: MemoryWatch
    name: str
    held: str
    read: Read
    rows: int
    some: tuple[Tensor, Tensor]
    features: Tensor

    def kept(self, where: Path | str, title: str, *, shown: bool) -> FeatureRows:
        """The features of them all."""
        part, inputs = self.part, _Inputs.read_all(self.read, self.rows)

        def compute(start: int, stop: int) -> Tensor:
            return _storable(part.features(inputs.again(start, stop)))

        def same(kept: Tensor) -> bool:
            places = sorted({round(i * (len(kept) - 1) / (SOME - 1)) for i in range(SOME)})
            return all(part.made(self.read(i, i + 1)[0], kept[i : i + 1]) for i in places)

        file = FeatureFile(
            (kept_folder() if where == AUTO else Path(where)) / inputs.key(self.name + self.held),
            (self.rows, *self.features.shape[1:]),
            _storable(self.features[:1]).numpy().dtype,
        )
        with self.watch.untouched():
            features = file.filled(compute, same, title, shown=shown)
        return FeatureRows(features, inputs.targets, self.features.dtype)

    def mean_the_same_to(self, loss: PerSampleLoss, model: nn.Module, above: nn.Module) -> bool:
        """Whether a loss of the model on records is that of its upper part on their features.

        At weights moved at random, as a head that begins at zero gives the same for all inputs. The model is left
        as it was.
        """
        before = HeldBefore(model)
        weights = {p: p.detach().clone() for p in above.parameters() if p.requires_grad}
        try:
            _move_at_random(weights)
            of_records = _losses(loss, model, self.some)
            of_features = _losses(loss, above, (self.features, self.some[1]))
        finally:
            with torch.no_grad():
                for parameter, weight in weights.items():
                    parameter.copy_(weight)
            before.put_back()
        if of_records is None or of_features is None:
            return of_records is of_features  # of a loss that always fails the trainer says what is wrong
        return _close(of_features, of_records)


def _tried(below: nn.Module, dataset: Dataset[Any], collate: Collate | None) -> _Tried:
    rows = len(cast("Any", dataset))
    read = _reader(dataset, collate)
    check_rows_stand_alone(dataset, collate, FixedShapes())
    some = read(0, min(PROBE_ROWS, rows))
    if _digest(some[0]) != _digest(read(0, min(PROBE_ROWS, rows))[0]):
        raise SparseDPError(_AUGMENTED)
    name, held = describe_below(below), describe_held(below)
    watch, part = MemoryWatch(below, some[0]), FixedPart(below)
    with watch.untouched():
        part.refuse_if_not_fixed(some[0])
        features = part.features(some[0])
    return _Tried(part, watch, name, held, read, rows, some, features)


@torch.no_grad()
def _move_at_random(weights: Mapping[nn.Parameter, Tensor]) -> None:
    for parameter, weight in weights.items():
        with own_generators(bytes(SEED_BYTES), parameter.device):
            parameter.add_(torch.randn_like(weight), alpha=0.02 + 0.1 * float(weight.square().mean().sqrt()))


def _losses(loss: PerSampleLoss, model: nn.Module, rows: Rows) -> Tensor | None:
    """Under public random numbers; None if it cannot be computed."""
    with own_generators(bytes(SEED_BYTES), next(model.parameters()).device), torch.enable_grad():
        try:
            found = loss(model, rows)
        except Exception:  # whatever a loss may do with features
            return None
    return found.detach() if isinstance(found, Tensor) else None


def _close(found: Tensor, expected: Tensor) -> bool:
    """Equal but for rounding, measured by the largest; NaN equals NaN."""
    if found.shape != expected.shape:
        return False
    a, b = found.double(), expected.double()
    finite = b[b.isfinite()].abs()
    room = tolerance(found.dtype) * (float(finite.max()) if finite.numel() else 0.0)
    return torch.allclose(a, b, rtol=0.0, atol=room, equal_nan=True)


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

    def key(self, below: str) -> str:
        """A digest of the function, by its own, and of every input: others are other features."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(below.encode())
        for each in self.digests:
            digest.update(each)
        return digest.hexdigest()

    def again(self, start: int, stop: int) -> Tensor:
        """The inputs of a block once more, which must be what they were.

        Raises:
            SparseDPError: they are not.
        """
        inputs = self.read(start, stop)[0]
        if _digest(inputs) != self.digests[start // BLOCK]:
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
