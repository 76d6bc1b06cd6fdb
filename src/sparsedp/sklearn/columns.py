"""Columns of a table as features, by rules that are declared, never learned: zero stays zero everywhere."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils import Tags

from sparsedp.errors import DataError

Rule = str | tuple[Any, ...] | list[Any]
"""("linear", low, high), ("log", high), "binary", ("one-hot", [categories]) or "drop"."""

Floats = npt.NDArray[np.float64]

_RULES = '("linear", low, high), ("log", high), "binary", ("one-hot", [categories]) or "drop"'


class PublicEncoder(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Turns the columns of a table into features between -1 and 1, each by a rule you declare.

    >>> PublicEncoder({"age": ("linear", 0, 120), "visits": ("log", 50), "sex": ("one-hot", ["F", "M"])})
    PublicEncoder(...)

    Args:
        columns: a rule for every column, by name for pandas and polars frames, by number for arrays:
            ("linear", low, high) clamps and divides by the larger of |low| and |high|;
            ("log", high) takes log(1 + |x|) with the sign of x, over log(1 + high), for counts and amounts;
            "binary" is 1 for what is neither zero, false nor missing;
            ("one-hot", [categories]) is a feature for each category, and none for others; a category is also what
            reads the same, so that 1 is 1.0 and "1";
            "drop" leaves the column out, which need not be there.

    Attributes:
        n_features_in_: number of columns.
        feature_names_in_: their names, if X had names.

    **Privacy.** Nothing is learned, so nothing leaks: bounds and categories come from what a column means, never from
    the values it has.
    **Edge cases.** Missing values (None, NaN, NA) become zero, in every rule. Zero stays zero, so an absent count
    adds nothing to a record's gradient. Features keep the order of the table that was fitted, whatever the order of
    the columns later; without a fit, that of the rules.
    """

    def __init__(self, columns: Mapping[Any, Rule]) -> None:
        self.columns = columns

    def fit(self, X: Any, y: object = None) -> Self:
        """Check the rules against the columns' names; no value of X matters."""
        names = _names(X)
        self._check_columns(names)
        for name in names:
            _outputs(name, self.columns[name])
        self.n_features_in_ = len(names)
        if not isinstance(names, range):
            self.feature_names_in_ = np.asarray(names, dtype=object)
        elif hasattr(self, "feature_names_in_"):
            del self.feature_names_in_
        return self

    def transform(self, X: Any) -> Floats:
        """The features, one column for each name of `get_feature_names_out`."""
        self._check_columns(_names(X))
        order = list(self._order())
        for name in order:
            _outputs(name, self.columns[name])
        kept = [name for name in order if self.columns[name] != "drop"]
        parts = [_encoded(_column(X, name), name, self.columns[name]) for name in kept]
        return np.concatenate([np.zeros((len(X), 0)), *parts], axis=1)

    def get_feature_names_out(self, input_features: Any = None) -> npt.NDArray[Any]:
        """A name for every feature: the column's, or column=category."""
        found = [one for name in self._order() for one in _outputs(name, self.columns[name])]
        return np.asarray(found, dtype=object)

    def _check_columns(self, names: Sequence[Any]) -> None:
        missing = [name for name in names if name not in self.columns]
        strangers = [name for name, rule in self.columns.items() if name not in names and rule != "drop"]
        if missing or strangers:
            raise DataError(
                f"columns: got no rule for {missing[:6]} and rules for {strangers[:6]}, which are not in the table; "
                f"expected one for each of its {len(names)} columns: {_RULES}"
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


def _names(X: Any) -> Sequence[Any]:
    """The columns of a frame by name, of an array by number."""
    if hasattr(X, "columns"):
        return [str(name) if isinstance(name, str) else name for name in X.columns]
    shape = np.shape(X)
    if len(shape) != 2:
        raise DataError(f"X: got shape {shape}, expected a table: a frame, or an array of rows and columns")
    return range(shape[1])


def _column(X: Any, name: Any) -> npt.NDArray[Any]:
    """One column's values; what is missing among objects is None."""
    values = np.asarray(X[name].to_numpy() if hasattr(X, "columns") else np.asarray(X)[:, name])
    if values.dtype != object:
        return values
    found = np.empty(len(values), dtype=object)
    found[:] = [None if _is_missing(value) else value for value in values]
    return found


def _encoded(values: npt.NDArray[Any], name: Any, rule: Rule) -> Floats:
    """One column's features."""
    kind, arguments = _parts(rule)
    if kind == "one-hot":
        return _one_hot(values, arguments[0])
    if kind == "binary":
        return np.array([0.0 if _absent(value) else 1.0 for value in values.tolist()])[:, None]
    found = _numbers(values, name)
    if kind == "log":
        high = float(arguments[0])
        size = np.minimum(np.abs(found), high)
        return (np.sign(found) * np.log1p(size) / math.log1p(high))[:, None]
    low, high = float(arguments[0]), float(arguments[1])
    present = found != 0
    return (np.where(present, np.clip(found, low, high), 0.0) / max(abs(low), abs(high)))[:, None]


def _one_hot(values: npt.NDArray[Any], categories: Sequence[Any]) -> Floats:
    read = np.array([None if _is_missing(value) else _read(value) for value in values.tolist()], dtype=object)
    found = [(values == category) | (read == _read(category)) for category in categories]
    return np.stack(found, axis=1).astype(np.float64)


def _read(value: Any) -> str:
    """What a value reads as; a whole number has no point."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return str(int(value)) if number and float(value).is_integer() else str(value)


def _numbers(values: npt.NDArray[Any], name: Any) -> Floats:
    if values.dtype.kind in "Mm":
        raise DataError(
            f"column {name!r}: it holds dates or times, whose numbers depend on their unit; give days since a public "
            "date, or drop it"
        )
    try:
        return np.nan_to_num(np.asarray(values, dtype=np.float64), nan=0.0, posinf=np.inf, neginf=-np.inf)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"column {name!r}: it holds what is no number; encode it by one-hot, or drop it"
        ) from error


def _is_missing(value: Any) -> bool:
    """Whether a value of a table stands for none: None, NaN, NaT, or pandas' NA, which is not even unlike itself."""
    try:
        return value is None or bool(value != value)
    except TypeError:
        return True


def _absent(value: Any) -> bool:
    return _is_missing(value) or value in (0, False, "")


def _parts(rule: Rule) -> tuple[str, tuple[Any, ...]]:
    return (rule, ()) if isinstance(rule, str) else (rule[0], tuple(rule[1:]))


def _outputs(name: Any, rule: Rule) -> list[str]:
    """The names of a column's features, its rule checked."""
    kind, arguments = _parts(rule) if rule else ("", ())
    if (kind, len(arguments)) not in {("drop", 0), ("binary", 0), ("one-hot", 1), ("log", 1), ("linear", 2)}:
        raise DataError(f"columns[{name!r}]: got {rule!r}, expected {_RULES}")
    if kind in ("linear", "log"):
        bounds = [float(one) for one in arguments]
        if not all(map(math.isfinite, bounds)) or bounds[-1] <= (bounds[0] if kind == "linear" else 0):
            raise DataError(
                f"columns[{name!r}]: got {rule!r}, expected finite bounds with low < high, for log 0 < high"
            )
    if kind == "one-hot":
        return _categories(name, rule, arguments[0])
    return [] if kind == "drop" else [str(name)]


def _categories(name: Any, rule: Rule, categories: Any) -> list[str]:
    """The names of one-hot features."""
    listed = [] if isinstance(categories, str) or not np.iterable(categories) else list(categories)
    if not listed or any(map(_is_missing, listed)) or len({_read(one) for one in listed}) < len(listed):
        raise DataError(
            f"columns[{name!r}]: got {rule!r}, expected a list of categories that read differently (1 and '1' do "
            "not), none of them missing, as what is missing is zero in every feature"
        )
    return [f"{name}={category}" for category in listed]
