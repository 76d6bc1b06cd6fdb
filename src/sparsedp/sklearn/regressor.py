"""A scikit-learn regressor trained with differential privacy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import RegressorMixin
from torch import nn

from sparsedp.errors import PrivacyError, SparseDPError
from sparsedp.optimizers.factory import SQUARED, table_rate
from sparsedp.sklearn.data import TableDataset
from sparsedp.sklearn.estimator import AUTO, LINEAR, Floats, PrivateEstimator
from sparsedp.sklearn.preprocessing import Rule

if TYPE_CHECKING:
    import os

    from sparsedp.methods import MethodOptions
    from sparsedp.privacy.normalization import PrivateNormalisation
    from sparsedp.privacy.plan import Plan
    from sparsedp.sklearn.budget import PrivacyBudget


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

    _linear_name = "linear regression"
    _y_check = MappingProxyType({"y_numeric": True})

    def __init__(
        self,
        *,
        target_bounds: tuple[float, float] | None = None,
        loss: str = "squared",
        epsilon: float = 3.0,
        delta: float | None = None,
        columns: Mapping[Any, Rule] | None = None,
        bounds: tuple[npt.ArrayLike, npt.ArrayLike] | None = None,
        unit: str | None = None,
        rows_per_unit: int = 1,
        unit_norm: bool = False,
        private_scale: PrivateNormalisation | Sequence[Any] | None = None,
        model: str = LINEAR,
        hidden_layer_sizes: int | Sequence[int] = (),
        budget: PrivacyBudget | None = None,
        method: str = AUTO,
        epochs: int = 20,
        batch_size: int | None = None,
        lr: float | None = None,
        max_grad_norm: float = 1.0,
        active_ratio: float | None = None,
        options: MethodOptions | None = None,
        accountant: str = "pld",
        random_state: int | np.random.RandomState | None = None,
        name: str | None = None,
        run_dir: str | os.PathLike[str] | Path | None = None,
        resume: bool = False,
        verbose: int = 0,
    ) -> None:
        self.target_bounds = target_bounds
        self.loss = loss
        self.epsilon = epsilon
        self.delta = delta
        self.columns = columns
        self.bounds = bounds
        self.unit = unit
        self.rows_per_unit = rows_per_unit
        self.unit_norm = unit_norm
        self.private_scale = private_scale
        self.model = model
        self.hidden_layer_sizes = hidden_layer_sizes
        self.budget = budget
        self.method = method
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.max_grad_norm = max_grad_norm
        self.active_ratio = active_ratio
        self.options = options
        self.accountant = accountant
        self.random_state = random_state
        self.name = name
        self.run_dir = run_dir
        self.resume = resume
        self.verbose = verbose

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
            low, high = map(float, self.target_bounds)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            low = high = math.nan
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise PrivacyError(
                f"target_bounds: got {self.target_bounds!r}, expected (low, high), finite, known without looking at "
                "the data: targets are clamped to them, and the largest value of a target is somebody's"
            )
        return low, high

    def _linear_rate(self, plan: Plan, coordinates: int, length: float) -> float:
        return table_rate(plan, coordinates, length, SQUARED)

    def _shaped(self, weight: Floats, bias: Floats) -> tuple[Any, Any]:
        low, high = self._range()
        half = (high - low) / 2
        return half * weight[0], float(low + half * (bias[0] + 1))

    def _target_schema(self, held_out: TableDataset | None) -> dict[str, Any]:
        return {"target_bounds": list(self._range()), "loss": self.loss}
