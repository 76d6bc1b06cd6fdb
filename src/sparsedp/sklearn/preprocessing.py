"""Columns of a table as features, by descriptions that are public knowledge: nothing is learned from the data."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from scipy import sparse
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils import Tags

from sparsedp.errors import DataError
from sparsedp.sklearn.columns import RULES, Column, Floats, Matrix, Rule, is_missing
from sparsedp.sklearn.data import names_somebody


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
        return float(np.sqrt(sum(sizes[column.kind] for column in self._kept())))

    def feature_count(self) -> int:
        """How many features most examples use: those for missing and undeclared values are not counted."""
        return sum(len(column.features) - len(column.spare) for column in self._kept())

    def _described(self, names: Iterable[Any]) -> list[Column]:
        if self.knots < 0 or self.knots == 1:
            raise DataError(f"knots: got {self.knots}, expected 0 for none, or at least 2")
        found = [Column.described(one, self.columns[one], self.knots) for one in names if one in self.columns]
        if sum(column.kind == "unit" for column in found) > 1:
            raise DataError(
                'columns: got several "unit", expected at most one column that says who is protected'
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
        told = [f"no description of {missing[:6]}"] if missing else []
        told += [f"descriptions of {strangers[:6]}, which are not in the table"] if strangers else []
        if told:
            raise DataError(
                f"columns: got {' and '.join(told)}; expected one for each of its {len(names)} columns: {RULES}"
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
        tags.input_tags.string = tags.input_tags.categorical = tags.input_tags.allow_nan = True
        return tags


def column_names(X: Any) -> Sequence[Any]:
    """The columns of a frame by name, of an array by number."""
    if hasattr(X, "columns"):
        return [str(name) if isinstance(name, str) else name for name in X.columns]
    shape = np.shape(X)
    if len(shape) != 2:
        raise DataError(f"X: got shape {shape}, expected a table: a frame, or an array of rows and columns")
    return range(shape[1])


def refuse_what_is_no_number(X: Any) -> None:
    """Refuse text, dates, missing and infinite values by the name of their column, without showing any."""
    if sparse.issparse(X):
        entries = sparse.coo_array(X)
        if entries.dtype.kind == "f" and not np.isfinite(entries.data).all():
            odd = ~np.isfinite(entries.data)
            raise _no_number(int(entries.col[odd].min()), what_is_no_number(entries.data[odd]) or "")
        return
    if not hasattr(X, "columns"):
        try:
            X = np.asarray(X)
        except ValueError:
            return
        if X.ndim != 2 or X.dtype.kind in "iub" or (X.dtype.kind == "f" and np.isfinite(X).all()):
            return
    for name in column_names(X):
        if what := what_is_no_number(_values(X, name)):
            raise _no_number(name, what)


def checked_bounds(bounds: Any, features: int) -> tuple[Floats, Floats]:
    """Lower and upper bound of every feature."""
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
    if hasattr(X, "columns"):
        column = X[name]
        values = np.asarray(column.to_numpy() if hasattr(column, "to_numpy") else column)
    else:  # a list as objects: NumPy would turn all rows into text for one
        values = (X if isinstance(X, np.ndarray) else np.array(X, dtype=object))[:, name]
    if values.dtype != object:
        return values
    found = np.empty(len(values), dtype=object)
    found[:] = [None if is_missing(value) else value for value in values]
    return found


def what_is_no_number(values: npt.NDArray[Any]) -> str | None:
    """What a column holds that is no finite number, if anything."""
    kinds = {type(value) for value in values} if values.dtype == object else {values.dtype.type}
    moments = (datetime.date, datetime.timedelta, np.datetime64, np.timedelta64)
    if any(issubclass(one, moments) for one in kinds):
        return "dates or times"
    if any(issubclass(one, (str, bytes)) for one in kinds):
        return "text"
    if type(None) in kinds:
        return "missing values (None or NaN)"
    if values.dtype == object:
        values = np.array([value for value in values if isinstance(value, float)], dtype=np.float64)
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        return "missing values (NaN)" if np.isnan(values).any() else "infinite values (inf)"
    return None


def _no_number(name: Any, what: str) -> DataError:
    rule = '("number", low, high)'
    if what == "text":
        rule = '"unit"' if names_somebody(str(name)) else '("category", [levels])'
    elif what.startswith("dates"):
        rule = '("number", date, date)'
    return DataError(
        f"column {name!r} holds {what}, expected finite numbers. Describe it by public knowledge: "
        f"columns={{{name!r}: {rule}, ...}}, here or in sparsedp.sklearn.PublicEncoder, where missing is a level of "
        f'its own; or leave it out, as {name!r}: "drop". Filling in a mean or counting levels would be a statistic '
        "of the data, without noise"
    )
