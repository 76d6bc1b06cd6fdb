"""Columns of a table as features, by descriptions that are public knowledge: nothing is learned from the data."""

from __future__ import annotations

import datetime
import math
import numbers
import re
import tomllib
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from scipy import sparse
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils import Tags

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
_ARGUMENTS: Mapping[str, int] = MappingProxyType(
    {"number": 2, "count": 1, "category": 1, "code": 1, "unit": 0, "drop": 0}
)

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
    {
        "icd10": tuple(_ICD10.split()),
        "icd9": tuple(_ICD9.split()),
        "atc": tuple("ABCDGHJLMNPRSV"),
    }
)
"""Public code systems, by their chapters: ranges of the leading characters, or single letters."""


class PublicEncoder(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Turns the columns of a table into features between -1 and 1, each as you describe it.

    >>> encoder = PublicEncoder({"age": ("number", 0, 120), "sex": ("category", ["F", "M"]), "patient": "unit"})
    >>> [str(name) for name in encoder.get_feature_names_out()]
    ['age', 'age=missing', 'sex=F', 'sex=M', 'sex=missing', 'sex=other']

    Args:
        columns: a description of every column, by name for pandas and polars frames, by number for arrays:
            ("number", low, high) is clamped and mapped to [-1, 1], the middle of the bounds to 0; dates if the bounds
            are dates;
            ("count", high) takes log(1 + abs(x)) / log(1 + high) with the sign of x, for counts and amounts;
            ("category", [levels]) is a feature for each level; a level is also what reads the same: 1, 1.0 and "1";
            ("code", system) is a feature for each chapter of "icd9", "icd10" or "atc", or for each of a list of
            prefixes, of which the longest counts;
            "unit" names who is protected (`unit_ids`), and is no feature;
            "drop" leaves the column out, which need not be there.
        sparse_output: give a SciPy CSR matrix; for thousands of levels.
        knots: so many further features for each number and count, `age~30` and so on, for models that bend: 1 at its
            own knot, falling to 0 at the next. Knots are evenly spaced between the bounds, those of counts on the
            logarithm. 0 for none, else at least 2.

    Attributes:
        n_features_in_: number of columns.
        feature_names_in_: their names, if X had names.

    Formal guarantees:
        Nothing is learned, so nothing leaks, as long as bounds and levels come from what a column means (a data
        dictionary), never from the values it has.

    Edge cases:
        Missing is a level of its own, `age=missing` (None, NaN, NA, an empty text, "NA", "?" and the like, unless
        declared as a level); the number itself is then 0. What is no declared level is `sex=other`. A feature that no
        example has costs nothing. Features keep the order of the table that was fitted; without a fit, that of
        `columns`.
    """

    def __init__(self, columns: Mapping[Any, Rule], *, sparse_output: bool = False, knots: int = 0) -> None:
        self.columns = columns
        self.sparse_output = sparse_output
        self.knots = knots

    def fit(self, X: Any, y: object = None) -> Self:
        """Check the descriptions against the columns' names; no value of X matters."""
        names = column_names(X)
        self._check_columns(names, fitting=True)
        self._described(names)
        self.n_features_in_ = len(names)
        if not isinstance(names, range):
            self.feature_names_in_ = np.asarray(names, dtype=object)
        elif hasattr(self, "feature_names_in_"):
            del self.feature_names_in_
        return self

    def transform(self, X: Any) -> Matrix:
        """The features, one column for each name of `get_feature_names_out`."""
        self._check_columns(column_names(X))
        parts = [column.encode(_values(X, column.name), self.sparse_output) for column in self._kept()]
        rows = X.shape[0] if hasattr(X, "shape") else len(X)
        if self.sparse_output:
            return sparse.csr_matrix(sparse.hstack([sparse.csr_matrix((rows, 0)), *parts]))
        return np.concatenate([np.zeros((rows, 0)), *parts], axis=1)

    def get_feature_names_out(self, input_features: Any = None) -> npt.NDArray[Any]:
        """A name for every feature: the column's, or column=level."""
        return np.asarray([name for column in self._kept() for name in column.features], dtype=object)

    def describe(self) -> str:
        """What becomes of each column, in one line each."""
        return "\n".join(column.words for column in self._described(self._order()))

    @property
    def unit_column(self) -> Any:
        """The column that says who is protected, or None."""
        return next((column.name for column in self._described(self._order()) if column.kind == "unit"), None)

    def unit_ids(self, X: Any) -> npt.NDArray[Any] | None:
        """The id of each example's unit; None if no column says so."""
        name = self.unit_column
        return None if name is None else _values(X, name)

    def typical_length(self) -> float:
        """The L2 norm that an example's features typically have, guessed from the descriptions alone."""
        number = 0.25 + (2 / 3 if self.knots else 0.0)
        sizes = {"number": number, "count": number, "category": 1.0, "code": 1.0}
        return math.sqrt(sum(sizes[column.kind] for column in self._kept()))

    def feature_count(self) -> int:
        """How many features most examples use: those for missing and undeclared values are not counted."""
        return sum(len(column.features) - len(column.spare) for column in self._kept())

    def _described(self, names: Iterable[Any]) -> list[Column]:
        if self.knots < 0 or self.knots == 1:
            raise DataError(f"knots: got {self.knots}, expected 0 for none, or at least 2")
        found = [
            Column.described(name, self.columns[name], self.knots) for name in names if name in self.columns
        ]
        units = [column.name for column in found if column.kind == "unit"]
        if len(units) > 1:
            raise DataError(
                f"columns: got {units} as units, expected at most one column that says who is protected"
            )
        return found

    def _kept(self) -> list[Column]:
        return [column for column in self._described(self._order()) if column.kind not in ("unit", "drop")]

    def _check_columns(self, names: Sequence[Any], *, fitting: bool = False) -> None:
        missing = [name for name in names if name not in self.columns]
        strangers = [
            name for name, rule in self.columns.items()
            if name not in names and rule != "drop" and (fitting or rule != "unit")
        ]  # fmt: skip
        if missing or strangers:
            raise DataError(
                f"columns: got no description of {missing[:6]} and descriptions of {strangers[:6]}, which are not in "
                f"the table; expected one for each of its {len(names)} columns: {RULES}"
            )

    def _order(self) -> Iterator[Any]:
        """The columns in the order of the table that was seen, or as declared."""
        if hasattr(self, "feature_names_in_"):
            return iter(self.feature_names_in_)
        numbered = all(isinstance(name, (int, np.integer)) for name in self.columns)
        return iter(sorted(self.columns) if numbered else self.columns)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.requires_fit = False
        tags.input_tags.string = True
        tags.input_tags.categorical = True
        tags.input_tags.allow_nan = True
        return tags


@dataclass(frozen=True, slots=True)
class Column:
    """A column and its description, checked.

    Attributes:
        name: in the table.
        kind: the first word of its rule.
        low: lower bound, in days since 1970 for dates.
        high: upper bound.
        levels: of a category, or the chapters or prefixes of a code.
        dates: whether the bounds are dates.
        knots: how many further features a number has.
    """

    name: Any
    kind: str
    low: float = 0.0
    high: float = 0.0
    levels: tuple[Any, ...] = ()
    dates: bool = False
    knots: int = 0

    @classmethod
    def described(cls, name: Any, rule: Rule, knots: int = 0) -> Column:
        """The column of this name under this rule.

        Raises:
            DataError: the rule is none.
        """
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
        if self.kind in ("unit", "drop"):
            return (
                f"{self.name}: {'says who is protected; no feature' if self.kind == 'unit' else 'left out'}"
            )
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
        rows, width = np.arange(len(places)), len(self.features)
        if as_sparse:
            return sparse.csr_matrix((np.ones(len(places)), (rows, places)), shape=(len(places), width))
        found = np.zeros((len(places), width))
        found[rows, places] = 1.0
        return found

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
        seen: dict[Hashable, int] = {}

        def place(value: Any) -> int:
            if _is_missing(value):
                return missing
            text = reads_as(value)
            if text in declared:
                return declared[text]
            if text in _READ_AS_MISSING:
                return missing
            found = self._group(text) if self.kind == "code" else None
            return other if found is None else found

        found = np.empty(len(values), dtype=np.int64)
        for row, value in enumerate(values.tolist()):
            try:
                known = seen.get(value)
            except TypeError:
                known = place(str(value))
            if known is None:
                known = seen[value] = place(value)
            found[row] = known
        return found

    def _group(self, code: str) -> int | None:
        """The chapter of a code, or the longest of the prefixes that it begins with."""
        code = code.strip().upper()
        if all("-" in level for level in self.levels):
            found = _CODE_HEADS[self.levels[0] == _ICD9.split()[0]].match(code)
            head = found[0].zfill(3) if found else ""
            ordered = sorted(self.levels)
            nearest = bisect_right([level.split("-")[0] for level in ordered], head) - 1
            inside = nearest >= 0 and head <= ordered[nearest].split("-")[1]
            return self.levels.index(ordered[nearest]) if inside else None
        fitting = [level for level in map(reads_as, self.levels) if code.startswith(level.upper())]
        return [reads_as(level) for level in self.levels].index(max(fitting, key=len)) if fitting else None


def column_names(X: Any) -> Sequence[Any]:
    """The columns of a frame by name, of an array by number."""
    if hasattr(X, "columns"):
        return [str(name) if isinstance(name, str) else name for name in X.columns]
    shape = np.shape(X)
    if len(shape) != 2:
        raise DataError(f"X: got shape {shape}, expected a table: a frame, or an array of rows and columns")
    return range(shape[1])


def read_columns(path: Path | str) -> dict[str, Rule]:
    """The descriptions in a file `columns.toml`: a table [columns] of rules, as `PublicEncoder` takes them.

    Raises:
        DataError: there is no such file, or it holds none.
    """
    try:
        found = tomllib.loads(Path(path).read_text(encoding="utf-8")).get("columns")
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DataError(
            f"{path}: {error}; expected a TOML file with a table [columns], as `sparsedp columns` drafts it"
        ) from error
    if not isinstance(found, dict) or not found:
        raise DataError(f"{path}: expected a table [columns] with a description of every column: {RULES}")
    for name, rule in found.items():
        Column.described(name, rule)
    return found


def refuse_what_is_no_number(X: Any) -> None:
    """Refuse text, dates, missing and infinite values by the name of their column, without showing any.

    Raises:
        DataError: there is a column of them.
    """
    if sparse.issparse(X):
        entries = sparse.coo_array(X)
        if entries.dtype.kind == "f" and not np.isfinite(entries.data).all():
            odd = ~np.isfinite(entries.data)
            raise _no_number(int(entries.col[odd].min()), _what(entries.data[odd]) or "")
        return
    if not hasattr(X, "columns"):
        try:
            X = np.asarray(X)
        except ValueError:
            return
        if X.ndim != 2 or X.dtype.kind in "iub" or (X.dtype.kind == "f" and np.isfinite(X).all()):
            return
    for name in column_names(X):
        what = _what(_values(X, name))
        if what:
            raise _no_number(name, what)


def checked_bounds(bounds: Any, features: int) -> tuple[Floats, Floats]:
    """Lower and upper bound of every feature.

    Raises:
        DataError: not a pair, not one number for all or one for each feature, not finite, or not low < high.
    """
    try:
        low, high = (np.broadcast_to(np.asarray(side, dtype=np.float64), (features,)) for side in bounds)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"bounds: got {bounds!r}, expected (low, high), each a number or one number for each of "
            f"{features} features"
        ) from error
    if not (np.isfinite(low).all() and np.isfinite(high).all() and (low < high).all()):
        raise DataError(f"bounds: got {bounds!r}, expected finite numbers with low < high everywhere")
    return low, high


def scale_to_bounds(X: Matrix, bounds: Any) -> Matrix:
    """Clamped to the bounds and mapped linearly to [-1, 1], as by the rule "number"."""
    low, high = checked_bounds(bounds, X.shape[1])
    if not sparse.issparse(X):
        share = (np.clip(X, low, high) - low) / (high - low)
        return (2 * share - 1).astype(X.dtype)
    if not np.array_equal(low, -high):
        raise DataError(
            "bounds: these move zero, which would fill a sparse matrix; give bounds with low = -high, or X.toarray()"
        )
    scaled = X.copy()
    limit = high[scaled.indices]
    scaled.data = (np.clip(scaled.data, -limit, limit) / limit).astype(X.dtype)
    return scaled


def _values(X: Any, name: Any) -> npt.NDArray[Any]:
    """One column's values; of objects, what is missing is None."""
    values = np.asarray(X[name].to_numpy() if hasattr(X, "columns") else np.asarray(X)[:, name])
    if values.dtype != object:
        return values
    found = np.empty(len(values), dtype=object)
    found[:] = [None if _is_missing(value) else value for value in values]
    return found


def _what(values: npt.NDArray[Any]) -> str | None:
    """What a column holds that is no finite number, if anything."""
    if values.dtype.kind in "Mm" or any(
        isinstance(v, (datetime.date, datetime.timedelta)) for v in _objects(values)
    ):
        return "dates or times"
    if values.dtype.kind in "SU" or any(isinstance(value, (str, bytes)) for value in _objects(values)):
        return "text"
    if any(value is None for value in _objects(values)):
        return "missing values (None or NaN)"
    if any(isinstance(value, float) and math.isinf(value) for value in _objects(values)):
        return "infinite values (inf)"
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        return "missing values (NaN)" if np.isnan(values).any() else "infinite values (inf)"
    return None


def _objects(values: npt.NDArray[Any]) -> Iterable[Any]:
    return values if values.dtype == object else ()


def _no_number(name: Any, what: str) -> DataError:
    example = {"text": '("category", [levels])', "infinite values (inf)": '("number", low, high)'}.get(
        what,
        '("number", date, date)'
        if what.startswith("dates")
        else '("number", low, high), which keeps NaN apart',
    )
    return DataError(
        f"column {name!r} holds {what}, expected finite numbers. Describe it by public knowledge: "
        f"columns={{{name!r}: {example}, ...}}, here or in sparsedp.sklearn.PublicEncoder; or leave it out, as "
        f'{name!r}: "drop". Filling in a mean or counting levels would be a statistic of the data, without noise'
    )


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
        texts = [
            str(value).strip() if isinstance(value, (str, bytes)) else value for value in values.tolist()
        ]
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
        days = (np.asarray(values, dtype="datetime64[us]") - np.datetime64(0, "D")) / np.timedelta64(1, "D")
    except (TypeError, ValueError):
        days = None  # the message would show a value
    if days is None:
        raise DataError(f"column {name!r}: its bounds are dates, and it holds what is none (as 2024-12-31)")
    return np.asarray(days, dtype=np.float64)


def _day(days: float) -> str:
    return str(np.datetime64(int(days), "D"))


def _is_missing(value: Any) -> bool:
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
    if not listed or any(map(_is_missing, listed)) or len({reads_as(one) for one in listed}) < len(listed):
        raise DataError(
            f"columns[{name!r}]: got {rule!r}, expected a list of levels that read differently (1 and '1' do not), "
            "none of them missing, as missing is a level of its own"
        )
    return tuple(listed)
