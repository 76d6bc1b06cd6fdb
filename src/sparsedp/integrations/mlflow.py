"""MLflow: a callback that logs released values, public numbers and held-out metrics."""

from __future__ import annotations

from typing import final

import mlflow

from sparsedp.results import Callback, StepReport
from sparsedp.runs.record import EpochMetrics


@final
class MLflowLog(Callback):
    """A callback for `fit`, `Trainer` and `make_private`: metrics of the active MLflow run.

    Formal guarantees: Takes released gradients, public numbers and held-out metrics; nothing else reaches a callback.
    """

    def on_step(self, report: StepReport) -> None:
        """Log what a step released."""
        values = {
            "released_norm": float(report.released.mean.norm()),
            "active_ratio": report.released.support.active_ratio,
            "learning_rate": report.learning_rates[0],
        }
        mlflow.log_metrics(values, step=report.step)

    def on_epoch(self, metrics: EpochMetrics) -> None:
        """Log an epoch's epsilon and held-out numbers."""
        values = {"epsilon": metrics.epsilon, **{f"held_out_{k}": v for k, v in metrics.metrics.items()}}
        values["training_loss"] = metrics.training_loss
        known = {name: value for name, value in values.items() if value is not None}
        mlflow.log_metrics(known, step=metrics.step)
