"""Numbers, settings and cells as people read them, and Markdown tables of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sparsedp._validate import significant
from sparsedp_experiments.runs.grid import label
from sparsedp_experiments.runs.results import Estimate

Cell = Mapping[str, str]
"""The label of every axis."""
NONE = "–"
_SHARES = ("accuracy", "balanced_accuracy", "sensitivity", "specificity")
_TITLES = {"auc": "AUC"}
_SHORT = {
    "clip_norm": "C", "batch_size": "batch", "active_ratio": "ratio", "warmup_fraction": "warm-up",
    "phase1_budget": "phase-1 budget", "noise_std": "noise",
}  # fmt: skip


def place_text(cell: Cell) -> str:
    """A cell for people."""
    named = ("method", "dataset", "model")
    return ", ".join(found if axis in named else f"{axis} {found}" for axis, found in cell.items())


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table."""
    lines = [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
    return lines + [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]


def seeds_text(count: int) -> str:
    """So many seeds."""
    return f"{count} seed{'s' * (count != 1)}"


def value_text(value: float, metric: str) -> str:
    """A value of a metric: shares in percent with two decimals, others with four."""
    return f"{100 * value:.2f}" if metric in _SHARES else f"{value:.4f}"


def mean_text(found: Estimate, metric: str) -> str:
    """Mean and standard deviation."""
    return value_text(found.mean, metric) + (
        "" if found.std is None else f" ± {value_text(found.std, metric)}"
    )


def difference_text(found: Estimate | None, metric: str) -> str:
    """A difference with its interval."""
    if found is None:
        return NONE
    shown = signed(found.mean, metric)
    if found.low is None or found.high is None:
        return f"{shown} (one seed)"
    return f"{shown} ({signed(found.low, metric)} to {signed(found.high, metric)})"


def signed(value: float, metric: str) -> str:
    """A difference with its sign; shares in percentage points."""
    text = value_text(abs(value), metric)
    return text if not float(text) else f"{'+' if value > 0 else '−'}{text}"


def metric_title(metric: str) -> str:
    """What people call a metric, with its unit."""
    title = _TITLES.get(metric, metric.replace("_", " "))
    return f"{title}, %" if metric in _SHARES else title


def unit_text(metric: str) -> str:
    """What differences of a metric are counted in."""
    return "points" if metric in _SHARES else "AUC" if metric == "auc" else ""


def settings_text(settings: Mapping[str, Any], names: Iterable[str]) -> str:
    """Some settings in short: `C 0.1, lr 16`."""
    return ", ".join(_setting(name, settings[name]) for name in names if name in settings) or NONE


def _setting(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        inside = ", ".join(f"{key} {_plain(inner)}" for key, inner in value.items())
        return inside if name.endswith("options") else f"{name} ({inside})"
    return f"{_SHORT.get(name, name)} {_plain(value)}"


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key} {_plain(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return " to ".join(map(_plain, value)) if len(value) == 2 else " ".join(map(_plain, value))
    return significant(value) if isinstance(value, float) else label(value)
