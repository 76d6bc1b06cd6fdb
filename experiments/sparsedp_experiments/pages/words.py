"""Numbers and settings as the pages write them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sparsedp._validate import NONE, count, significant
from sparsedp_experiments.comparison.metric import MetricStyle, metric_named
from sparsedp_experiments.comparison.statistics import Estimate
from sparsedp_experiments.pages.paper import Number, base_name, label
from sparsedp_experiments.pages.study import Cell, Study

JPEG = "The CIFAR-10 here is JPEG-compressed."
_SHORT = {
    "clip_norm": "C",
    "lr": "lr",
    "epochs": "epochs",
    "batch_size": "batch",
    "active_ratio": "ratio",
    "warmup_fraction": "warm-up",
    "phase1_budget": "phase-1 budget",
    "noise_std": "noise",
    "momentum": "momentum",
}
_MINUS = "−"


def value_text(value: float, metric: str) -> str:
    """A value of a metric: shares in percent with two decimals, others with four."""
    return f"{100 * value:.2f}" if _known(metric).share else f"{value:.4f}"


def mean_text(found: Estimate, metric: str) -> str:
    """Mean and standard deviation."""
    spread = "" if found.std is None else f" ± {value_text(found.std, metric)}"
    return f"{value_text(found.mean, metric)}{spread}"


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
    if not float(text):
        return text
    return f"{'+' if value > 0 else _MINUS}{text}"


def paper_text(number: Number | None, metric: str) -> str:
    """A paper's number with its spread; a standard error is marked."""
    if number is None:
        return NONE
    if number.spread is None:
        return value_text(number.value, metric)
    mark = " (SE)" if number.spread_kind == "standard error" else ""
    return f"{value_text(number.value, metric)} ± {value_text(number.spread, metric)}{mark}"


def metric_title(metric: str) -> str:
    """What people call a metric, with its unit."""
    title = _known(metric).title.removeprefix("held-out ")
    return f"{title}, %" if _known(metric).share else title


def unit_text(metric: str) -> str:
    """What differences of a metric are counted in."""
    return "points" if _known(metric).share else "AUC" if metric == "auc" else ""


def settings_text(settings: Mapping[str, Any], names: Iterable[str]) -> str:
    """Some settings in short: `C 0.1, lr 16`."""
    return ", ".join(_setting(name, settings[name]) for name in names if name in settings) or NONE


def varying(study: Study) -> list[str]:
    """Settings that differ between cells and that no axis shows by its labels."""
    axes = {axis.name for axis in study.experiment.axes}
    every = [(study.settings_of(cell), cell) for cell in study.cells]
    names = list(dict.fromkeys(name for settings, _ in every for name in settings))

    def is_shown(name: str) -> bool:
        return any(all(label(one.get(name)) == cell[axis] for one, cell in every) for axis in axes)

    return [
        name for name in names if len({repr(one.get(name)) for one, _ in every}) > 1 and not is_shown(name)
    ]


def baseline_text(study: Study) -> str:
    """What the cells of a study are compared with."""
    axis, baseline = study.experiment.contrast.axis, study.experiment.contrast.baseline
    return baseline if any(map(str.isalpha, baseline)) else f"{axis} {baseline}"


def place_text(cell: Cell) -> str:
    """A cell for people."""
    return ", ".join(
        found if axis in ("method", "dataset", "model") else f"{axis} {found}" for axis, found in cell.items()
    )


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table."""
    lines = [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
    return lines + [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]


def anchor(heading: str) -> str:
    """The link target of a heading."""
    return re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")


def is_cifar(study: Study) -> bool:
    """Whether it shows CIFAR-10 that is not known to be exact."""
    datasets = {base_name(run.settings.dataset) for run in study.runs}
    variants = {record["data_variant"] for record in study.records if _is_cifar(record["dataset"])}
    exact = bool(variants) and not any(variant.startswith("jpeg") for variant in variants)
    return "cifar10" in datasets and not exact


def hours_text(study: Study) -> str:
    """The computing time of a study."""
    hours = sum(record["seconds"] for record in study.records) / 3600
    return f"{hours:.1f} core hours" if hours >= 0.1 else "minutes"


def seeds_text(count: int) -> str:
    """So many seeds."""
    return f"{count} seed{'s' * (count != 1)}"


def count_text(value: float) -> str:
    """A whole number."""
    return count(value)


def _is_cifar(dataset: str) -> bool:
    return base_name(dataset) == "cifar10"


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


def _known(metric: str) -> MetricStyle:
    return metric_named(metric)
