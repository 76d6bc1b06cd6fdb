"""Feature scaling that looks at no other record: bounds given by the user, or each record by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from scipy import sparse
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin
from sklearn.preprocessing import normalize as unit_rows
from sklearn.utils import Tags
from sklearn.utils.validation import validate_data

from sparsedp.errors import DataError, PrivacyError
from sparsedp.privacy.normalization import PrivateNormalisation

Matrix = Any
"""A NumPy array of shape (records, features), or a SciPy CSR matrix or array."""

STANDARDIZING = (
    "standardising subtracts means and divides by deviations computed exactly from the training data, and they are "
    "released with the model, without any noise"
)
INSTEAD = (
    "Give feature_bounds=(low, high) known without looking at the data, or normalize='record', or put "
    "sparsedp.sklearn.BoundedScaler into the pipeline; private_scale=[columns] measures their size privately"
)


class BoundedScaler(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Maps features from bounds you declare to [-1, 1], clamping what lies outside.

    Args:
        low: smallest value of each feature, or one for all.
        high: largest.

    **Privacy.** Nothing is learned from the data, so nothing leaks: take the bounds from what a feature means (an
    age is 0 to 120), never from its smallest and largest value.
    **Edge cases.** Sparse matrices need low = -high, so that zeros stay zeros.
    """

    def __init__(self, low: npt.ArrayLike = -1.0, high: npt.ArrayLike = 1.0) -> None:
        self.low = low
        self.high = high

    def fit(self, X: Matrix, y: object = None) -> Self:
        """Check the bounds against the number of features; no value of X matters."""
        X = validate_data(self, X, accept_sparse="csr", dtype=(np.float64, np.float32))
        checked_bounds((self.low, self.high), X.shape[1])
        return self

    def transform(self, X: Matrix) -> Matrix:
        """The features in [-1, 1]."""
        X = validate_data(self, X, accept_sparse="csr", dtype=(np.float64, np.float32), reset=False)
        return scale_to_bounds(X, (self.low, self.high))

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.requires_fit = False
        tags.input_tags.sparse = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


def checked_bounds(bounds: Any, features: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Lower and upper bound of every feature.

    Raises:
        DataError: not a pair, not one number for all or one for each feature, not finite, or not low < high.
    """
    try:
        low, high = bounds
        pair = tuple(np.broadcast_to(np.asarray(side, dtype=np.float64), (features,)) for side in (low, high))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"feature bounds: got {bounds!r}, expected (low, high), each a number or one number for each of "
            f"{features} features"
        ) from error
    if not (np.isfinite(pair[0]).all() and np.isfinite(pair[1]).all() and (pair[0] < pair[1]).all()):
        raise DataError(f"feature bounds: got {bounds!r}, expected finite numbers with low < high everywhere")
    return pair[0], pair[1]


def scale_to_bounds(X: Matrix, bounds: Any) -> Matrix:
    """Clamped to the bounds and mapped linearly to [-1, 1]."""
    low, high = checked_bounds(bounds, X.shape[1])
    if not sparse.issparse(X):
        share = (np.clip(X, low, high) - low) / (high - low)
        return (2 * share - 1).astype(X.dtype)
    if not np.array_equal(low, -high):
        raise DataError(
            "feature bounds: these move zero, which would fill a sparse matrix; give bounds with low = -high, "
            "or X.toarray()"
        )
    scaled = X.copy()
    limit = high[scaled.indices]
    scaled.data = (np.clip(scaled.data, -limit, limit) / limit).astype(X.dtype)
    return scaled


def _as_it_is(X: Matrix) -> Matrix:
    return X


_NORMALIZATIONS: Mapping[Any, Callable[[Matrix], Matrix]] = MappingProxyType(
    {None: _as_it_is, "record": unit_rows}
)


def normalization(choice: Any) -> Callable[[Matrix], Matrix]:
    """The function behind `normalize`: nothing, or every record scaled to L2 norm one (zeros stay zeros)."""
    if not isinstance(choice, (str, type(None))) or choice not in _NORMALIZATIONS:
        raise PrivacyError(
            f"normalize: got {choice!r}, expected 'record' or None. Statistics of the training data are not offered: "
            f"{STANDARDIZING}. {INSTEAD}"
        )
    return _NORMALIZATIONS[choice]


def private_normalisation(choice: Any, names: Sequence[str] | None) -> PrivateNormalisation | None:
    """What `private_scale` asks for: columns by name or number are scaled around zero; None asks for nothing.

    Raises:
        DataError: a column that X does not have, by name.
    """
    if choice is None or isinstance(choice, PrivateNormalisation):
        return choice
    listed = [choice] if isinstance(choice, str) else list(choice)
    if strangers := [one for one in listed if isinstance(one, str) and one not in (names or ())]:
        known = "numbers, as X has no names" if names is None else f"some of {', '.join(names[:12])}"
        raise DataError(f"private_scale: got the columns {strangers[:6]}, expected {known}")
    places: list[Any] = [names.index(one) if isinstance(one, str) and names else one for one in listed]
    return PrivateNormalisation(centre=False, columns=tuple(places))


def refuse_standardizing(standardize: bool) -> None:
    """Refuse `standardize=True`, and say why."""
    if standardize:
        raise PrivacyError(f"standardize={standardize!r} is refused: {STANDARDIZING}. {INSTEAD}")


def looks_standardized(X: Matrix) -> bool:
    """Whether every column that varies has mean 0 and deviation 1 to rounding, as after a StandardScaler.

    **Privacy.** Looks at exact statistics; the answer is for a warning on the user's own screen.
    """
    if sparse.issparse(X) or len(X) < 3:
        return False
    tolerance = 1e-4 if X.dtype == np.float32 else 1e-6
    with np.errstate(over="ignore", invalid="ignore"):
        mean, deviation = X.mean(axis=0, dtype=np.float64), X.std(axis=0, dtype=np.float64)
    varies = deviation > tolerance
    return bool(
        varies.any()
        and (np.abs(mean) < tolerance).all()
        and (np.abs(deviation[varies] - 1) < tolerance).all()
    )
