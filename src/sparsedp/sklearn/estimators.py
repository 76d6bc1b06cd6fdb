"""A classifier and a regressor trained with differential privacy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from torch import nn

from sparsedp.errors import PrivacyError, PrivacyWarning, SparseDPError
from sparsedp.optimizers.factory import SQUARED
from sparsedp.sklearn.base import PrivateEstimator
from sparsedp.sklearn.columns import Floats
from sparsedp.sklearn.data import TableDataset, class_weights, encode_labels
from sparsedp.sklearn.surroundings import warn


@dataclass(kw_only=True, eq=False, repr=False)
class SparseDPClassifier(ClassifierMixin, PrivateEstimator):  # type: ignore[misc]
    """Logistic regression, or a small network, trained with differential privacy by any of the methods.

    >>> model = SparseDPClassifier(epsilon=1.0, classes=[0, 1], columns={"age": ("number", 0, 120), "id": "unit"})
    >>> model.fit(patients, readmitted).predict_proba(new)  # doctest: +SKIP

    Args:
        epsilon: the budget of one fit. Never exceeded.
        noise_multiplier: the noise instead, with `epsilon=None`; `epsilon_` then says what came out.
        delta: of the guarantee; if not given, a power of ten at most 1/(10 N) and at most 1e-5.
        classes: all labels there can be. If not given they are read off y, with a warning: a rare class leaks.
        columns: a description of every column of X by public knowledge, see `PublicEncoder`; then X may have text,
            dates and missing values, and a column described as "unit" says who is protected.
        bounds: instead of columns, (low, high) for features that are numbers: one for all or one for each; values are
            clamped and mapped to [-1, 1].
        unit: what is protected, such as "patient", when a unit has several examples; then `fit` needs `groups`.
        rows_per_unit: examples drawn of a sampled unit; their mean gradient is clipped once.
        unit_norm: scale each example to L2 norm one, after columns or bounds.
        private_scale: features to divide by their mean size, which is released with noise before training and charged
            in the same plan: names or numbers, or a `PrivateNormalisation` for other noise. Zero stays zero.
        class_weight: public weights {label: weight} on the loss, of which the ratios count; "balanced" is refused.
        model: "linear", or "additive", where each number bends at public knots (`PublicEncoder`): usually more
            accurate, with more coefficients to read; needs `columns`.
        hidden_layer_sizes: width of a hidden layer, or widths of several; () is logistic regression.
        budget: a `PrivacyBudget` that this and other fits on the same units draw from.
        method: a method or its name, see `sparsedp.list_methods()`, or "auto": dense or sparse by public numbers,
            as `sparsedp.fit` takes it.
        epochs: passes over the data, on average.
        batch_size: expected batch size, in units; if not given, the power of two nearest to 4 sqrt(N).
        lr: rate of SGD with momentum 0.9; if not given, by a rule from public numbers (docs/tabular.md).
        max_grad_norm: L2 bound on each unit's gradient, "auto", or bounds by pattern of names, as `sparsedp.fit`.
        active_ratio: share of the coordinates trained; if not given, the method's own, but never
            fewer than 32 coordinates: there is nothing to gain in a handful.
        accountant: "pld", "rdp" or "rdp-classic".
        random_state: None draws noise from the operating system. A number or a RandomState makes the fit
            reproducible, and not for release.
        name: what the table is called, for the record and the report.
        run_dir: run directory to make, with plan, ledger and record, for `sparsedp verify`. Never overwritten.
        resume: go on with the interrupted fit at `run_dir`: the same data and arguments.
        verbose: 1 shows a progress bar on a terminal.

    Attributes:
        epsilon_: what the fit spent.
        delta_: the delta of the guarantee.
        guarantee_: the guarantee in a sentence; `guarantee_report` writes it in words, on a page.
        publishable_: False if `random_state` was given.
        classes_: the classes, sorted; columns of `predict_proba`.
        coef_: weights of the encoded features, of shape (1, features) for two classes; not for a network.
        intercept_: the constant of each logit; not for a network.
        coef_names_: the names of the encoded features, as in `sex=F`.
        encoder_: the encoder, if columns were described; `encoder_.describe()` says what became of each.
        method_: the method that was taken.
        kept_features_: names (or numbers) of the features that any active coordinate belongs to at the end.
        model_: the trained PyTorch model, on encoded features.
        result_: everything the run gave back.
        n_units_: number N of units.
        n_iter_: epochs trained.
        n_features_in_: number of columns of X.
        feature_names_in_: their names, if X had names.

    Formal guarantees:
        (epsilon_, delta_) under adding or removing one unit, for the fitted attributes. N, the number of features,
        the classes and every argument here are taken to be public. Several fits on the same data add up.

    Edge cases:
        Without `columns`, text, dates, NaN and infinity are refused by the name of their column. Values outside the
        bounds are clamped. Sparse matrices stay sparse but for the batch at hand. Weights of single examples
        (`sample_weight`) are not taken: one computed from other examples is outside the guarantee.
    """

    classes: npt.ArrayLike | None = None
    class_weight: Mapping[Any, float] | None = None

    _linear_name = "logistic regression"
    classes_: npt.NDArray[Any] = field(init=False)

    def decision_function(self, X: Any) -> Floats:
        """Logits: one column per class, or for two classes that of the second against the first."""
        logits = self._logits(X)
        return logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits

    def predict_proba(self, X: Any) -> Floats:
        """The probability of each class, in the order of `classes_`."""
        return torch.from_numpy(self._logits(X)).softmax(dim=1).numpy()

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """The most probable class of each example."""
        best = self._logits(X).argmax(axis=1)
        return np.asarray(self.classes_[best])

    def _encoded_targets(self, y: npt.NDArray[Any], *, held_out: bool = False) -> torch.Tensor:
        if held_out:
            return encode_labels(y, self.classes_)[1]
        check_classification_targets(y)
        if self.classes is None:
            warn(
                "classes was not given, so the classes are read off y: a class that one example alone has would "
                "reveal that example. Declare them: SparseDPClassifier(classes=[...])",
                PrivacyWarning,
            )
        self.classes_, targets = encode_labels(y, self.classes)
        return targets

    def _criterion(self) -> nn.Module:
        return nn.CrossEntropyLoss(weight=class_weights(self.class_weight, self.classes_), reduction="none")

    def _outputs(self) -> int:
        return len(self.classes_)

    def _target_schema(self, held_out: TableDataset | None) -> dict[str, Any]:
        counted = None if held_out is None else torch.bincount(held_out.y, minlength=self._outputs()).tolist()
        classes = None if self.classes is None else self.classes_.tolist()
        return {"classes": classes, "held_out_counts": counted}


@dataclass(kw_only=True, eq=False, repr=False)
class SparseDPRegressor(RegressorMixin, PrivateEstimator):  # type: ignore[misc]
    """Linear regression, or a small network, trained with differential privacy by any of the methods.

    >>> model = SparseDPRegressor(epsilon=1.0, target_bounds=(0, 30), columns={"age": ("number", 0, 120)})
    >>> model.fit(patients, days_of_stay).predict(new)  # doctest: +SKIP

    Args:
        target_bounds: (low, high) of the target, public: it is clamped and mapped to [-1, 1], and predictions are
            kept inside. Required: the largest value of a target is somebody's.
        loss: "squared", or "huber", whose gradient stops growing where the error passes a tenth of the bounds' range.
        epsilon: the budget of one fit, and so on: all other arguments are those of `SparseDPClassifier`.

    Attributes:
        coef_: weights of the encoded features, in units of the target, of shape (features,); not for a network.
        intercept_: the constant, in units of the target; not for a network.
        epsilon_: what the fit spent, and so on: all other attributes are those of `SparseDPClassifier`.

    Formal guarantees:
        (epsilon_, delta_) under adding or removing one unit, for the fitted attributes, as for `SparseDPClassifier`;
        the target is as protected as the features.

    Edge cases:
        As for `SparseDPClassifier`. Targets that are not finite are refused.
    """

    target_bounds: tuple[float, float] | None = None
    loss: str = "squared"

    _linear_name = "linear regression"
    _y_check = MappingProxyType({"y_numeric": True})

    def predict(self, X: Any) -> Floats:
        """The predicted target of each example, within its bounds."""
        low, high = self._range()
        return low + (np.clip(self._logits(X)[:, 0], -1, 1) + 1) / 2 * (high - low)

    def _encoded_targets(self, y: npt.NDArray[Any], *, held_out: bool = False) -> torch.Tensor:
        low, high = self._range()
        if self.loss not in ("squared", "huber"):
            raise SparseDPError(f"loss: got {self.loss!r}, expected 'squared' or 'huber'")
        scaled = 2 * (np.clip(np.asarray(y, dtype=np.float64), low, high) - low) / (high - low) - 1
        return torch.from_numpy(scaled.astype(np.float32)[:, None])

    def _criterion(self) -> nn.Module:
        if self.loss == "huber":
            return nn.HuberLoss(reduction="none", delta=0.2)
        return nn.MSELoss(reduction="none")

    def _outputs(self) -> int:
        return 1

    def _range(self) -> tuple[float, float]:
        try:
            low, high = map(float, self.target_bounds or ())
        except (TypeError, ValueError):
            low = high = math.nan
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise PrivacyError(
                f"target_bounds: got {self.target_bounds!r}, expected (low, high), finite, known without looking at "
                "the data: targets are clamped to them, and the largest value of a target is somebody's"
            )
        return low, high

    def _rate_factor(self) -> float:
        return SQUARED

    def _shaped(self, weight: Floats, bias: Floats) -> tuple[Any, Any]:
        low, high = self._range()
        half = (high - low) / 2
        return half * weight[0], float(low + half * (bias[0] + 1))

    def _target_schema(self, held_out: TableDataset | None) -> dict[str, Any]:
        return {"target_bounds": list(self._range()), "loss": self.loss}


def expected_failed_checks(estimator: PrivateEstimator) -> dict[str, str]:
    """What scikit-learn's `check_estimator(..., expected_failed_checks=...)` asks of data too small for the budget.

    >>> expected_failed_checks(SparseDPClassifier(epsilon=20.0))
    {}
    """
    noise = "asks for an accuracy on 200 examples or fewer that the noise does not allow below epsilon 20"
    names = (
        ("check_regressors_train",)
        if isinstance(estimator, SparseDPRegressor)
        else ("check_classifiers_train", "check_class_weight_classifiers", "check_classifiers_classes")
    )
    return dict.fromkeys(names, noise) if estimator.epsilon is None or estimator.epsilon < 20 else {}
