"""A column of a table and its description by public knowledge: what its values become, each by itself."""

from __future__ import annotations

import datetime
import math
import numbers
import re
import warnings
from bisect import bisect_right
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse

from sparsedp.errors import DataError

Rule = str | tuple[Any, ...] | list[Any]
"""How a column is described: one of `RULES`."""

Matrix = Any
"""A NumPy array of shape (examples, features), or a SciPy CSR matrix or array."""

Floats = npt.NDArray[np.float64]

RULES = (
    '("number", low, high), ("count", high), ("category", [levels]), ("code", "icd9", "icd10", "atc" or [prefixes]), '
    '"unit" or "drop"'
)

MISSING, OTHER = "missing", "other"
"""The levels of what is not there, and of what was not declared."""

_READ_AS_MISSING = frozenset({"", "NA", "N/A", "NaN", "nan", "<NA>", "NaT", "None", "NULL", "null", "?"})
_ARGUMENTS = {"number": 2, "count": 1, "category": 1, "code": 1, "unit": 0, "drop": 0}

_ICD10 = (
    "A00-B99 C00-D49 D50-D89 E00-E90 F00-F99 G00-G99 H00-H59 H60-H95 I00-I99 J00-J99 K00-K95 L00-L99 M00-M99 N00-N99 "
    "O00-O99 P00-P96 Q00-Q99 R00-R99 S00-T98 U00-U99 V00-Y99 Z00-Z99"
)
_ICD9 = (
    "001-139 140-239 240-279 280-289 290-319 320-389 390-459 460-519 520-579 580-629 630-679 680-709 710-739 740-759 "
    "760-779 780-799 800-999 E000-E999 V01-V91"
)
_CODE_HEADS = (re.compile(r"[A-Z]\d\w"), re.compile(r"E\d{3}|V\d\d|\d{1,3}"))
"""What a code of ICD-10 and of ICD-9 begins with."""
CODE_SYSTEMS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"icd10": tuple(_ICD10.split()), "icd9": tuple(_ICD9.split()), "atc": tuple("ABCDGHJLMNPRSV")}
)
"""Public code systems, by their chapters: ranges of the leading characters, or single letters."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column and its description, checked; bounds that are dates are in days since 1970."""

    name: Any
    kind: str
    low: float = 0.0
    high: float = 0.0
    levels: tuple[Any, ...] = ()
    dates: bool = False
    knots: int = 0

    @classmethod
    def described(cls, name: Any, rule: Rule, knots: int = 0) -> Column:
        """The column of this name under this rule."""
        kind, arguments = (rule, ()) if isinstance(rule, str) else (rule[0] if rule else "", tuple(rule[1:]))
        if _ARGUMENTS.get(kind) != len(arguments):
            raise DataError(f"columns[{name!r}]: got {rule!r}, expected {RULES}")
        if kind in ("number", "count"):
            return cls(name, kind, *_checked_bounds(name, rule, kind, arguments), knots=knots)
        if kind == "category" or (kind == "code" and not isinstance(arguments[0], str)):
            return cls(name, kind, levels=_checked_levels(name, rule, arguments[0]))
        if kind == "code":
            if arguments[0] not in CODE_SYSTEMS:
                raise DataError(f"columns[{name!r}]: got {rule!r}, expected {RULES}")
            return cls(name, kind, levels=CODE_SYSTEMS[arguments[0]])
        return cls(name, kind)

    @property
    def spare(self) -> tuple[str, ...]:
        """Names of the features for values that are missing or were not declared."""
        if self.kind in ("number", "count"):
            return (f"{self.name}={MISSING}",)
        declared = {reads_as(level) for level in self.levels}
        return tuple(f"{self.name}={level}" for level in (MISSING, OTHER) if level not in declared)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of its features."""
        if self.kind in ("unit", "drop"):
            return ()
        own = [f"{self.name}={level}" for level in self.levels] or [str(self.name)]
        return (*own, *self.spare, *(f"{self.name}~{knot}" for knot in self._knots()))

    @property
    def words(self) -> str:
        """What becomes of it, in a line."""
        if self.kind == "unit":
            return f"{self.name}: says who is protected; no feature"
        if self.kind == "drop":
            return f"{self.name}: left out"
        if self.kind == "count":
            how = f"log(1 + x) up to {self.high:g}, divided by its largest value"
        elif self.kind == "number":
            low, high = (_day(side) if self.dates else f"{side:g}" for side in (self.low, self.high))
            how = f"clamped to {low} .. {high} and mapped to -1 .. 1"
        else:
            how = f"one of {len(self.levels)} {'levels' if self.kind == 'category' else 'groups of codes'}"
        how += f", with {self.knots} knots" if self.knots and not self.levels else ""
        spare = " and ".join(name.rpartition("=")[2] for name in self.spare)
        return f"{self.name}: {self.kind}, {how}{f'; {spare} apart' if spare else ''} ({len(self.features)} features)"

    def encode(self, values: npt.NDArray[Any], as_sparse: bool = False) -> Matrix:
        """Its features, a row for each value."""
        if self.kind in ("number", "count"):
            found = self._number(values)
            return sparse.csr_matrix(found) if as_sparse else found
        places = self._places(values)
        shape = (len(places), len(self.features))
        ones = sparse.csr_matrix((np.ones(len(places)), (np.arange(len(places)), places)), shape=shape)
        return ones if as_sparse else ones.toarray()

    def _number(self, values: npt.NDArray[Any]) -> Floats:
        found = _dates(values, self.name) if self.dates else _floats(values, self.name)
        missing = np.isnan(found)
        if self.kind == "count":
            scaled = np.sign(found) * np.log1p(np.minimum(np.abs(found), self.high)) / math.log1p(self.high)
        else:
            scaled = 2 * ((np.clip(found, self.low, self.high) - self.low) / (self.high - self.low)) - 1
        features = [np.where(missing, 0.0, scaled), missing.astype(np.float64)]
        share = scaled if self.kind == "count" else (scaled + 1) / 2
        for place in range(self.knots):
            near = 1 - np.abs(np.clip(share, 0, 1) * (self.knots - 1) - place)
            features.append(np.where(missing, 0.0, np.maximum(near, 0.0)))
        return np.stack(features, axis=1)

    def _knots(self) -> Iterator[str]:
        """The value at each knot, as text."""
        for place in range(self.knots):
            share = place / (self.knots - 1)
            if self.kind == "count":
                yield f"{math.expm1(share * math.log1p(self.high)):.3g}"
            else:
                value = self.low + share * (self.high - self.low)
                yield _day(value) if self.dates else f"{value:.6g}"

    def _places(self, values: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """The number of each value's feature."""
        names = list(self.features)
        missing, other = (names.index(f"{self.name}={level}") for level in (MISSING, OTHER))
        declared = {reads_as(level): place for place, level in enumerate(self.levels)}

        @lru_cache(maxsize=None, typed=True)  # 1 and True are equal, and read differently
        def place(value: Any) -> int:
            if is_missing(value):
                return missing
            text = reads_as(value)
            if text in declared:
                return declared[text]
            if text in _READ_AS_MISSING:
                return missing
            found = self._group(text) if self.kind == "code" else None
            return other if found is None else found

        hashable = (value if isinstance(value, Hashable) else str(value) for value in values.tolist())
        return np.array([place(value) for value in hashable], dtype=np.int64)

    def _group(self, code: str) -> int | None:
        """The chapter of a code, or the longest of the prefixes that it begins with."""
        code = code.strip().upper()
        chaptered = (CODE_SYSTEMS["icd10"], CODE_SYSTEMS["icd9"])
        if self.levels in chaptered:
            found = _CODE_HEADS[chaptered.index(self.levels)].match(code)
            head = found[0].zfill(3) if found else ""
            ordered = sorted(self.levels)
            nearest = bisect_right([level.split("-")[0] for level in ordered], head) - 1
            inside = nearest >= 0 and head <= ordered[nearest].split("-")[1]
            return self.levels.index(ordered[nearest]) if inside else None
        fitting = [level for level in map(reads_as, self.levels) if code.startswith(level.upper())]
        return [reads_as(level) for level in self.levels].index(max(fitting, key=len)) if fitting else None


def reads_as(value: Any) -> str:
    """What a value reads as; a whole number has no point."""
    number = isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool_))
    return str(int(value)) if number and float(value).is_integer() else str(value).strip()


def _floats(values: npt.NDArray[Any], name: Any) -> Floats:
    """A column of numbers, also those written as text; what is missing is NaN."""
    if values.dtype.kind in "Mm":
        raise DataError(
            f'column {name!r}: it holds dates or times; give the bounds as dates, ("number", "1920-01-01", '
            '"2030-12-31"), or drop it'
        )
    if values.dtype.kind in "OSU":
        texts = [str(one).strip() if isinstance(one, (str, bytes)) else one for one in values.tolist()]
        values = np.array([None if text in _READ_AS_MISSING else text for text in texts], dtype=object)
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        pass  # the message would show a value
    raise DataError(
        f'column {name!r}: it holds what is no number; describe it as ("category", [levels]), or drop it'
    )


def _dates(values: npt.NDArray[Any], name: Any) -> Floats:
    """A column of dates in days since 1970; what is missing is NaN."""
    if values.dtype.kind in "OSU":
        texts = ["" if value is None else str(value).strip() for value in values.tolist()]
        values = np.array(["NaT" if text in _READ_AS_MISSING else text for text in texts], dtype=str)
    try:
        if values.dtype.kind not in "OSUM":
            raise TypeError
        with warnings.catch_warnings(action="ignore"):  # NumPy's, of time zones: they are UTC
            moments = np.asarray(values, dtype="datetime64[us]")
        days = (moments - np.datetime64(0, "D")) / np.timedelta64(1, "D")
    except (TypeError, ValueError):
        days = None  # the message would show a value
    if days is None:
        raise DataError(f"column {name!r}: its bounds are dates, and it holds what is none (as 2024-12-31)")
    return np.asarray(days, dtype=np.float64)


def _day(days: float) -> str:
    return str(np.datetime64(int(days), "D"))


def is_missing(value: Any) -> bool:
    """Whether a value of a table stands for none: None, NaN, NaT, or pandas' NA, which is not even unlike itself."""
    try:
        return value is None or bool(value != value)
    except TypeError:
        return True


def _checked_bounds(
    name: Any, rule: Rule, kind: str, arguments: tuple[Any, ...]
) -> tuple[float, float, tuple[()], bool]:
    dates = kind == "number" and all(
        isinstance(side, datetime.date) or (isinstance(side, str) and re.match(r"\d{4}-\d\d-\d\d", side))
        for side in arguments
    )
    try:
        sides = [float(np.datetime64(side, "D").astype(int)) if dates else float(side) for side in arguments]
    except (TypeError, ValueError):
        sides = [math.nan]
    low, high = (0.0, sides[0]) if kind == "count" else (sides[0], sides[-1])
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise DataError(
            f"columns[{name!r}]: got {rule!r}, expected finite numbers or dates with low < high, for a count 0 < high"
        )
    return low, high, (), dates


def _checked_levels(name: Any, rule: Rule, levels: Any) -> tuple[Any, ...]:
    listed = [] if isinstance(levels, str) or not np.iterable(levels) else list(levels)
    if not listed or any(map(is_missing, listed)) or len({reads_as(one) for one in listed}) < len(listed):
        raise DataError(
            f"columns[{name!r}]: got {rule!r}, expected a list of levels that read differently (1 and '1' do not), "
            "none of them missing, as missing is a level of its own"
        )
    return tuple(listed)
