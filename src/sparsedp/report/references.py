"""What a held-out number is to be read against: the same task without privacy, and guessing the majority class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from sparsedp.report.metric import MetricStyle

if TYPE_CHECKING:
    from sparsedp.report.groups import Group

HELD_OUT_COUNTS = "held_out_counts"
"""The record's schema: how many held-out rows each class has."""
MAJORITY = "majority class"
_MOST_STRETCH = 2.0


@final
@dataclass(frozen=True, slots=True)
class Reference:
    """A number to compare with, and what has it."""

    name: str
    value: float


def majority(record: Mapping[str, Any], metric: MetricStyle) -> Reference | None:
    """What always guessing the most frequent held-out class gives; None where the record does not count classes."""
    counts = (record.get("schema") or {}).get(HELD_OUT_COUNTS)
    if not counts or not sum(counts):
        return None
    there = sum(number > 0 for number in counts)
    constant = {"accuracy": max(counts) / sum(counts), "auc": 0.5, "balanced_accuracy": 1 / there}
    value = constant.get(metric.key)
    return None if value is None else Reference(MAJORITY, value)


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


def drawn(found: Sequence[Reference], low: float, high: float) -> tuple[Reference, ...]:
    """Those that fit into a chart of low..high without squeezing it below half its size."""
    most = _MOST_STRETCH * (high - low)
    return tuple(one for one in found if max(high, one.value) - min(low, one.value) <= most)


def told(found: Sequence[Reference], metric: MetricStyle) -> str:
    """The references as sentences after a caption."""
    return "".join(f" {one.name[0].upper()}{one.name[1:]}: {metric.text(one.value)}." for one in found)
