"""Columns of a table as features, by rules that are declared, never learned: zero stays zero everywhere."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils import Tags

from sparsedp.core.errors import DataError

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
            ("one-hot", [categories]) is a feature for each category, and none for others;
            "drop" leaves the column out.

    Attributes:
        n_features_in_: number of columns.
        feature_names_in_: their names, if X had names.

    **Privacy.** Nothing is learned, so nothing leaks: bounds and categories come from what a column means, never from
    the values it has.
    **Edge cases.** Missing values (None, NaN) become zero, in every rule. Zero stays zero, so an absent count adds
    nothing to a record's gradient.
    """

    def __init__(self, columns: Mapping[Any, Rule]) -> None:
        self.columns = columns

    def fit(self, X: Any, y: object = None) -> Self:
        """Check the rules against the columns' names; no value of X matters."""
        names, width = _names(X)
        missing = [name for name in names if name not in self.columns]
        strangers = [name for name in self.columns if name not in names]
        if missing or strangers:
            raise DataError(
                f"columns: got no rule for {missing[:6]} and rules for {strangers[:6]}, which are not in the table; "
                f"expected one for each of its {width} columns: {_RULES}"
            )
        for name in names:
            _outputs(name, self.columns[name])
        self.n_features_in_ = width
        if not isinstance(names, range):
            self.feature_names_in_ = np.asarray(names, dtype=object)
        return self

    def transform(self, X: Any) -> Floats:
        """The features, one column for each name of `get_feature_names_out`."""
        self.fit(X)
        names, _ = _names(X)
        parts = [_encoded(_column(X, name), name, self.columns[name]) for name in names]
        return np.concatenate([np.zeros((len(X), 0)), *parts], axis=1)

    def get_feature_names_out(self, input_features: Any = None) -> npt.NDArray[Any]:
        """A name for every feature: the column's, or column=category."""
        found = [one for name in self._order() for one in _outputs(name, self.columns[name])]
        return np.asarray(found, dtype=object)

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


def _names(X: Any) -> tuple[Sequence[Any], int]:
    """The columns of a frame by name, of an array by number."""
    if hasattr(X, "columns"):
        names = [str(name) if isinstance(name, str) else name for name in X.columns]
        return names, len(names)
    shape = np.shape(X)
    if len(shape) != 2:
        raise DataError(f"X: got shape {shape}, expected a table: a frame, or an array of rows and columns")
    return range(shape[1]), int(shape[1])


def _column(X: Any, name: Any) -> npt.NDArray[Any]:
    return np.asarray(X[name].to_numpy() if hasattr(X, "columns") else np.asarray(X)[:, name])


def _encoded(values: npt.NDArray[Any], name: Any, rule: Rule) -> Floats:
    """One column's features."""
    kind, arguments = _parts(rule)
    if kind == "drop":
        return np.zeros((len(values), 0))
    if kind == "one-hot":
        return np.stack([(values == category).astype(np.float64) for category in arguments[0]], axis=1)
    if kind == "binary":
        return np.array([0.0 if _absent(value) else 1.0 for value in values.tolist()])[:, None]
    numbers = _numbers(values, name)
    if kind == "log":
        high = float(arguments[0])
        size = np.minimum(np.abs(numbers), high)
        return (np.sign(numbers) * np.log1p(size) / math.log1p(high))[:, None]
    low, high = float(arguments[0]), float(arguments[1])
    present = numbers != 0
    return (np.where(present, np.clip(numbers, low, high), 0.0) / max(abs(low), abs(high)))[:, None]


def _numbers(values: npt.NDArray[Any], name: Any) -> Floats:
    try:
        return np.nan_to_num(np.asarray(values, dtype=np.float64), nan=0.0, posinf=np.inf, neginf=-np.inf)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"column {name!r}: it holds what is no number; encode it by one-hot, or drop it"
        ) from error


def _absent(value: Any) -> bool:
    return value is None or value != value or value in (0, False, "")


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
    if kind == "drop":
        return []
    return [f"{name}={category}" for category in arguments[0]] if kind == "one-hot" else [str(name)]
