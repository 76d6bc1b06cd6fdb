"""A scikit-learn classifier trained with differential privacy."""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from scipy import sparse
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import Tags
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import nn

from sparsedp.errors import PrivacyError, PrivacyWarning
from sparsedp.evaluation import refuse_training_arrays
from sparsedp.guarantee import guarantee
from sparsedp.methods import MethodOptions, get_method
from sparsedp.methods.auto import AUTO_METHOD
from sparsedp.methods.plan_config import ACCOUNTANT, CLIP_NORM, EPOCHS, EPSILON, Asked
from sparsedp.optimizers.factory import Rate, rate_for_table
from sparsedp.parameters import Layout
from sparsedp.privacy.normalization import PrivateNormalisation
from sparsedp.results import Result
from sparsedp.runs.record import About
from sparsedp.sklearn.call_stack import check_callers
from sparsedp.sklearn.data import TableDataset, coordinate_count, network
from sparsedp.sklearn.defaults import method_for, ratio_for, seed_of, widths_of
from sparsedp.sklearn.inputs import (
    check_pair,
    class_weights,
    encode_labels,
    encode_units,
    refuse_weights,
)
from sparsedp.sklearn.scaling import (
    INSTEAD,
    Matrix,
    looks_standardized,
    normalization,
    private_normalisation,
    refuse_standardizing,
    scale_to_bounds,
)
from sparsedp.training.data import count_units
from sparsedp.training.fit import fit
from sparsedp.training.planning import AskedMethod

Floats = npt.NDArray[np.float64]

_ROWS_AT_ONCE = 4096


class SparseDPClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Logistic regression, or a small network, trained with differential privacy by any of the methods.

    >>> model = SparseDPClassifier(epsilon=1.0, classes=[0, 1], feature_bounds=(0, 120))
    >>> model.fit(X, y).predict_proba(X_new)  # doctest: +SKIP

    Args:
        epsilon: the budget of one fit. Never exceeded.
        delta: of the guarantee; if not given, a power of ten at most 1/(10 N) and at most 1e-5.
        method: a private method's name, see `sparsedp.all_methods()`, or "auto": dense or sparse by public numbers,
            as `sparsedp.fit` takes it; tp-topk if `active_ratio` or `options` ask for a support.
        classes: all labels there can be. If not given they are read off y, with a warning: a rare class leaks.
        unit: what is protected, such as "patient", when a unit has several rows; then `fit` needs `units`.
        rows_per_unit: rows drawn of a sampled unit; their mean gradient is clipped once.
        feature_bounds: (low, high), numbers or one for each feature: clamped and mapped to [-1, 1].
        normalize: "record" scales each record to L2 norm one (after the bounds); None does not.
        private_scale: columns to divide by their mean size, which is released with noise before training and charged
            in the same plan: names or numbers, or a `PrivateNormalisation` for other noise. Zero stays zero.
        standardize: refused, with an explanation; it is here to be found.
        class_weight: public weights {label: weight} on the loss; "balanced" is refused.
        hidden: width of a hidden layer, or widths of several; () is logistic regression.
        epochs: passes over the data, on average.
        batch_size: expected batch size, in units; if not given, the power of two nearest to 4 sqrt(N).
        lr: rate of SGD with momentum 0.9; if not given, by `sparsedp.optimizers.factory` from batch size, noise,
            number of coordinates and passes, or for a network 0.2 sqrt(batch_size / 128) / clip_norm.
        clip_norm: L2 bound on each unit's gradient.
        active_ratio: share of the coordinates trained; if not given, the method's own, but never
            fewer than 32 coordinates: there is nothing to gain in a handful.
        options: further changes to the method.
        accountant: "pld", "rdp" or "rdp-classic".
        random_state: None draws noise from the operating system. A number or a RandomState makes the fit
            reproducible, and not for release.
        name: what the table is called, for the record and the report.
        out: run directory to make, with plan, ledger and record, for `sparsedp verify`. Never overwritten.
        verbose: 1 shows a progress bar on a terminal.

    Attributes:
        epsilon_: what the fit spent.
        delta_: the delta of the guarantee.
        guarantee_: the guarantee in a sentence.
        for_release_: False if `random_state` was given.
        classes_: the classes, sorted; columns of `predict_proba`.
        method_: the method that was taken, and `reason_` why, if that was left to it.
        kept_features_: names (or numbers) of the features that any active coordinate belongs to at the end.
        model_: the trained PyTorch model, on scaled features.
        result_: everything the run gave back.
        n_units_: number N of units.
        n_iter_: epochs trained.
        n_features_in_: number of features.
        feature_names_in_: their names, if X had names.

    **Privacy.** (epsilon_, delta_) under adding or removing one unit, for the fitted attributes. N, the number of
    features, the classes and every argument here are taken to be public. Several fits on the same data add up.
    **Edge cases.** NaN is refused. Values outside the bounds are clamped. Sparse matrices stay sparse but for the
    batch at hand.
    """

    def __init__(
        self,
        *,
        epsilon: float = EPSILON,
        delta: float | None = None,
        method: str = AUTO_METHOD,
        classes: npt.ArrayLike | None = None,
        unit: str | None = None,
        rows_per_unit: int = 1,
        feature_bounds: tuple[npt.ArrayLike, npt.ArrayLike] | None = None,
        normalize: str | None = None,
        private_scale: PrivateNormalisation | Sequence[Any] | None = None,
        standardize: bool = False,
        class_weight: Mapping[Any, float] | None = None,
        hidden: int | Sequence[int] = (),
        epochs: int = EPOCHS,
        batch_size: int | None = None,
        lr: float | None = None,
        clip_norm: float = CLIP_NORM,
        active_ratio: float | None = None,
        options: MethodOptions | None = None,
        accountant: str = ACCOUNTANT,
        random_state: int | np.random.RandomState | None = None,
        name: str | None = None,
        out: str | Path | None = None,
        verbose: int = 0,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.method = method
        self.classes = classes
        self.unit = unit
        self.rows_per_unit = rows_per_unit
        self.feature_bounds = feature_bounds
        self.normalize = normalize
        self.private_scale = private_scale
        self.standardize = standardize
        self.class_weight = class_weight
        self.hidden = hidden
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.clip_norm = clip_norm
        self.active_ratio = active_ratio
        self.options = options
        self.accountant = accountant
        self.random_state = random_state
        self.name = name
        self.out = out
        self.verbose = verbose

    def fit(
        self, X: Matrix, y: Any, *, units: Any = None, eval_set: Any = None, sample_weight: Any = None
    ) -> Self:
        """Train on (X, y).

        Args:
            X: features, an array or a sparse matrix.
            y: labels.
            units: the id of the unit (patient, user) each row belongs to; without it each row is protected alone.
            eval_set: held-out (X, y), evaluated every epoch for `result_.metrics` and the report. Outside the
                guarantee: no rows of the training data. The same arrays, or views of them, are refused.
            sample_weight: refused, with an explanation.

        A fit that fails leaves the estimator as it was.

        Raises:
            PrivacyError: what is asked for would break the guarantee.
            DataError: labels, units or bounds do not fit.
        """
        refuse_weights(sample_weight)
        refuse_standardizing(self.standardize)
        self._check_method()
        check_callers()
        if eval_set is not None:
            check_pair(eval_set)
            refuse_training_arrays((X, y), eval_set, names=("eval_set", "the training data"))
        with _as_it_was_if_it_fails(self):
            return self._fitted(X, y, units, eval_set)

    def _fitted(self, X: Matrix, y: Any, units: Any, eval_set: Any) -> Self:
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=(np.float64, np.float32))
        check_classification_targets(y)
        if looks_standardized(X):
            warnings.warn(
                "every column of X has mean 0 and deviation 1, as after a StandardScaler: if it was fitted on these "
                f"rows, its means and deviations are not private, and epsilon does not cover them. {INSTEAD}",
                PrivacyWarning,
                stacklevel=3,
            )
        self.classes_, targets = encode_labels(y, self.classes)
        seed = seed_of(self.random_state)
        held_out = None if eval_set is None else self._held_out(*eval_set)
        result = self._train(
            TableDataset(self._scaled(X), targets), encode_units(units, len(y)), seed, held_out
        )
        self._keep(result)
        return self

    def decision_function(self, X: Matrix) -> Floats:
        """Logits: one column per class, or for two classes that of the second against the first."""
        logits = self._logits(X)
        return logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits

    def predict_proba(self, X: Matrix) -> Floats:
        """The probability of each class, in the order of `classes_`."""
        return torch.from_numpy(self._logits(X)).softmax(dim=1).numpy()

    def predict(self, X: Matrix) -> npt.NDArray[Any]:
        """The most probable class of each row."""
        best = self._logits(X).argmax(axis=1)
        return np.asarray(self.classes_[best])

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _check_method(self) -> None:
        told = not isinstance(self.epsilon, bool) and isinstance(self.epsilon, numbers.Real)
        if not told or not math.isfinite(self.epsilon) or self.epsilon <= 0:
            raise PrivacyError(f"epsilon: got {self.epsilon!r}, expected a finite number > 0")
        if self.method != AUTO_METHOD and not get_method(self.method).private:
            raise PrivacyError(
                f"method {self.method!r} protects nobody: it is an ablation for sparsedp.fit; choose a private one, "
                "or sklearn.linear_model.LogisticRegression for a baseline without privacy"
            )

    def _scaled(self, X: Matrix) -> Matrix:
        """The features as the model eats them; every record by itself."""
        normalized = normalization(self.normalize)
        return normalized(X if self.feature_bounds is None else scale_to_bounds(X, self.feature_bounds))

    def _held_out(self, X: Matrix, y: Any) -> TableDataset:
        X = validate_data(self, X, accept_sparse="csr", dtype=(np.float64, np.float32), reset=False)
        return TableDataset(self._scaled(X), encode_labels(np.asarray(y), self.classes_)[1])

    def _train(
        self,
        rows: TableDataset,
        units: torch.Tensor | None,
        seed: int | None,
        held_out: TableDataset | None,
    ) -> Result:
        classes = self.classes_
        model = network(self.n_features_in_, len(classes), widths_of(self.hidden), seed)
        size, asked = coordinate_count(model), self._asked()
        changes = AskedMethod(self.method, self.options, self.active_ratio).changes()
        method, self.reason_ = method_for(
            self.method, changes, model, units=count_units(rows, units), **asked
        )
        self.method_ = method.name
        return fit(
            model,
            rows,
            nn.CrossEntropyLoss(weight=class_weights(self.class_weight, classes), reduction="none"),
            method=method,
            eval_dataset=held_out,
            **asked,
            lr=self._rate(size),
            active_ratio=ratio_for(method, self.options, self.active_ratio, size),
            options=self.options,
            out=self.out,
            seed=seed,
            units=units,
            unit=self.unit,
            rows_per_unit=self.rows_per_unit,
            progress=bool(self.verbose),
            about=About(
                dataset=self.name,
                model="network" if widths_of(self.hidden) else "logistic regression",
                schema=self._schema(held_out),
            ),
        )

    def _asked(self) -> Asked:
        """What is asked of the plan."""
        return {
            "epsilon": float(self.epsilon),
            "delta": self.delta,
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "clip_norm": self.clip_norm,
            "accountant": self.accountant,
            "normalise": private_normalisation(self.private_scale, self._names()),
        }

    def _rate(self, coordinates: int) -> Rate | None:
        """The rate given, or the rule for logistic regression on tables."""
        if self.lr is not None or widths_of(self.hidden):
            return self.lr
        return rate_for_table(coordinates, self.n_features_in_, unit_norm=self.normalize == "record")

    def _names(self) -> list[str] | None:
        names = getattr(self, "feature_names_in_", None)
        return None if names is None else [str(name) for name in names]

    def _schema(self, held_out: TableDataset | None) -> dict[str, Any]:
        bounds, names = self.feature_bounds, self._names()
        return {
            "classes": self.classes_.tolist() if self.classes is not None else None,
            "features": self.n_features_in_,
            "feature_names": names,
            "support": self.reason_,
            "feature_bounds": None if bounds is None else [np.asarray(side).tolist() for side in bounds],
            "normalize": self.normalize,
            "held_out_counts": None
            if held_out is None
            else torch.bincount(held_out.y, minlength=len(self.classes_)).tolist(),
        }

    def _keep(self, result: Result) -> None:
        self.result_ = result
        self.model_ = result.model.double()
        self.epsilon_ = result.epsilon
        self.delta_ = result.delta
        self.for_release_ = result.for_release
        seeded = "" if result.for_release else " Seeded: reproducible, not for release."
        self.guarantee_ = guarantee(result.plan) + seeded
        self.n_units_ = result.plan.units
        self.n_iter_ = len(result.history)
        kept = np.array(result.support.inputs(Layout.of(result.model), self.n_features_in_), dtype=np.int64)
        self.kept_features_ = kept if not hasattr(self, "feature_names_in_") else self.feature_names_in_[kept]

    @torch.no_grad()
    def _logits(self, X: Matrix) -> Floats:
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=(np.float64, np.float32), reset=False)
        X = self._scaled(X)
        parts = []
        for start in range(0, X.shape[0], _ROWS_AT_ONCE):
            rows = X[start : start + _ROWS_AT_ONCE]
            dense = rows.toarray() if sparse.issparse(rows) else rows
            parts.append(self.model_(torch.from_numpy(np.array(dense, dtype=np.float64, order="C"))).numpy())
        return np.concatenate(parts)


@contextmanager
def _as_it_was_if_it_fails(estimator: BaseEstimator) -> Iterator[None]:
    """An earlier fit stays whole: no new classes or columns beside its model."""
    before = dict(vars(estimator))
    try:
        yield
    except BaseException:
        vars(estimator).clear()
        vars(estimator).update(before)
        raise
