"""Which held-out number a report leads with, and how each reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import final

from sparsedp.report.numbers import percent, significant


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
