"""MLflow: a callback that logs released values, public numbers and held-out metrics."""

from __future__ import annotations

from typing import final

import mlflow

from sparsedp.results import Event, StepReport


@final
class MLflowLog:
    """A callback for `fit`, `Trainer` and `make_private`: metrics of the active MLflow run.

    **Privacy.** Takes released gradients, public numbers and held-out metrics; nothing else reaches a callback.
    """

    def __call__(self, event: Event) -> None:
        """Log a step or an epoch."""
        if isinstance(event, StepReport):
            values: dict[str, float | None] = {
                "released_norm": float(event.released.mean.norm()),
                "active_ratio": event.released.support.active_ratio,
                "learning_rate": event.learning_rates[0],
            }
        else:
            values = {"epsilon": event.epsilon, **{f"held_out_{k}": v for k, v in event.metrics.items()}}
        known = {name: value for name, value in values.items() if value is not None}
        mlflow.log_metrics(known, step=event.step)
