"""How the inputs of a data set are kept in memory: compact on the shelf, float32 when fetched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from sparsedp.errors import DataError

_SLICE = 512


class Features(Protocol):
    """The inputs of some records, fetched many at a time."""

    def __len__(self) -> int:
        """Number of records."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one record."""
        ...

    def batch(self, indices: Tensor) -> Tensor:
        """The records at these indices, stacked, as the model eats them."""
        ...

    def select(self, indices: Tensor) -> Features:
        """The records at these indices as features of their own."""
        ...


@dataclass(frozen=True, slots=True)
class PixelScale:
    """A public affine map from stored to model values: value * scale + shift, one number per channel or one for all.

    **Privacy.** Data-independent as long as its constants are; those below are.
    """

    scale: tuple[float, ...]
    shift: tuple[float, ...]

    @classmethod
    def from_moments(cls, mean: tuple[float, ...], std: tuple[float, ...]) -> PixelScale:
        """Bytes to (value/255 - mean) / std."""
        return cls(tuple(1 / (255 * s) for s in std), tuple(-m / s for m, s in zip(mean, std, strict=True)))


UNIT = PixelScale((1 / 255,), (0.0,))
"""Bytes to [0, 1]."""

CENTRED = PixelScale((2 / 255,), (-1.0,))
"""Bytes to [-1, 1]."""

MNIST_PUBLISHED = PixelScale.from_moments((0.1307,), (0.3081,))
"""The moments everyone uses for MNIST: computed from it by others, so for papers' tables, not for private data."""

CIFAR10_PUBLISHED = PixelScale.from_moments((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
"""The moments everyone uses for CIFAR-10, with the same reservation."""

PIXELS: Mapping[str, PixelScale] = MappingProxyType(
    {
        "unit": UNIT,
        "centred": CENTRED,
        "mnist-published": MNIST_PUBLISHED,
        "cifar10-published": CIFAR10_PUBLISHED,
    }
)
"""The pixel scales by the names configurations use."""


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """A tensor of records [N, ...]: float32 or integer ids as they are, bytes and half floats turned into float32.

    With `rows`, only those records, in that order: a selection shares its values, which may be a file in memory.
    """

    values: Tensor
    pixels: PixelScale | None = None
    rows: Tensor | None = None

    def __post_init__(self) -> None:
        if self.values.dim() < 2:
            raise DataError(f"Dense: got values of shape {tuple(self.values.shape)}, expected [records, ...]")
        if self.values.dtype == torch.uint8 and self.pixels is None:
            raise DataError("Dense: bytes need a PixelScale such as UNIT")
        if self.pixels is not None and len(self.pixels.scale) not in (1, self.values.shape[1]):
            raise DataError(
                f"Dense: got {len(self.pixels.scale)} pixel scales for {self.values.shape[1]} channels, expected 1 "
                "or one each"
            )

    def __len__(self) -> int:
        return len(self.values if self.rows is None else self.rows)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one record."""
        return tuple(self.values.shape[1:])

    def batch(self, indices: Tensor) -> Tensor:
        """Records at these indices, ready for the model."""
        records = _gather(self.values, indices if self.rows is None else self.rows[indices])
        if self.pixels is None:
            return records
        axes = [-1, *[1] * (records.dim() - 2)]
        scale = torch.tensor(self.pixels.scale).reshape(axes)
        shift = torch.tensor(self.pixels.shift).reshape(axes)
        return torch.addcmul(shift, records, scale)

    def select(self, indices: Tensor) -> Dense:
        """These records as features of their own; the values are shared."""
        return Dense(self.values, self.pixels, indices if self.rows is None else self.rows[indices])


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
    """Records with few non-zeros, in compressed rows: record i has columns[starts[i]:starts[i+1]], weighted."""

    starts: Tensor
    columns: Tensor
    weights: Tensor
    width: int

    def __post_init__(self) -> None:
        entries = self.columns.numel()
        if self.weights.numel() != entries or self.starts.numel() < 1 or int(self.starts[-1]) != entries:
            raise DataError(
                f"Sparse: got {entries} columns, {self.weights.numel()} weights and starts that end at "
                f"{self.starts[-1:].tolist()}, expected one weight per column and starts ending there"
            )
        if entries and not 0 <= int(self.columns.min()) <= int(self.columns.max()) < self.width:
            raise DataError(f"Sparse: a column lies outside 0..{self.width - 1}")

    def __len__(self) -> int:
        return self.starts.numel() - 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one record."""
        return (self.width,)

    def batch(self, indices: Tensor) -> Tensor:
        """Records at these indices as dense float32 rows."""
        place, sizes = self._entries(indices)
        out = torch.zeros(len(indices), self.width)
        rows = torch.repeat_interleave(torch.arange(len(indices)), sizes)
        out[rows, self.columns[place].long()] = self.weights[place].to(torch.float32)
        return out

    def select(self, indices: Tensor) -> Sparse:
        """These records as features of their own (a copy)."""
        place, sizes = self._entries(indices)
        starts = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        return Sparse(starts, self.columns[place], self.weights[place], self.width)

    def _entries(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Where the entries of these records are, and how many each has."""
        begin = self.starts[indices]
        sizes = self.starts[indices + 1] - begin
        before = sizes.cumsum(0) - sizes
        offsets = torch.repeat_interleave(begin - before, sizes)
        return offsets + torch.arange(len(offsets)), sizes
