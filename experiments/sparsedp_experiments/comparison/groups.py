"""Runs that can be compared, grouped from their records alone: same task, same privacy; one arm per method."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, final

from sparsedp._validate import epsilon_text
from sparsedp_experiments.comparison.colours import method_rank, method_style
from sparsedp_experiments.comparison.metric import MetricStyle, Reference, leading, majority
from sparsedp_experiments.comparison.statistics import Estimate, estimate, paired_difference

Record = Mapping[str, Any]
"""A run's record, or a finished cell's of a sweep."""
BASELINE = "dp-sgd"
_SHORT = {"method.active_ratio": "ratio", "optimizer.groups.0.lr": "lr", "batch_size": "batch"}


class ComparedTask(NamedTuple):
    """What runs must share to be compared; `variant` is set where they share that too."""

    dataset: str | None
    model: str | None
    unit: str
    epsilon: float | None
    delta: float | None
    variant: str | None = None

    @property
    def what(self) -> str:
        """Data set and model."""
        variant = f" ({self.variant})" if self.variant else ""
        return f"{self.dataset or 'unnamed data'}{variant}, {self.model}"

    @property
    def privacy(self) -> str:
        """Epsilon and its unit."""
        if self.epsilon is None:
            return "not private"
        return f"epsilon {epsilon_text(self.epsilon)} per {self.unit}"


@final
@dataclass(frozen=True, slots=True)
class Arm:
    """One method, with one set of settings, over its seeds.

    Attributes:
        label: its method, and what sets it apart from the method's other arms.
        method: the method's name.
        records: its finished runs.
        values: the leading number of each, in the order of `records`.
    """

    label: str
    method: str
    records: tuple[Record, ...] = field(repr=False)
    values: tuple[float, ...]

    @property
    def style(self) -> str:
        """Its colour."""
        return method_style(self.method)

    @property
    def estimate(self) -> Estimate:
        """Mean and interval."""
        return estimate(self.values)

    @property
    def by_seed(self) -> Mapping[int, float]:
        """The values of its seeded runs."""
        pairs = zip(self.records, self.values, strict=True)
        return {record["seed"]: value for record, value in pairs if record["seed"] is not None}

    def against(self, baseline: Arm) -> Estimate | None:
        """Its paired difference to a baseline; None if they share no seed."""
        return paired_difference(self.by_seed, baseline.by_seed)


@final
@dataclass(frozen=True, slots=True)
class Group:
    """The arms of one task.

    Attributes:
        task: what they share.
        metric: the number they are compared by.
        arms: in the order of the methods table.
        baseline: the arm of dp-sgd, if there is exactly one.
        references: numbers that are not of an arm, to read the arms' by.
    """

    task: ComparedTask
    metric: MetricStyle
    arms: tuple[Arm, ...]
    baseline: Arm | None
    references: tuple[Reference, ...] = ()

    @property
    def winner(self) -> Arm | None:
        """The arm whose paired interval against each other arm lies above zero; None if there is none."""
        return next((arm for arm in self.arms if self._beats_all(arm)), None)

    @property
    def improvements(self) -> tuple[Arm, ...]:
        """The arms that are better than the baseline, by their paired interval."""
        rivals = () if self.baseline is None else (self.baseline,)
        return tuple(arm for arm in self.arms if rivals and arm is not rivals[0] and _above(arm, rivals))

    def _beats_all(self, arm: Arm) -> bool:
        others = [other for other in self.arms if other is not arm]
        return bool(others) and _above(arm, others)


def group_records(records: Iterable[Record]) -> tuple[Group, ...]:
    """Finished runs by task, epsilon rising; a run recorded twice counts once, a run without a number not at all."""
    by_task: dict[ComparedTask, list[Record]] = {}
    for record in records:
        if record.get("status", "finished") == "finished" and record["metrics"]:
            by_task.setdefault(_task(record), []).append(record)
    groups = (
        _group(task, found) for task, found in sorted(by_task.items(), key=lambda item: _order(item[0]))
    )
    known = [group for group in groups if group is not None]
    return tuple(replace(group, references=references(group, known)) for group in known)


def _above(arm: Arm, others: Sequence[Arm]) -> bool:
    found = [arm.against(other) for other in others]
    return all(one is not None and one.low is not None and one.low > 0 for one in found)


def _task(record: Record) -> ComparedTask:
    return ComparedTask(
        record["dataset"],
        record["model"],
        record["unit"],
        record["target_epsilon"] if record["private"] else None,
        record["delta"] if record["private"] else None,
    )


def _order(task: ComparedTask) -> tuple[str, str, str, float]:
    return (
        task.dataset or "",
        task.model or "",
        task.unit,
        float("inf") if task.epsilon is None else task.epsilon,
    )


def _group(task: ComparedTask, records: Sequence[Record]) -> Group | None:
    metric = leading([record["metrics"] for record in records])
    if metric is None:
        return None
    variants = {record["variant"] for record in records}
    by_label: dict[tuple[int, str, str], list[Record]] = {}
    for method in {record["method"] for record in records}:
        own = [record for record in records if record["method"] == method]
        for record, label in zip(own, labels(own, variants=len(variants) > 1), strict=True):
            by_label.setdefault((method_rank(method), label, method), []).append(record)
    arms = tuple(
        _arm(label, method, found, metric) for (_, label, method), found in sorted(by_label.items(), key=_key)
    )
    dense = [arm for arm in arms if arm.method == BASELINE]
    if len(variants) == 1:
        task = task._replace(variant=next(iter(variants)))
    return Group(task, metric, arms, dense[0] if len(dense) == 1 else None)


def _key(item: tuple[tuple[int, str, str], Any]) -> tuple[int, str, str]:
    return item[0]


def _arm(label: str, method: str, records: Sequence[Record], metric: MetricStyle) -> Arm:
    once: dict[Any, Record] = {}
    for number, record in enumerate(records):
        once.setdefault(("unseeded", number) if record["seed"] is None else record["seed"], record)
    kept = tuple(once.values())
    return Arm(label, method, kept, tuple(float(record["metrics"][metric.key]) for record in kept))


def labels(records: Sequence[Record], *, variants: bool) -> list[str]:
    """A label for each of one method's runs: the method, its variant if asked for, all settings that differ."""
    settings = [_settings(record) for record in records]
    names = sorted({name for one in settings for name in one})
    differing = [name for name in names if len({repr(one.get(name)) for one in settings}) > 1]
    if not differing and len({record["plan"] for record in records}) > 1:
        settings = [{"plan": record["plan"][:6]} for record in records]
        differing = ["plan"]
    return [
        ", ".join(
            [
                " ".join(filter(None, [record["method"], record["variant"] if variants else None])),
                *(f"{_SHORT.get(name, name.rsplit('.', 1)[-1])} {one.get(name)}" for name in differing),
            ]
        )
        for record, one in zip(records, settings, strict=True)
    ]


def _settings(record: Record) -> dict[str, Any]:
    flat = {
        "batch_size": record["batch_size"],
        "epochs": record["epochs"],
        "accountant": record["accountant"],
    }
    stack: list[tuple[str, Any]] = [("", record["settings"])]
    while stack:
        name, value = stack.pop()
        if isinstance(value, Mapping):
            stack += [(f"{name}.{key}" if name else str(key), item) for key, item in value.items()]
        elif isinstance(value, list):
            stack += [(f"{name}.{number}", item) for number, item in enumerate(value)]
        elif name != "seed":
            flat[name] = value
    return flat


def references(group: Group, groups: Iterable[Group]) -> tuple[Reference, ...]:
    """The best mean without privacy on the same data and model, and the majority class, where they are known."""
    free = [
        arm
        for other in groups
        if other.task.epsilon is None
        and other.task[:2] == group.task[:2]
        and other.metric == group.metric
        and group.task.epsilon is not None
        for arm in other.arms
    ]
    best = max(free, key=lambda arm: arm.estimate.mean, default=None)
    shown = [] if best is None else [Reference(f"without privacy ({best.label})", best.estimate.mean)]
    guesses = {majority(record, group.metric) for arm in group.arms for record in arm.records}
    same = guesses.pop() if len(guesses) == 1 else None
    return (*shown, *((same,) if same is not None else ()))
