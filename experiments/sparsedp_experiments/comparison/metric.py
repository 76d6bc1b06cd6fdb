"""Held-out metrics: which one a table leads with, how each reads, and what it is to be read against."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

from sparsedp._validate import percent, significant

HELD_OUT_COUNTS = "held_out_counts"
"""The record's schema: how many held-out rows each class has."""
MAJORITY = "majority class"


@final
@dataclass(frozen=True, slots=True)
class MetricStyle:
    """A held-out number.

    Attributes:
        key: its name in `metrics`.
        title: what people call it.
        share: whether it reads as a percentage.
        unit: what differences of it are counted in.
        bounded: whether it lies in 0..1.
    """

    key: str
    title: str
    share: bool
    unit: str
    bounded: bool = True

    def within(self, value: float) -> float:
        """A value moved to where the metric can be; an interval may reach beyond."""
        return min(max(value, 0.0), 1.0) if self.bounded else value

    def text(self, value: float) -> str:
        """A value of it."""
        return percent(value) if self.share else significant(value, 4)

    def tick(self, value: float) -> str:
        """A value of it on an axis."""
        return f"{100 * value:.4g} %" if self.share else significant(value)

    def difference(self, value: float) -> str:
        """A difference of two values, with its sign; shares in percentage points."""
        return f"{100 * value:+.2f}" if self.share else f"{value:+.4f}"


ACCURACY = MetricStyle("accuracy", "held-out accuracy", share=True, unit="percentage points")
AUC = MetricStyle("auc", "held-out AUC", share=False, unit="AUC")
_NAMED = {
    metric.key: metric
    for metric in (
        AUC,
        ACCURACY,
        MetricStyle("balanced_accuracy", "balanced accuracy", share=True, unit="percentage points"),
        MetricStyle("sensitivity", "sensitivity", share=True, unit="percentage points"),
        MetricStyle("specificity", "specificity", share=True, unit="percentage points"),
        MetricStyle("loss", "held-out loss", share=False, unit="loss", bounded=False),
    )
}


def metric_named(key: str) -> MetricStyle:
    """A metric by its key; an unknown one is a plain number."""
    return _NAMED.get(key, MetricStyle(key, key.replace("_", " "), share=False, unit=key, bounded=False))


def leading(metrics: Iterable[Mapping[str, float | None]]) -> MetricStyle | None:
    """The number to lead with, present in all of them: AUC for two classes, else accuracy, else what comes first."""
    given = [{key for key, value in entry.items() if value is not None} for entry in metrics]
    common = set.intersection(*given) if given else set()
    for key in (*_NAMED, *sorted(common)):
        if key in common:
            return metric_named(key)
    return None


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
