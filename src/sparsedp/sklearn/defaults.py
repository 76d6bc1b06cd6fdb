"""What the estimator takes where that is left open: method, ratio, widths and seed. Public numbers alone."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any, Unpack

import numpy as np
from sklearn.utils import check_random_state
from torch import nn

from sparsedp.errors import SparseDPError
from sparsedp.methods import Listed, Method, MethodOptions, configure, get_method
from sparsedp.methods.auto import AUTO_METHOD, reason_of
from sparsedp.methods.plan_config import Asked, default_delta
from sparsedp.sklearn.data import coordinate_count
from sparsedp.training.planning import spec_for

_FEWEST_COORDINATES = 32


def method_for(
    name: str, changes: MethodOptions | None, model: nn.Module, *, units: int, **asked: Unpack[Asked]
) -> tuple[Method, str | None]:
    """The method, and why if it was left open: then it is the one `sparsedp.fit` takes."""
    if name != AUTO_METHOD:
        return get_method(name), None
    delta = asked.get("delta")
    # `fit` says which delta is taken where none was given; here it is filled in, so that it is said once.
    known: Asked = {**asked, "delta": default_delta(units) if delta is None else delta}
    spec = spec_for(model, AUTO_METHOD, changes, units=units, unit="row", **known)
    return spec.method, reason_of(spec, coordinate_count(model))


def ratio_for(
    method: Method, options: MethodOptions | None, given: float | None, coordinates: int
) -> float | None:
    """The ratio given, or None for the method's own, or one that leaves a small model enough coordinates."""
    row = configure(method, options)
    chosen = options is not None and options.active_ratio is not None
    told = given is not None or chosen or isinstance(row.schedule, Listed)
    if told or row.ranking is None:
        return given
    fewest = min(1.0, _FEWEST_COORDINATES / coordinates)
    return fewest if row.active_ratio < fewest else None


def widths_of(hidden: Any) -> tuple[int, ...]:
    """The widths of the hidden layers: one number, several, or none for logistic regression.

    Raises:
        SparseDPError: they are not whole numbers > 0.
    """
    given = hidden.tolist() if isinstance(hidden, np.ndarray) else hidden
    widths = tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(width, (int, np.integer)) and width > 0 for width in widths):
        raise SparseDPError(
            f"hidden: got {hidden!r}, expected whole numbers > 0, or () for logistic regression"
        )
    return tuple(int(width) for width in widths)


def seed_of(random_state: Any) -> int | None:
    """None, the number given, or one drawn from a RandomState."""
    if random_state is None:
        return None
    if isinstance(random_state, numbers.Integral):
        return int(random_state)
    return int(check_random_state(random_state).randint(np.iinfo(np.int32).max))
