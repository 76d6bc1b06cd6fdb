"""Results of an experiment as rows: one per cell, over seeds, with the paired difference to the baseline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sparsedp_experiments.comparison.statistics import Estimate, estimate, paired_difference
from sparsedp_experiments.runs.config import Contrast

Record = Mapping[str, Any]

UNRESOLVED = "not resolved"


@dataclass(frozen=True, slots=True)
class Row:
    """One cell.

    Attributes:
        cell: the label of every axis.
        seeds: those with a result.
        score: the metric over seeds.
        difference: to the baseline at equal seeds; None for the baseline itself, and without one.
        epsilon: the largest spent by any of its runs; None if not private.
        active_ratio: at the end, the mean over seeds.
    """

    cell: Mapping[str, str]
    seeds: tuple[int, ...]
    score: Estimate
    difference: Estimate | None
    epsilon: float | None
    active_ratio: float

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            **asdict(self),
            "cell": dict(self.cell),
            "difference": {**asdict(self.difference), "verdict": verdict(self.difference)}
            if self.difference
            else None,
        }


def verdict(difference: Estimate) -> str:
    """What a paired difference says: "higher", "lower", or "not resolved" when its interval holds zero."""
    low, high = difference.low, difference.high
    if low is None or high is None or low <= 0 <= high:
        return UNRESOLVED
    return "higher" if low > 0 else "lower"


def make_rows(records: Iterable[Record], metric: str, contrast: Contrast) -> tuple[Row, ...]:
    """The rows of some records, in the order their cells first appear; cells without the metric are left out."""
    cells: dict[tuple[tuple[str, str], ...], list[Record]] = {}
    for record in records:
        if record["metrics"].get(metric) is not None:
            cells.setdefault(tuple(record["cell"].items()), []).append(record)
    return tuple(_row(key, cells, metric, contrast) for key in cells)


def _row(
    key: tuple[tuple[str, str], ...],
    cells: Mapping[tuple[tuple[str, str], ...], Sequence[Record]],
    metric: str,
    contrast: Contrast,
) -> Row:
    records = cells[key]
    scores = _by_seed(records, metric)
    rival = tuple((axis, contrast.baseline if axis == contrast.axis else label) for axis, label in key)
    against = cells.get(rival, ()) if rival != key else ()
    spent = [record["epsilon_spent"] for record in records]
    return Row(
        cell=dict(key),
        seeds=tuple(sorted(scores)),
        score=estimate([scores[seed] for seed in sorted(scores)]),
        difference=paired_difference(scores, _by_seed(against, metric)),
        epsilon=None if None in spent else max(spent),
        active_ratio=estimate([record["active_ratio"] for record in records]).mean,
    )


def _by_seed(records: Iterable[Record], metric: str) -> dict[int, float]:
    return {record["seed"]: record["metrics"][metric] for record in records}
