"""The record: what a run was, what it cost and how it ended, as one JSON object."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from typing import Any, TypedDict, cast

from sparsedp._files import Json
from sparsedp.methods.method import Method
from sparsedp.parameters import Layout
from sparsedp.privacy.mechanism import NOISE
from sparsedp.privacy.plan import Plan
from sparsedp.runs.history import SupportSpan

FORMAT = 1

RUNNING, STOPPED, FINISHED = "running", "stopped", "finished"


class LedgerPlace(TypedDict):
    """A place in the ledger: its last line's hash, and how many lines there are."""

    head: str
    length: int


class SpanRecord(TypedDict):
    """A support and when it began."""

    step: int
    active: int
    by_parameter: dict[str, int]


class Record(TypedDict):
    """The record, key by key; `docs/run-format.md` says what each means."""

    format: int
    status: str
    dataset: str | None
    model: str
    method: str
    variant: str | None
    seed: int | None
    for_release: bool
    private: bool
    noise: str | None
    target_epsilon: float | None
    delta: float | None
    accountant: str | None
    unit: str
    units: int
    epsilon: float | None
    epsilon_spent: float | None
    steps_charged: int | None
    test_accuracy: float | None
    metrics: dict[str, float | None] | None
    k: int | None
    active_ratio: float | None
    supports: list[SpanRecord] | None
    ledger: LedgerPlace | None
    d: int
    batch_size: float
    epochs: int
    steps: int
    plan: str
    public_seed: int
    settings: dict[str, Any]
    schema: dict[str, Any] | None
    checksum: str | None
    config: dict[str, Any] | None
    versions: dict[str, str]
    timing: dict[str, float]


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
class Outcome:
    """What a run knows when it stops or ends.

    Attributes:
        epsilon: of the whole plan; infinite when not private.
        epsilon_spent: of the steps charged.
        steps_charged: how many those are.
        metrics: the last evaluation on held-out data.
        k: active coordinates at the end.
        d: trainable scalars.
        supports: when the support changed.
        head: the ledger's.
        length: the ledger's.
    """

    epsilon: float
    epsilon_spent: float
    steps_charged: int
    metrics: Mapping[str, float | None]
    k: int
    d: int
    supports: Sequence[SupportSpan]
    head: str | None
    length: int

    def to_json(self) -> dict[str, Json]:
        """The record's keys for it; infinite epsilon is null."""
        values = (
            _finite(self.epsilon),
            _finite(self.epsilon_spent),
            self.steps_charged,
            self.metrics.get("accuracy"),
            dict(self.metrics),
            self.k,
            self.k / self.d,
            [span.to_json() for span in self.supports],
            {"head": self.head, "length": self.length},
        )
        return dict(zip(OUTCOME, values, strict=True))


OUTCOME = (
    "epsilon", "epsilon_spent", "steps_charged", "test_accuracy", "metrics",
    "k", "active_ratio", "supports", "ledger",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What is known before the first step.

    Attributes:
        about: names given by the user.
        model_class: what the model is called if no name was given.
        plan: what was planned.
        method: the row of the methods table, options put in.
        layout: the trainable parameters.
        seed: the user's, or None.
        public_seed: of random supports.
        setup: optimizer, scheduler, engine and the like, as the record shows them.
        details: what else decides the training: the scheduler's numbers, and which parameters are in which group.
    """

    about: About
    model_class: str
    plan: Plan
    method: Method
    layout: Layout
    seed: int | None
    public_seed: int
    setup: Mapping[str, Json] = field(default_factory=dict)
    details: Mapping[str, Json] = field(default_factory=dict)

    @property
    def for_release(self) -> bool:
        """Whether what the run gives may be released with its guarantee: private, and nobody knows its noise."""
        return self.seed is None and self.plan.is_private

    def record(self, status: str, seconds: float, outcome: Outcome | None) -> Record:
        """The record; without an outcome, what is not known yet is null."""
        plan, about = self.plan, self.about
        record = {
            "format": FORMAT,
            "status": status,
            "dataset": about.dataset,
            "model": about.model or self.model_class,
            "method": self.method.name,
            "variant": about.variant,
            "seed": self.seed,
            "for_release": self.for_release,
            "private": plan.is_private,
            "noise": NOISE if plan.is_private else None,
            "target_epsilon": plan.target_epsilon,
            "delta": plan.delta,
            "accountant": plan.accountant,
            "unit": plan.unit,
            "units": plan.units,
            **(dict.fromkeys(OUTCOME) if outcome is None else outcome.to_json()),
            "d": self.layout.dimension,
            "batch_size": plan.expected_batch_size(plan.training[0]),
            "epochs": len(plan.epoch_ends()),
            "steps": plan.total_steps,
            "plan": plan.fingerprint,
            "public_seed": self.public_seed,
            "settings": {"method": self.method.to_json(), **self.setup},
            "schema": None if about.schema is None else dict(about.schema),
            "checksum": about.checksum,
            "config": None if about.config is None else dict(about.config),
            "versions": dict(versions()),
            "timing": {"seconds": round(seconds, 3)},
        }
        return cast("Record", record)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@cache
def versions() -> Mapping[str, str]:
    """The versions that decide what a run computes."""
    packages = ("sparsedp", "torch", "numpy", "dp-accounting", "safetensors")
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in packages}}
