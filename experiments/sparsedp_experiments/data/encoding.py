"""Columns of a table into sparse numbers, by rules fixed before any row is read.

A block encodes one or several columns. What it does depends on its own public fields and on the row at hand, never on
other rows: no categories, means or ranges are learned from private data.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from scipy import sparse

from sparsedp.errors import DataError
from sparsedp_experiments.data import icd9
from sparsedp_experiments.data.features import Sparse

MISSING = "?"

Table = Mapping[str, Sequence[str]]


class ColumnRule(Protocol):
    """A rule from columns to `width` numbers per row."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns it reads."""
        ...

    @property
    def width(self) -> int:
        """How many numbers it makes of a row."""
        ...

    def names(self) -> list[str]:
        """A name for each of them."""
        ...

    def encode(self, table: Table) -> sparse.csr_array:
        """The non-zeros of every row."""
        ...


@dataclass(frozen=True, slots=True)
class Category:
    """One-hot over a public list, plus one slot for any value not on it.

    A missing value, and one in `silent` (such as a drug not given), is all zeros.
    """

    column: str
    levels: tuple[str, ...]
    silent: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns it reads."""
        return (self.column,)

    @property
    def width(self) -> int:
        """Levels and the slot for others."""
        return len(self.levels) + 1

    def names(self) -> list[str]:
        """column=level."""
        return [f"{self.column}={level}" for level in (*self.levels, "other")]

    def encode(self, table: Table) -> sparse.csr_array:
        """A one per row."""
        place = {level: slot for slot, level in enumerate(self.levels)}
        return _one_hot(
            table[self.column],
            lambda value: place.get(value, len(self.levels)),
            {MISSING, *self.silent},
            self.width,
        )


@dataclass(frozen=True, slots=True)
class Ordinal:
    """Ordered levels as one number: k/n for the k-th of n; missing, silent and unknown values are 0."""

    column: str
    levels: tuple[str, ...]
    silent: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns it reads."""
        return (self.column,)

    @property
    def width(self) -> int:
        """One."""
        return 1

    def names(self) -> list[str]:
        """The column."""
        return [self.column]

    def encode(self, table: Table) -> sparse.csr_array:
        """A number in (0, 1] for each known level."""
        rank = {level: (k + 1) / len(self.levels) for k, level in enumerate(self.levels)}
        values = np.array([rank.get(value, 0.0) for value in table[self.column]], dtype=np.float32)
        return sparse.csr_array(values[:, None])


@dataclass(frozen=True, slots=True)
class Number:
    """A number clamped to public bounds and mapped to [0, 1], on a logarithmic scale if asked."""

    column: str
    low: float
    high: float
    logarithmic: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns it reads."""
        return (self.column,)

    @property
    def width(self) -> int:
        """One."""
        return 1

    def names(self) -> list[str]:
        """The column."""
        return [self.column]

    def encode(self, table: Table) -> sparse.csr_array:
        """Clamped and scaled."""
        try:
            raw = np.array([math.nan if value == MISSING else float(value) for value in table[self.column]])
        except ValueError as error:
            raise DataError(f"column {self.column}: {error}; expected a number or {MISSING!r}") from error
        share = (np.clip(np.nan_to_num(raw, nan=self.low), self.low, self.high) - self.low) / (
            self.high - self.low
        )
        if self.logarithmic:
            share = np.log1p(share * (self.high - self.low)) / math.log1p(self.high - self.low)
        return sparse.csr_array(share.astype(np.float32)[:, None])


@dataclass(frozen=True, slots=True)
class Hashed:
    """One-hot over a fixed number of buckets, for a column whose levels no public list gives."""

    column: str
    buckets: int

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns it reads."""
        return (self.column,)

    @property
    def width(self) -> int:
        """The buckets."""
        return self.buckets

    def names(self) -> list[str]:
        """column#bucket."""
        return [f"{self.column}#{bucket}" for bucket in range(self.buckets)]

    def encode(self, table: Table) -> sparse.csr_array:
        """A one per row."""
        return _one_hot(
            table[self.column], lambda value: zlib.crc32(value.encode()) % self.buckets, {MISSING}, self.width
        )


@dataclass(frozen=True, slots=True)
class Diagnoses:
    """Which ICD-9 codes occur in any of some columns."""

    columns: tuple[str, ...]

    @property
    def width(self) -> int:
        """The public code ranges."""
        return icd9.SLOTS

    def names(self) -> list[str]:
        """columns=code."""
        return [f"{'/'.join(self.columns)}={icd9.name(slot)}" for slot in range(icd9.SLOTS)]

    def encode(self, table: Table) -> sparse.csr_array:
        """A one per distinct code of the row."""
        parts = [_one_hot(table[column], icd9.slot, {MISSING}, self.width) for column in self.columns]
        return sum(parts[1:], parts[0]).sign()


def encode(table: Table, blocks: Sequence[ColumnRule], unit_norm: bool) -> Sparse:
    """Every block of every row, side by side; `unit_norm` scales each record to length one."""
    found = sparse.hstack([block.encode(table) for block in blocks], format="csr")
    values = found.data
    if unit_norm:
        norms = np.sqrt(found.astype(np.float64).power(2).sum(axis=1))
        values = (values / np.repeat(norms, np.diff(found.indptr))).astype(np.float32)
    return Sparse(
        torch.from_numpy(found.indptr.astype(np.int64)),
        torch.from_numpy(found.indices.astype(np.int32)),
        torch.from_numpy(values),
        found.shape[1],
    )


def feature_names(blocks: Sequence[ColumnRule]) -> list[str]:
    """A name for each input of the encoded table."""
    return [name for block in blocks for name in block.names()]


def _one_hot(
    values: Sequence[str], slot_of: Callable[[str], int], silent: set[str], width: int
) -> sparse.csr_array:
    slots = {value: -1 if value in silent else slot_of(value) for value in set(values)}
    chosen = np.fromiter((slots[value] for value in values), dtype=np.int64, count=len(values))
    rows = np.flatnonzero(chosen >= 0)
    ones = np.ones(len(rows), dtype=np.float32)
    return sparse.csr_array((ones, (rows, chosen[rows])), shape=(len(values), width))
