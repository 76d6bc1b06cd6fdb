"""Columns of a table into sparse numbers, by rules fixed before any row is read.

A rule depends on its own public fields and on the row at hand, never on other rows: no categories, means or ranges
are learned from private data.
"""

from __future__ import annotations

import math
import re
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import sparse

from sparsedp.errors import DataError
from sparsedp_experiments.data.bundle import Sparse

_CODE = re.compile(r"([VE]?)0*(\d{1,3})(?:\.(\d{0,2}))?")


@dataclass(frozen=True, slots=True)
class CodeRange:
    """Consecutive three-digit classes with one prefix."""

    prefix: str
    first: int
    last: int

    @property
    def size(self) -> int:
        return self.last - self.first + 1


ICD9_RANGES = (CodeRange("", 1, 999), CodeRange("V", 1, 91), CodeRange("E", 0, 30), CodeRange("E", 800, 999))
"""The classification: diseases and injuries, supplementary factors (V), external causes (E)."""

_DIABETES = 250
_DIABETES_KINDS = 10
_DIABETES_TYPES = 4
_DIABETES_START = sum(part.size for part in ICD9_RANGES)

ICD9_OTHER = _DIABETES_START + _DIABETES_KINDS * _DIABETES_TYPES
"""The slot of everything that is not a code."""

ICD9_SLOTS = ICD9_OTHER + 1
"""One slot for each three-digit class, for each of the 40 diabetes codes 250.00 to 250.93, and for anything else."""


def icd9_slot(code: str) -> int:
    """The slot of a code: its three-digit class, or for diabetes with digits after the point, the full code."""
    match = _CODE.fullmatch(code.strip().upper())
    if match is None:
        return ICD9_OTHER
    prefix, number, detail = match[1], int(match[2]), match[3]
    if prefix == "" and number == _DIABETES and detail:
        kind, type_ = int(detail[0]), int(detail[1:] or 0)
        return _DIABETES_START + _DIABETES_TYPES * kind + type_ if type_ < _DIABETES_TYPES else ICD9_OTHER
    start = 0
    for part in ICD9_RANGES:
        if part.prefix == prefix and part.first <= number <= part.last:
            return start + number - part.first
        start += part.size
    return ICD9_OTHER


MISSING = "?"

Table = Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class ColumnRule:
    """A rule from a column, or a few, to some numbers per row."""

    column: str

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def encode(self, table: Table) -> sparse.csr_array:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Category(ColumnRule):
    """One-hot over a public list, plus one slot for any value not on it.

    A missing value, and one in `silent` (such as a drug not given), is all zeros.
    """

    levels: tuple[str, ...]
    silent: tuple[str, ...] = ()

    def encode(self, table: Table) -> sparse.csr_array:
        place = {level: slot for slot, level in enumerate(self.levels)}
        slots, silent = len(self.levels), {MISSING, *self.silent}
        return _one_hot(table[self.column], lambda value: place.get(value, slots), silent, slots + 1)


@dataclass(frozen=True, slots=True)
class Number(ColumnRule):
    """A number clamped to public bounds and mapped to [0, 1], on a logarithmic scale if asked."""

    low: float
    high: float
    logarithmic: bool = False

    def encode(self, table: Table) -> sparse.csr_array:
        try:
            raw = np.array([math.nan if value == MISSING else float(value) for value in table[self.column]])
        except ValueError as error:
            raise DataError(f"column {self.column}: {error}; expected a number or {MISSING!r}") from error
        reach = self.high - self.low
        share = (np.clip(np.nan_to_num(raw, nan=self.low), self.low, self.high) - self.low) / reach
        if self.logarithmic:
            share = np.log1p(share * reach) / math.log1p(reach)
        return sparse.csr_array(share.astype(np.float32)[:, None])


@dataclass(frozen=True, slots=True)
class Hashed(ColumnRule):
    """One-hot over a fixed number of buckets, for a column whose levels no public list gives."""

    buckets: int

    def encode(self, table: Table) -> sparse.csr_array:
        def bucket(value: str) -> int:
            return zlib.crc32(value.encode()) % self.buckets

        return _one_hot(table[self.column], bucket, {MISSING}, self.buckets)


@dataclass(frozen=True, slots=True)
class Diagnoses(ColumnRule):
    """Which ICD-9 codes occur in any of some columns, named with a slash between them."""

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.column.split("/"))

    def encode(self, table: Table) -> sparse.csr_array:
        parts = [_one_hot(table[column], icd9_slot, {MISSING}, ICD9_SLOTS) for column in self.columns]
        return sum(parts[1:], parts[0]).sign()


def encode(table: Table, blocks: Sequence[ColumnRule], unit_norm: bool) -> Sparse:
    """Every block of every row, side by side; `unit_norm` scales each record to length one."""
    found = sparse.hstack([block.encode(table) for block in blocks], format="csr")
    if unit_norm:
        norms = np.sqrt(found.astype(np.float64).power(2).sum(axis=1))
        found.data = (found.data / np.repeat(norms, np.diff(found.indptr))).astype(np.float32)
    return Sparse(found)


def _one_hot(
    values: Sequence[str], slot_of: Callable[[str], int], silent: set[str], width: int
) -> sparse.csr_array:
    slots = {value: -1 if value in silent else slot_of(value) for value in set(values)}
    chosen = np.fromiter((slots[value] for value in values), dtype=np.int64, count=len(values))
    rows = np.flatnonzero(chosen >= 0)
    ones = np.ones(len(rows), dtype=np.float32)
    return sparse.csr_array((ones, (rows, chosen[rows])), shape=(len(values), width))


Known = tuple[Callable[[str], bool], str]
"""Whether a value is one of those expected, and those expected in words."""


def read_columns(
    path: Path,
    columns: Sequence[str],
    known: Mapping[str, Known],
    *,
    header: Sequence[str] | None = None,
    member: str = "",
) -> Table:
    """These columns of a table, as strings without the spaces around them.

    Args:
        path: the file, which may be gzipped, or a zip with a file `member`.
        columns: the names of the columns to keep.
        known: columns whose every value is checked.
        header: the names of all columns, for a file of UCI's without a line of names; a bar starts a remark there.
        member: what the file is called in a zip.
    """
    try:
        with ExitStack() as stack:
            source: Any = path
            if path.suffix == ".zip":
                archive = stack.enter_context(zipfile.ZipFile(path))
                name = next((name for name in archive.namelist() if name.endswith(member)), member)
                source = stack.enter_context(archive.open(name))
            frame = pd.read_csv(
                source, dtype=str, keep_default_na=False, skipinitialspace=True, index_col=False,
                compression="gzip" if path.suffix == ".gz" else None,
                names=header, comment="|" if header else None,
            )  # fmt: skip
    except (OSError, EOFError, ValueError, KeyError, zlib.error, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: cannot be read as a table ({error})") from error
    if missing := [column for column in columns if column not in frame]:
        raise DataError(f"{path}: column {missing[0]!r} is missing; expected {', '.join(columns)}")
    if frame.empty:
        raise DataError(f"{path}: no rows")
    table = {column: frame[column].str.strip().tolist() for column in columns}
    for column, (is_known, expected) in known.items():
        for row, value in enumerate(table[column], start=1):
            if not is_known(value):
                raise DataError(f"{path}, row {row}: got {column} {value!r}, expected {expected}")
    return table
