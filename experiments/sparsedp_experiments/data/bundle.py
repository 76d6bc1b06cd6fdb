"""What a loader returns: train and test splits, how their inputs are kept in memory, and public facts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import numpy as np
import torch
from scipy import sparse
from torch import Tensor
from torch.utils.data import Dataset

from sparsedp.errors import DataError
from sparsedp.randomness import PublicRandomness

_SLICE = 512


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """A tensor of records [N, ...]: float32 or ids as they are, half floats as float32, bytes as numbers in [0, 1].

    With `rows`, only those records, in that order: a selection shares its values, which may be a file in memory.
    """

    values: Tensor
    rows: Tensor | None = None

    def __len__(self) -> int:
        return len(self.values if self.rows is None else self.rows)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape[1:])

    def batch(self, indices: Tensor) -> Tensor:
        """Records at these indices, ready for the model."""
        records = _gather(self.values, indices if self.rows is None else self.rows[indices])
        return records * (1 / 255) if self.values.dtype == torch.uint8 else records

    def select(self, indices: Tensor) -> Dense:
        """These records as features of their own; the values are shared."""
        return Dense(self.values, indices if self.rows is None else self.rows[indices])


def _gather(values: Tensor, rows: Tensor) -> Tensor:
    """Chosen records, bytes and half floats as float32; in slices, because touching fresh memory takes the time."""
    if values.dtype not in (torch.float16, torch.bfloat16, torch.uint8):
        return values.index_select(0, rows)
    out = torch.empty(len(rows), *values.shape[1:])
    for start in range(0, len(rows), _SLICE):
        out[start : start + _SLICE] = values.index_select(0, rows[start : start + _SLICE])
    return out


@dataclass(frozen=True, slots=True, eq=False)
class Sparse:
    """Records with few non-zeros: the rows of a matrix."""

    matrix: sparse.csr_array

    def __len__(self) -> int:
        return int(self.matrix.shape[0])

    @property
    def shape(self) -> tuple[int, ...]:
        return (int(self.matrix.shape[1]),)

    def batch(self, indices: Tensor) -> Tensor:
        """Records at these indices as dense float32 rows."""
        return torch.from_numpy(self.matrix[indices.numpy()].toarray()).float()

    def select(self, indices: Tensor) -> Sparse:
        """These records as features of their own (a copy)."""
        return Sparse(self.matrix[indices.numpy()])


@dataclass(frozen=True, slots=True, eq=False)
class Mirrored:
    """Some pictures, then the same ones with left and right exchanged; with `rows`, only those, in that order."""

    pictures: Dense
    rows: Tensor | None = None

    def __len__(self) -> int:
        return 2 * len(self.pictures) if self.rows is None else len(self.rows)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.pictures.shape

    def batch(self, indices: Tensor) -> Tensor:
        """The rows at these indices; without a selection the second half are the mirror images."""
        numbers = indices if self.rows is None else self.rows[indices]
        found = self.pictures.batch(numbers % len(self.pictures))
        turned = (numbers >= len(self.pictures)).view(-1, *[1] * len(self.shape))
        return torch.where(turned, found.flip(-1), found)

    def select(self, indices: Tensor) -> Mirrored:
        """These rows as features of their own."""
        return Mirrored(self.pictures, indices if self.rows is None else self.rows[indices])


Features = Dense | Sparse | Mirrored
"""The inputs of some records, fetched many at a time."""


@final
@dataclass(frozen=True, eq=False)
class Split(Dataset[tuple[Tensor, Tensor]]):
    """Records of one side of a split: a map-style data set of (input, target), with the unit of each when known.

    **Privacy.** `units` names the person behind each row. With units, protect units: a row-level epsilon does not
    protect a patient with two rows.
    """

    features: Features
    targets: Tensor
    units: Tensor | None = None

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        inputs, targets = self.rows_at(torch.tensor([index % len(self)]))
        return inputs[0], targets[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        """Many records at once, for PyTorch's data loader."""
        inputs, targets = self.rows_at(torch.tensor(indices, dtype=torch.int64))
        return list(zip(inputs, targets, strict=True))

    def rows_at(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets at these indices, stacked."""
        return self.features.batch(indices), self.targets[indices]

    @property
    def inputs(self) -> Tensor:
        """Every input as one dense tensor, made anew each time. Large data sets: prefer `rows_at`."""
        return self.features.batch(torch.arange(len(self)))

    @property
    def unit_count(self) -> int:
        """The number of units: of people, where units are known, of rows otherwise."""
        return len(self) if self.units is None else len(torch.unique(self.units))

    def class_counts(self, classes: int) -> list[int]:
        """How many records each class has. Of held-out records only: of training records the counts are private."""
        return [int(found) for found in torch.bincount(self.targets.long(), minlength=classes)]

    def select(self, indices: Tensor) -> Split:
        units = None if self.units is None else self.units[indices]
        return Split(self.features.select(indices), self.targets[indices], units)


@final
@dataclass(frozen=True, eq=False)
class DataBundle:
    """A data set ready for training, and what is public about it.

    `variant` says which form was loaded ("official", "jpeg"), `unit` what one unit is ("row" or "patient"), `notes`
    what must be said beside every figure. `fingerprint` names the files it came from by path, size and time, never by
    content; it keys the disk cache. `vocabulary` is the number of ids where inputs are ids, and `ranked` says that a
    unit's records are to be ranked among each other, as a recommender's are. `unit_norm` says of a table whether its
    records are scaled to length one; it is None for what is no table.
    """

    name: str
    variant: str
    train: Split
    test: Split
    classes: tuple[str, ...]
    unit: str = "row"
    notes: tuple[str, ...] = ()
    fingerprint: str | None = None
    vocabulary: int | None = None
    ranked: bool = False
    unit_norm: bool | None = None

    def __post_init__(self) -> None:
        for targets in (self.train.targets, self.test.targets):
            if not len(targets) or not 0 <= int(targets.min()) <= int(targets.max()) < len(self.classes):
                raise DataError(
                    f"{self.name}: a side is empty, or a target lies outside the {len(self.classes)} classes"
                )
        if self.train.units is not None and self.test.units is not None:
            both = np.intersect1d(self.train.units.numpy(), self.test.units.numpy())
            if len(both):
                raise DataError(
                    f"{self.name}: {len(both)} {self.unit}s are in both train and test; split by {self.unit}, or the "
                    "test set leaks"
                )

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.train.features.shape

    def validated(self, fraction: float = 0.1, seed: int = 0) -> DataBundle:
        """The same training data with part of it held out in place of the test set: for tuning."""
        train, validation = holdout(self.train, fraction, seed)
        notes = (*self.notes, f"validation: {fraction:g} of the training {self.unit}s, public seed {seed}")
        return replace(self, train=train, test=validation, notes=notes, fingerprint=None)


def holdout(split: Split, fraction: float, seed: int) -> tuple[Split, Split]:
    """Set a random part of a split aside: (rest, held out). Whole units go to one side.

    **Privacy.** The seed is public; which rows are held out does not depend on their values.
    **Edge cases.** Both sides keep at least one unit.
    """
    count = split.unit_count
    held = min(max(round(fraction * count), 1), count - 1)
    mask = rows_of_some_units(split, held, PublicRandomness(seed), (0,))
    return split.select((~mask).nonzero().squeeze(1)), split.select(mask.nonzero().squeeze(1))


def rows_of_some_units(split: Split, count: int, public: PublicRandomness, key: tuple[int, ...]) -> Tensor:
    """Which rows are of `count` random units."""
    owner = (
        torch.arange(len(split)) if split.units is None else torch.unique(split.units, return_inverse=True)[1]
    )
    units = int(owner.max()) + 1
    chosen = torch.zeros(units, dtype=torch.bool)
    chosen[public.permutation(units, key=key)[:count]] = True
    return chosen[owner]


def mirrored(bundle: DataBundle) -> DataBundle:
    """The training pictures with their mirror images, both one unit; the test set stays as it is.

    Train with `rows_per_unit=2`: the mean of the two gradients is clipped once, so that augmentation costs no privacy
    (De et al. 2022). With fewer rows one of the two is drawn.
    """
    train = bundle.train
    assert isinstance(train.features, Dense)
    rows = torch.arange(len(train))
    units = rows if train.units is None else train.units
    doubled = Split(
        Mirrored(train.features), torch.cat([train.targets, train.targets]), torch.cat([units, units])
    )
    return replace(
        bundle,
        variant=f"{bundle.variant}, mirrored",
        train=doubled,
        unit="picture" if train.units is None else bundle.unit,
        fingerprint=None if bundle.fingerprint is None else f"{bundle.fingerprint}|mirrored",
    )
