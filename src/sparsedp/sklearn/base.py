"""What the private estimators share: a fit by `sparsedp.fit`, its budget, its surroundings, and what it predicts."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch
from scipy import sparse
from sklearn.base import BaseEstimator
from sklearn.preprocessing import normalize
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import nn

from sparsedp._validate import positive_epsilon
from sparsedp.errors import DataError, PrivacyError, PrivacyWarning, SparseDPError
from sparsedp.evaluation import refuse_training_arrays
from sparsedp.guarantee import guarantee
from sparsedp.loading import DataConfig
from sparsedp.methods import get_method
from sparsedp.optimizers.factory import AVERAGED, table_rate
from sparsedp.parameters import ParameterLayout
from sparsedp.privacy.normalization import PrivateNormalisation
from sparsedp.privacy.plan import Plan
from sparsedp.runs.record import RunMetadata
from sparsedp.sklearn.columns import Column, Floats, Matrix, Rule
from sparsedp.sklearn.data import (
    TableDataset,
    encode_units,
    named_after,
    names_somebody,
    network,
    seed_of,
    widths_of,
)
from sparsedp.sklearn.preprocessing import (
    PublicEncoder,
    checked_bounds,
    refuse_what_is_no_number,
    scale_to_bounds,
    what_is_no_number,
)
from sparsedp.sklearn.surroundings import INSTEAD, check_callers, steps_before, warn
from sparsedp.training.fit import fit
from sparsedp.training.planning import RunConfig, changed_method

if TYPE_CHECKING:
    from sparsedp.methods import Method
    from sparsedp.methods.phases import ClipNorm
    from sparsedp.sklearn.budget import PrivacyBudget

AUTO, LINEAR, ADDITIVE = "auto", "linear", "additive"
_AT_ONCE = 4096
_AS_GIVEN = (
    "epsilon", "noise_multiplier", "delta", "epochs", "batch_size", "max_grad_norm", "accountant", "run_dir",
    "resume",
)  # fmt: skip
"""The settings that `fit` takes as they are."""
_KNOTS, _MANY_UNITS = (5, 9), 10_000
"""How many knots a number has in an additive model: with few units, and from here on."""
_FEWEST_COORDINATES = 32
_MANY_FEATURES = 200
"""From here on described columns are encoded as a sparse matrix."""
_WIDE = 1e5
"""Bounds this far apart leave most values of a skewed column at one end."""


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateEstimator(BaseEstimator):  # type: ignore[misc]
    """The settings, the fit and the logits of a private estimator, as `SparseDPClassifier` explains them."""

    epsilon: float | None = 3.0
    noise_multiplier: float | None = None
    delta: float | None = None
    columns: Mapping[Any, Rule] | None = None
    bounds: tuple[npt.ArrayLike, npt.ArrayLike] | None = None
    unit: str | None = None
    rows_per_unit: int = 1
    unit_norm: bool = False
    private_scale: PrivateNormalisation | Sequence[Any] | None = None
    model: str = LINEAR
    hidden_layer_sizes: int | Sequence[int] = ()
    budget: PrivacyBudget | None = None
    method: str | Method = AUTO
    epochs: int = 20
    batch_size: int | None = None
    lr: float | None = None
    max_grad_norm: ClipNorm = 1.0
    active_ratio: float | None = None
    accountant: str = "pld"
    random_state: int | np.random.RandomState | None = None
    name: str | None = None
    run_dir: str | Path | None = None
    resume: bool = False
    verbose: int = 0

    def fit(self, X: Any, y: Any, *, groups: Any = None, eval_set: Any = None) -> Self:
        """Train on (X, y).

        Args:
            X: a pandas or polars frame, an array or a sparse matrix.
            y: labels or targets.
            groups: the id of the unit (patient, user) that each example belongs to. Without it, and without a column
                described as "unit", each example is protected alone.
            eval_set: held-out (X, y), evaluated every epoch for `result_.metrics` and the report. Outside the
                guarantee: no examples of the training data. The same arrays, or views of them, are refused.

        Raises:
            PrivacyError: what is asked for would break the guarantee.
            DataError: columns, labels, groups or bounds do not fit.
        """
        if self.noise_multiplier is None:
            positive_epsilon(self.epsilon)
        check_callers(self)
        features, groups = self._features_to_fit(X, groups)
        features, targets = self._validated(features, y)
        self._warn_of_numbers(len(targets), groups)
        examples, held_out = TableDataset(features, self._encoded_targets(targets)), None
        if eval_set is not None:
            refuse_training_arrays((X, y), eval_set, names=("eval_set", "the training data"))
            labels = self._encoded_targets(np.asarray(eval_set[1]), held_out=True)
            held_out = TableDataset(self._features(eval_set[0]), labels)
        self._train(examples, encode_units(groups, len(targets)), held_out)
        return self

    @abstractmethod
    def _encoded_targets(self, y: npt.NDArray[Any], *, held_out: bool = False) -> torch.Tensor:
        """The targets as the loss takes them; learns what they are from the constructor, and from y if it must."""

    @abstractmethod
    def _criterion(self) -> nn.Module:
        """The loss of each example."""

    @abstractmethod
    def _outputs(self) -> int:
        """The outputs of the model."""

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        if self.columns is not None:
            tags.input_tags.string = tags.input_tags.categorical = tags.input_tags.allow_nan = True
        return tags

    def guarantee_report(self, path: str | Path) -> Path:
        """Write the guarantee in words, on one page to print for a data-protection officer; says where it is.

        Args:
            path: the HTML file to write.
        """
        from sparsedp.report import write_guarantee

        check_is_fitted(self)
        return write_guarantee(self, path)

    def _features_to_fit(self, X: Any, groups: Any) -> tuple[Matrix, Any]:
        """The features of the training data, and who each example belongs to."""
        if self.model not in (LINEAR, ADDITIVE) or (self.model == ADDITIVE and self.columns is None):
            raise SparseDPError(
                f"model: got {self.model!r}, expected 'linear', or 'additive' with a description of the columns"
            )
        if self.columns is None:
            self.__dict__.pop("encoder_", None)
            return X, groups
        if self.bounds is not None:
            raise DataError("columns and bounds were both given; describe the bounds in columns alone")
        encoder = PublicEncoder(self.columns).fit(X)
        if encoder.unit_column is not None:
            if groups is not None:
                raise PrivacyError(
                    f"groups was given, and column {encoder.unit_column!r} is described as the unit; give one of them"
                )
            groups = encoder.unit_ids(X)
        if self.model == ADDITIVE:
            units = _count_units(X.shape[0] if hasattr(X, "shape") else len(X), groups)
            encoder.set_params(knots=_KNOTS[units >= _MANY_UNITS])
        features = len(encoder.get_feature_names_out())
        if not features:
            raise DataError("columns: every column is left out, expected at least one feature")
        self.encoder_ = encoder.set_params(sparse_output=features > _MANY_FEATURES)
        return encoder.transform(X), groups

    def _validated(self, X: Matrix, y: Any) -> tuple[Matrix, npt.NDArray[Any]]:
        """The features, scaled as the model eats them, and y; every example by itself."""
        if self.columns is None:
            refuse_what_is_no_number(X)
        numbers = np.asarray(y) if self._y_check else np.zeros(0)
        what = what_is_no_number(numbers) if numbers.ndim == 1 else None
        if what is not None and what.startswith(("text", "dates")):  # scikit-learn's message would show one
            raise DataError(f"y holds {what}, expected numbers within target_bounds; leave such rows out")
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=(np.float64, np.float32), **self._y_check)
        if self.columns is not None:
            self.n_features_in_ = self.encoder_.n_features_in_
            names = getattr(self.encoder_, "feature_names_in_", None)
            self.__dict__.pop("feature_names_in_", None)
            if names is not None and all(isinstance(name, str) for name in names):
                self.feature_names_in_ = names
        return self._scaled(X), y

    _y_check: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    def _features(self, X: Any) -> Matrix:
        if self.columns is not None:
            return self._scaled(self.encoder_.transform(X))
        refuse_what_is_no_number(X)
        X = validate_data(self, X, accept_sparse="csr", dtype=(np.float64, np.float32), reset=False)
        return self._scaled(X)

    def _scaled(self, X: Matrix) -> Matrix:
        if self.bounds is not None:
            X = scale_to_bounds(X, self.bounds)
        return normalize(X) if self.unit_norm else X

    def _train(
        self, examples: TableDataset, units: torch.Tensor | None, held_out: TableDataset | None
    ) -> None:
        seed, unit = seed_of(self.random_state), self.unit
        if unit is None and self.columns is not None and self.encoder_.unit_column is not None:
            unit = named_after(str(self.encoder_.unit_column))
        widths = widths_of(self.hidden_layer_sizes)
        model = network(examples.X.shape[1], self._outputs(), widths, seed)
        count = ParameterLayout.of(model).dimension

        def planned(plan: Plan) -> float:
            """The rate of a plan; `fit` asks for it before anything is released, so the budget pays first."""
            if self.budget is not None:
                run = None if self.run_dir is None else Path(self.run_dir)
                self.budget.draw(plan, self.name or type(self).__name__, run, paid=self.resume)
            return self._rate(plan, count)

        name = "network" if widths else ("additive " if self.model == ADDITIVE else "") + self._linear_name
        about = RunMetadata(dataset=self.name, model=name, schema=self._schema(held_out))
        result = fit(
            model,
            examples,
            self._criterion(),
            method=changed_method(self.method, active_ratio=self._ratio(count)),
            normalise=self._private_normalisation(),
            ema_decay=1.0,
            eval_dataset=held_out,
            lr=planned,
            seed=seed,
            unit_ids=units,
            data=DataConfig(rows_per_unit=self.rows_per_unit, unit_name=unit),
            progress=bool(self.verbose),
            run=RunConfig(metadata=about),
            **{name: getattr(self, name) for name in _AS_GIVEN},
        )
        self._keep(result, examples.X.shape[1])

    def _rate(self, plan: Plan, coordinates: int) -> float:
        """The rate given, or the rule from public numbers."""
        if self.lr is not None:
            return float(self.lr)
        if widths_of(self.hidden_layer_sizes):
            last = plan.phases[-1]
            return 0.2 * math.sqrt(plan.expected_batch_size(last) / 128) / last.clip_norm
        length = 1.0
        if not self.unit_norm and self.columns is None:
            length = math.sqrt(math.sqrt(self.n_features_in_))
        elif not self.unit_norm:
            spare = len(self.encoder_.get_feature_names_out()) - self.encoder_.feature_count()
            coordinates -= spare * (1 if self._outputs() == 2 else self._outputs())
            length = self.encoder_.typical_length()
        return table_rate(plan, coordinates, length, self._rate_factor())

    def _rate_factor(self) -> float:
        return 1.0 if self.model == ADDITIVE else AVERAGED

    def _ratio(self, coordinates: int) -> float | None:
        """The ratio given, or None for the method's own, or one that leaves a small model enough coordinates."""
        if self.active_ratio is not None or self.method == AUTO or not isinstance(self.method, str):
            return self.active_ratio
        own = get_method(self.method)
        fewest = min(1.0, _FEWEST_COORDINATES / coordinates)
        small = own.ranking is not None and own.active_ratio is not None and own.active_ratio < fewest
        return fewest if small else None

    def _encoded_names(self) -> npt.NDArray[Any] | None:
        found: npt.NDArray[Any] | None = getattr(self, "feature_names_in_", None)
        return found if self.columns is None else self.encoder_.get_feature_names_out()

    def _private_normalisation(self) -> PrivateNormalisation | None:
        """What `private_scale` asks for: features by name or number are scaled around zero."""
        choice = self.private_scale
        if choice is None or isinstance(choice, PrivateNormalisation):
            return choice
        found = self._encoded_names()
        names = [] if found is None else [str(name) for name in found]
        listed = [choice] if isinstance(choice, str) else list(choice)
        if strangers := [one for one in listed if isinstance(one, str) and one not in names]:
            known = "numbers, as X has no names" if not names else f"some of {', '.join(names[:12])}"
            raise DataError(f"private_scale: got the columns {strangers[:6]}, expected {known}")
        places = tuple(names.index(one) if isinstance(one, str) else one for one in listed)
        return PrivateNormalisation(centre=False, columns=places)

    def _schema(self, held_out: TableDataset | None) -> dict[str, Any]:
        names = self._encoded_names()
        bounds = None if self.bounds is None else [np.asarray(one).tolist() for one in self.bounds]
        return {
            "features": len(names) if names is not None else self.n_features_in_,
            "feature_names": None if names is None else [str(name) for name in names],
            "columns": None if self.columns is None else self.encoder_.describe().splitlines(),
            "feature_bounds": bounds,
            "normalize": "unit norm" if self.unit_norm else None,
            **self._target_schema(held_out),
        }

    @abstractmethod
    def _target_schema(self, held_out: TableDataset | None) -> dict[str, Any]:
        """What the record says of the target."""

    def _keep(self, result: Any, features: int) -> None:
        self.result_ = result
        self.model_ = result.model.double()
        self.epsilon_, self.delta_ = result.epsilon, result.delta
        self.method_ = result.plan.method
        self.publishable_ = result.publishable
        seeded = "" if result.publishable else " Seeded: reproducible, not for release."
        self.guarantee_ = guarantee(result.plan) + seeded
        self.n_units_ = result.plan.units
        self.n_iter_ = len(result.history)
        kept = np.array(result.support.inputs(ParameterLayout.of(result.model), features), dtype=np.int64)
        names = self._encoded_names()
        self.kept_features_ = kept if names is None else np.asarray(names)[kept]
        for name in ("coef_", "intercept_", "coef_names_"):
            self.__dict__.pop(name, None)
        linear = [part for part in self.model_.modules() if isinstance(part, nn.Linear)]
        if len(linear) != 1:
            return
        weight, bias = (part.detach().numpy().copy() for part in (linear[0].weight, linear[0].bias))
        if hasattr(self.model_, "centre"):  # the private scale is part of the model
            scale, centre = (getattr(self.model_, name).double().numpy() for name in ("scale", "centre"))
            weight = weight / scale
            bias = bias - weight @ centre
        self.coef_, self.intercept_ = self._shaped(weight, bias)
        self.coef_names_ = np.array([f"x{place}" for place in range(features)]) if names is None else names

    def _shaped(self, weight: Floats, bias: Floats) -> tuple[Any, Any]:
        return weight, bias

    @torch.no_grad()
    def _logits(self, X: Any) -> Floats:
        check_is_fitted(self)
        X = self._features(X)
        parts = []
        for start in range(0, X.shape[0], _AT_ONCE):
            some = X[start : start + _AT_ONCE]
            dense = some.toarray() if sparse.issparse(some) else some
            parts.append(self.model_(torch.from_numpy(np.array(dense, dtype=np.float64, order="C"))).numpy())
        return np.concatenate(parts)

    def _warn_of_numbers(self, examples: int, groups: Any) -> None:
        """Warn of what ruins a model, from public numbers, names and the user's own bounds."""
        rules = self.columns or {}
        kept = [name for name in getattr(self, "feature_names_in_", ()) if rules.get(name) != "drop"]
        somebody = [name for name in kept if names_somebody(str(name))]
        if groups is None and self.unit is None and somebody:
            warn(
                f"column {somebody[0]!r} looks like an id by its name, and no groups were given: each example is "
                f"protected alone, and whoever has several is not. Give groups=ids, or describe the column as "
                f'"unit" (or as "drop", if each id has one example)',
                PrivacyWarning,
            )
        scaled = any(one is not None for one in (self.columns, self.bounds, self.private_scale))
        if not (scaled or self.unit_norm or steps_before()):
            warn(
                f"no bounds were given: features far from -1 .. 1 learn badly under clipping. {INSTEAD}; "
                "bounds=(-1, 1) says that they are scaled already"
            )
        described = [Column.described(name, rule) for name, rule in rules.items()]
        wide = [one.name for one in described if one.kind == "number" and one.high - one.low >= _WIDE]
        if self.bounds is not None:
            low, high = checked_bounds(self.bounds, self.n_features_in_)
            known = np.array(getattr(self, "feature_names_in_", range(self.n_features_in_)))
            wide = known[high - low >= _WIDE].tolist()
        for name in wide:
            warn(
                f"the bounds of column {name!r} are five orders of magnitude apart or more: most values will be next "
                "to one end, where their differences vanish. Give narrower bounds (values outside are clamped), or "
                '("count", high), which takes logarithms'
            )
        units, names = _count_units(examples, groups), self._encoded_names()
        width = self.n_features_in_ if names is None else len(names)
        if self.epsilon is not None and units * self.epsilon < 10 * min(width, 100):
            warn(
                f"{units} units are few for epsilon={self.epsilon:g} and {width} features: the noise may be all "
                "there is to see. Use fewer features, more units, or a larger epsilon"
            )


def _count_units(examples: int, groups: Any) -> int:
    return examples if groups is None else len(np.unique(np.asarray(groups).astype(str)))
