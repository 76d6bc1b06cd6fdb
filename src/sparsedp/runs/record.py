"""What a run writes about itself: its record, the metrics of its epochs, its supports. All public."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, TypedDict, cast, final

from sparsedp._files import Json, parse_json
from sparsedp._serialization import from_json, to_json
from sparsedp.errors import DataError, SparseDPError
from sparsedp.methods.method import Method
from sparsedp.parameters import ParameterLayout, Support
from sparsedp.privacy.mechanism import NOISE, Release
from sparsedp.privacy.plan import Plan

FORMAT = 1

RUNNING, STOPPED, FINISHED = "running", "stopped", "finished"


class LedgerPlace(TypedDict):
    """A place in the ledger: its last line's hash, and how many lines there are."""

    head: str | None
    length: int


@dataclass(frozen=True, slots=True)
class EpochMetrics:
    """One epoch is done: a line of `metrics.jsonl`.

    Attributes:
        epoch: from 1.
        step: how many steps of the plan are done, those lost in a crash included.
        phase: the plan's phase of the last step.
        epsilon: what the plan's steps so far cost.
        active: how many coordinates are active.
        active_ratio: the share of all coordinates they are.
        learning_rate: the first parameter group's.
        metrics: on held-out data, which is outside the guarantee; None where not finite.
        training_loss: the mean loss of the epoch's last step, released with noise; None without `private_loss`.
        training_loss_noise: the standard deviation of its noise. Public.
    """

    epoch: int
    step: int
    phase: str
    epsilon: float
    active: int
    active_ratio: float
    learning_rate: float
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    training_loss: float | None = None
    training_loss_noise: float | None = None


@dataclass(frozen=True, slots=True)
class SupportSpan:
    """A support: the first step with it, its size, and how many coordinates each parameter kept."""

    step: int
    active: int
    by_parameter: Mapping[str, int]


@final
class History:
    """Grows with every epoch and every change of the support; a checkpoint carries all of it.

    The support is the last step's; all coordinates before the first.
    """

    def __init__(
        self,
        layout: ParameterLayout,
        epochs: Sequence[EpochMetrics] = (),
        spans: Sequence[SupportSpan] = (),
        support: Support | None = None,
    ) -> None:
        self._layout = layout
        self.epochs, self.spans = list(epochs), list(spans)
        self.support = Support.full(layout.dimension) if support is None else support

    def record_support(self, released: Release) -> None:
        """Remember the support of a step if it is a new one."""
        support = released.support
        if self.spans and (support is self.support or support == self.support):
            return
        self.support = support
        counts = {name: places.numel() for name, places in support.split(self._layout).items()}
        self.spans.append(SupportSpan(released.step, support.size, counts))


class RunRecord(TypedDict):
    """The record, key by key; `docs/run-format.md` says what each means."""

    format: int
    status: str
    dataset: str | None
    model: str
    method: str
    variant: str | None
    seed: int | None
    publishable: bool
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
    supports: list[dict[str, Any]] | None
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


OUTCOME = (
    "epsilon", "epsilon_spent", "steps_charged", "test_accuracy", "metrics",
    "k", "active_ratio", "supports", "ledger",
)  # fmt: skip
"""Keys of the record that are null while the run goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMetadata:
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
class RunSetup:
    """What is known before the first step; `details` is what else decides the training (numbers, groups)."""

    metadata: RunMetadata
    model_class: str
    plan: Plan
    method: Method
    layout: ParameterLayout
    seed: int | None
    public_seed: int
    settings: Mapping[str, Json] = field(default_factory=dict)
    details: Mapping[str, Json] = field(default_factory=dict)

    @property
    def publishable(self) -> bool:
        """Whether what the run gives may be published with its guarantee: its noise is secret."""
        return self.seed is None

    def record(self, status: str, seconds: float, outcome: Mapping[str, Json] | None = None) -> RunRecord:
        """Make the record; without an outcome (the values of `OUTCOME`), what is not known yet is null."""
        plan = self.plan
        record = {
            "format": FORMAT,
            "status": status,
            **to_json(self.metadata),
            "model": self.metadata.model or self.model_class,
            **stated(plan, self.seed),
            **(dict.fromkeys(OUTCOME) if outcome is None else to_json(outcome)),
            "d": self.layout.dimension,
            "plan": plan.fingerprint,
            "public_seed": self.public_seed,
            "settings": {"method": self.method.to_json(), **self.settings},
            "versions": dict(versions()),
            "timing": {"seconds": round(seconds, 3)},
        }
        return cast("RunRecord", {name: record[name] for name in RunRecord.__annotations__})


def stated(plan: Plan, seed: int | None) -> dict[str, Json]:
    """The claims of a record that follow from its plan and its seed."""
    return {
        "method": plan.method,
        "seed": seed,
        "publishable": seed is None,
        "noise": NOISE,
        "target_epsilon": plan.target_epsilon,
        "delta": plan.delta,
        "accountant": plan.accountant,
        "unit": plan.unit,
        "units": plan.units,
        "batch_size": plan.expected_batch_size(plan.training[0]),
        "epochs": len(plan.epoch_ends()),
        "steps": plan.total_steps,
    }


@cache
def versions() -> Mapping[str, str]:
    """The versions that decide what a run computes."""
    packages = ("sparsedp", "torch", "numpy", "dp-accounting", "safetensors")
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in packages}}


def plan_bytes(plan: Plan) -> bytes:
    """The plan as a file."""
    return (plan.to_json() + "\n").encode()


def metrics_bytes(epochs: Iterable[EpochMetrics]) -> bytes:
    """The metrics of epochs as a file: one line each."""
    return b"".join((json.dumps(one, allow_nan=False) + "\n").encode() for one in epochs_json(epochs))


def epochs_json(epochs: Iterable[EpochMetrics]) -> list[Json]:
    """The metrics of epochs as JSON values, without a loss where none was released."""
    return [{name: value for name, value in to_json(one).items() if value is not None} for one in epochs]


def read_plan(file: Path) -> Plan:
    """Read a plan."""
    with wrap_read_errors(file):
        return Plan.from_json(file.read_text())


def read_metrics(file: Path) -> tuple[EpochMetrics, ...]:
    """Read the metrics of epochs."""
    with wrap_read_errors(file):
        content, found = file.read_bytes(), []
        for number, line in enumerate(content.split(b"\n")[:-1], start=1):
            where = f"{file}, line {number}"
            found.append(from_json(EpochMetrics, parse_json(line, where), where))
        if not content.endswith(b"\n") and content:
            raise DataError(f"{file} is damaged: its last line is cut short")
        return tuple(found)


def read_record(file: Path) -> RunRecord:
    """Read a record."""
    with wrap_read_errors(file):
        value = parse_json(file.read_bytes(), str(file))
        found = value.get("format") if isinstance(value, dict) else type(value).__name__
        if found != FORMAT or isinstance(found, bool):
            raise DataError(
                f"{file}: got format {found!r}, expected {FORMAT}; records of other formats are not read"
            )
        return from_json(RunRecord, value, str(file))


@contextmanager
def wrap_read_errors(file: Path) -> Iterator[None]:
    """Raise a `DataError` that names the file, whatever reading it raises."""
    try:
        yield
    except SparseDPError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{file} is missing; is {file.parent} the folder of a run?") from error
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error})") from error
    except Exception as error:
        remedy = "restore it from a copy, or start a new run elsewhere"
        raise DataError(f"{file} is damaged ({type(error).__name__}: {error}); {remedy}") from error
