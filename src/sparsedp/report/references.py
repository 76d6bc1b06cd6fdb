"""What a held-out number is to be read against: the same task without privacy, and guessing the majority class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from sparsedp.report.metric import MetricStyle

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


def drawn(found: Sequence[Reference], low: float, high: float) -> tuple[Reference, ...]:
    """Those that fit into a chart of low..high without squeezing it below half its size."""
    most = _MOST_STRETCH * (high - low)
    return tuple(one for one in found if max(high, one.value) - min(low, one.value) <= most)


def told(found: Sequence[Reference], metric: MetricStyle) -> str:
    """The references as sentences after a caption."""
    return "".join(f" {one.name[0].upper()}{one.name[1:]}: {metric.text(one.value)}." for one in found)
