"""The record: what a run was, what it cost and how it ended, as one JSON object."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from typing import Any

from torch.optim import Optimizer

from sparsedp.methods.describe import describe
from sparsedp.methods.method import Method
from sparsedp.privacy.plan import Plan
from sparsedp.training.files import Json
from sparsedp.training.result import Result

FORMAT = 1

RUNNING, STOPPED, FINISHED = "running", "stopped", "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """Names for the record, given by whoever starts the run; nothing is read from the data.

    Attributes:
        dataset: name of the data set.
        model: name of the model; its class if not given.
        variant: what sets this run apart from others of the same method.
        schema: declared classes, columns and bounds.
        checksum: of a *public* data set only; a hash of private data is itself private.
        config: settings that start the same run again, as JSON values.
    """

    dataset: str | None = None
    model: str | None = None
    variant: str | None = None
    schema: Mapping[str, Any] | None = None
    checksum: str | None = None
    config: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What is known before the first step.

    Attributes:
        about: names given by the user.
        model_class: what the model is called if no name was given.
        plan: what was planned.
        method: the row of the methods table, options put in.
        dimension: number of trainable scalars.
        seed: the user's, or None.
        public_seed: of random supports.
        setup: optimizer, scheduler, engine and the like.
    """

    about: About
    model_class: str
    plan: Plan
    method: Method
    dimension: int
    seed: int | None
    public_seed: int
    setup: Mapping[str, Json] = field(default_factory=dict)

    @property
    def for_release(self) -> bool:
        """Whether what the run gives may be released with its guarantee: private, and nobody knows its noise."""
        return self.seed is None and self.plan.is_private

    def record(self, status: str, seconds: float, result: Result | None) -> dict[str, Json]:
        """The record's JSON; without a result, what is not known yet is null."""
        plan, about = self.plan, self.about
        outcome = _outcome(result) if result is not None else dict.fromkeys(_OUTCOME)
        return {
            "format": FORMAT,
            "status": status,
            "dataset": about.dataset,
            "model": about.model or self.model_class,
            "method": self.method.name,
            "variant": about.variant,
            "seed": self.seed,
            "for_release": self.for_release,
            "private": plan.is_private,
            "target_epsilon": plan.target_epsilon,
            "delta": plan.delta,
            "accountant": plan.accountant,
            "unit": plan.unit,
            "units": plan.units,
            **outcome,
            "d": self.dimension,
            "batch_size": plan.expected_batch_size(plan.training[0]),
            "epochs": len(plan.epoch_ends()),
            "steps": plan.total_steps,
            "plan": plan.fingerprint,
            "public_seed": self.public_seed,
            "settings": {"method": describe(self.method), **self.setup},
            "schema": None if about.schema is None else dict(about.schema),
            "checksum": about.checksum,
            "config": None if about.config is None else dict(about.config),
            "versions": dict(versions()),
            "timing": {"seconds": round(seconds, 3)},
        }


_OUTCOME = (
    "epsilon", "epsilon_spent", "steps_charged", "test_accuracy", "metrics",
    "k", "active_ratio", "supports", "ledger",
)  # fmt: skip


def _outcome(result: Result) -> dict[str, Json]:
    """What a result adds; infinite epsilon is null."""
    ledger = result.ledger
    values = (
        _finite(result.epsilon),
        _finite(ledger.epsilon),
        ledger.steps,
        result.metrics.get("accuracy"),
        dict(result.metrics),
        result.k,
        result.k / result.d,
        [span.to_json() for span in result.supports],
        {"head": ledger.head, "length": ledger.entries},
    )
    return dict(zip(_OUTCOME, values, strict=True))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@cache
def versions() -> Mapping[str, str]:
    """The versions that decide what a run computes."""
    packages = ("sparsedp", "torch", "numpy", "dp-accounting", "safetensors")
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in packages}}


def describe_optimizer(optimizer: Optimizer) -> Json:
    """Class and hyperparameters of each parameter group."""
    plain = (bool, int, float, str, list, tuple, type(None))
    groups = [
        {name: value for name, value in group.items() if name != "params" and isinstance(value, plain)}
        for group in optimizer.param_groups
    ]
    return {"class": type(optimizer).__name__, "groups": groups}
