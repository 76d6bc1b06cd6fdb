"""What stands around the fit of an estimator: steps of a pipeline that learn without noise, and repeated fits."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import sklearn.preprocessing as preprocessing
from sklearn.base import BaseEstimator
from sklearn.compose import ColumnTransformer
from sklearn.frozen import FrozenEstimator
from sklearn.impute import SimpleImputer
from sklearn.pipeline import FeatureUnion, Pipeline
from sklearn.utils import get_tags

from sparsedp.errors import PrivacyError, PrivacyWarning

INSTEAD = (
    'Describe the columns by public knowledge, columns={name: ("number", low, high), ...} in the estimator or in '
    "sparsedp.sklearn.PublicEncoder, or give bounds=(low, high); private_scale=[columns] measures their size "
    "privately"
)

_SCALERS = (
    preprocessing.KBinsDiscretizer,
    preprocessing.MaxAbsScaler,
    preprocessing.MinMaxScaler,
    preprocessing.PowerTransformer,
    preprocessing.QuantileTransformer,
    preprocessing.RobustScaler,
    preprocessing.StandardScaler,
)
_REPEATED_FITS = ("calibration", "ensemble", "feature_selection", "model_selection", "multiclass", "multioutput",
                  "semi_supervised")  # fmt: skip
"""Packages of scikit-learn that fit clones of an estimator."""


def _declared(step: Any) -> bool:
    return not isinstance(step.categories, str) and step.min_frequency is None and step.max_categories is None


_FIXED: dict[type, Callable[[Any], bool]] = {
    preprocessing.OneHotEncoder: _declared,
    preprocessing.OrdinalEncoder: _declared,
    SimpleImputer: lambda step: step.strategy == "constant" and step.keep_empty_features,
    FrozenEstimator: lambda step: True,
}
"""Transformers that have to be fitted and yet learn nothing from the training data, if set so."""

_PARTS: dict[type, Callable[[Any], list[Any]]] = {
    Pipeline: lambda step: [part for _, part in step.steps],
    FeatureUnion: lambda step: [part for _, part in step.transformer_list],
    ColumnTransformer: lambda step: [*(part for _, part, _ in step.transformers), step.remainder],
}


def check_callers(estimator: Any) -> None:
    """Refuse learned scaling in a pipeline around this fit; warn of other learned steps and of repeated fits.

    An estimator is told nothing of the pipeline or the search that fits it, so this reads the call stack: the one
    place that says so in every backend of joblib. What happens outside the call, such as a scaler fitted by hand the
    line before, it cannot see.
    """
    for step in steps_before():
        for learned in _learned_steps(step):
            _refuse_or_warn(learned)
    around = {".".join(_module(frame).split(".")[:2]) for frame in _callers()}
    for package in (f"sklearn.{name}" for name in _REPEATED_FITS):
        if package not in around:
            continue
        if estimator.budget is not None:
            raise PrivacyError(
                f"budget: {package} fits clones of this estimator, and what it chooses by (the scores of "
                "folds) is computed from the data without noise, which no budget covers. Tune on public or synthetic "
                "data; or fit each candidate once, with a share of the budget, on one part of the units and compare "
                "them on another part, whose accuracy is then outside the guarantee"
            )
        warn(
            f"{type(estimator).__name__} is being fitted by {package}. Each fit on the same data spends its "
            "epsilon again: n fits cost up to n times epsilon together, and a choice made by looking at them is "
            "part of the cost. epsilon_ counts one fit. Tune on public or synthetic data, or plan for the sum",
            PrivacyWarning,
        )


def steps_before() -> list[Any]:
    """The steps of pipelines around this fit that transform the features first."""
    pipelines = [frame.f_locals.get("self") for frame in _callers() if _module(frame) == "sklearn.pipeline"]
    return [step for one in pipelines if isinstance(one, Pipeline) for _, step in one.steps[:-1]]


def _callers() -> Iterator[FrameType]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back  # type: ignore[assignment]


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _refuse_or_warn(learned: Any) -> None:
    name = type(learned).__name__
    if isinstance(learned, _SCALERS):
        raise PrivacyError(
            f"the pipeline scales with {name}, which computes statistics exactly from the training data; they "
            f"are released with the pipeline, without any noise, and epsilon does not cover them. {INSTEAD}. One "
            f"fitted on public data may stay, as FrozenEstimator({name}().fit(public))"
        )
    warn(
        f"the pipeline step {name} is fitted on the training data before the estimator sees it; what it "
        "learns is not private, and epsilon does not cover it. Use steps with fixed rules, or fit it on public "
        "data and wrap it in sklearn.frozen.FrozenEstimator",
        PrivacyWarning,
    )


def _learned_steps(step: Any) -> Iterator[Any]:
    """The transformers in a step that learn from the training data."""
    if step is None or isinstance(step, str):
        return
    for container, parts in _PARTS.items():
        if isinstance(step, container):
            for part in parts(step):
                yield from _learned_steps(part)
            return
    if any(isinstance(step, kind) and fixed(step) for kind, fixed in _FIXED.items()):
        return
    if not isinstance(step, BaseEstimator) or get_tags(step).requires_fit:
        yield step


def warn(message: str, kind: type[Warning] = UserWarning) -> None:
    """Warn where the estimator was called."""
    depth = 1
    for frame in _callers():
        if not _module(frame).startswith("sparsedp."):
            break
        depth += 1
    warnings.warn(message, kind, stacklevel=depth)
