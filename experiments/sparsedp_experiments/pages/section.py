"""The section of one experiment: what was run, the table, what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from sparsedp._validate import NONE, epsilon_text, significant
from sparsedp.methods import get_method
from sparsedp_experiments.comparison.statistics import CONFIDENCE
from sparsedp_experiments.pages import words
from sparsedp_experiments.pages.paper import number_for, paper_of
from sparsedp_experiments.pages.study import Study, noise_ratio
from sparsedp_experiments.runs.settings import Settings
from sparsedp_experiments.runs.table import Row

TEXTS = Path(__file__).parent / "text"
SIDE_METRICS = (
    "auc",
    "average_precision",
    "recall_at_90_specificity",
    "recall_at_prevalence",
    "recall_at_10",
    "balanced_accuracy",
    "sensitivity",
    "specificity",
)
"""Shown beside the leading metric where there are two classes."""
MISSING_SHOWN = 6


def section(
    study: Study, tuning: Sequence[str], picture: str | None, claims: Sequence[str] = ()
) -> list[str]:
    """Everything about one experiment."""
    lines = [f"### {heading(study)}", ""]
    if study.experiment.description:
        lines += [study.experiment.description, ""]
    lines += [what_was_run(study, tuning), ""]
    if study.rows:
        lines += [*caption(study), *results_table(study), ""]
        side = side_table(study)
        lines += [*side, ""] if side else []
        lines += papers_own_table(study)
    if picture is not None:
        lines += [f"![{alt_text(study)}]({picture})", ""]
        lines += [words.JPEG, ""] if words.is_cifar(study) else []
    lines += [*shortcomings(study), *removed_methods(study)]
    lines += claims
    said = TEXTS / f"{study.name}.md"
    if said.exists():
        lines += [said.read_text(encoding="utf-8").strip(), ""]
    return lines


def removed_methods(study: Study) -> list[str]:
    """Which rows are of methods that were removed since, if any."""
    names = dict.fromkeys(words.place_text(record["cell"]) for record in study.historical)
    if not names:
        return []
    return [f"Historical, of methods removed since; they cannot be run again: {'; '.join(names)}.", ""]


def heading(study: Study) -> str:
    """What the section is called."""
    return study.experiment.title


def what_was_run(study: Study, tuning: Sequence[str]) -> str:
    """Model, data, epochs, batch, seeds, privacy and where all of it is kept, in a few sentences."""
    settings = [study.settings_of(cell) for cell in study.cells]
    shared = {
        name: settings[0][name]
        for name in settings[0]
        if all(one.get(name) == settings[0][name] for one in settings)
    }
    parts = [_models(study), _data(study)]
    parts += [f"{shared['epochs']} epochs"] if "epochs" in shared else ["epochs by cell"]
    parts += [f"batch {words.count_text(shared['batch_size'])}"] if "batch_size" in shared else []
    parts += [_privacy(study, shared)]
    parts += [words.settings_text(shared, [name for name in _ALSO if _is_worth_saying(study, name, shared)])]
    seeds = len(study.experiment.seeds)
    lines = [f"{'; '.join(part for part in parts if part and part != NONE)}; {words.seeds_text(seeds)}."]
    if tuning:
        files = ", ".join(f"`configs/{name}.toml`" for name in tuning)
        lines.append(
            f"Settings were chosen on a validation split ({files}, under Tuning below); that is not in epsilon."
        )
    done = f"{len(study.records)} of {study.asked} runs, {words.hours_text(study)}"
    lines.append(f"Config `configs/{study.name}.toml`, records in `results/{study.name}/records` ({done}).")
    return " ".join(lines)


def caption(study: Study) -> list[str]:
    """What the table shows, in one line, and what must be said beside it."""
    metric = study.experiment.metric
    side = "validation" if study.is_tuning else "test"
    said = (
        f"Final epoch, {side} {words.metric_title(metric)}, mean ± standard deviation over seeds; paired difference "
        f"to {words.baseline_text(study)} with {100 * CONFIDENCE:g} % interval."
    )
    return [f"{said} {words.JPEG}" if words.is_cifar(study) else said, ""]


def results_table(study: Study) -> list[str]:
    """One row per cell: mean, paired difference, the paper's number, epsilon spent, r, settings."""
    metric, extra = study.experiment.metric, words.varying(study)
    axes = [axis.name for axis in study.experiment.axes]
    numbers = [number_for(study.name, row.cell, study.settings_of(row.cell), metric) for row in study.rows]
    with_paper = any(number is not None for number in numbers)
    with_difference = any(row.difference is not None for row in study.rows)
    headings = [*axes, "seeds", words.metric_title(metric)]
    headings += [f"less {words.baseline_text(study)}"] if with_difference else []
    headings += ["paper", "ours less paper"] if with_paper else []
    ratios = {tuple(record["cell"].items()): noise_ratio(record) for record in study.records}
    headings += ["epsilon spent", "r", *(["settings"] if extra else [])]
    rows = []
    for row, number in zip(study.rows, numbers, strict=True):
        cells = [*(row.cell[axis] for axis in axes), str(row.score.count), words.mean_text(row.score, metric)]
        cells += [words.difference_text(row.difference, metric)] if with_difference else []
        if with_paper:
            ahead = NONE if number is None else words.signed(row.score.mean - number.value, metric)
            cells += [words.paper_text(number, metric), ahead]
        cells += [_spent(row), _loudness(ratios.get(tuple(row.cell.items())))]
        cells += [words.settings_text(study.settings_of(row.cell), extra)] if extra else []
        rows.append(cells)
    return words.markdown_table(headings, rows)


def _loudness(ratio: float | None) -> str:
    return NONE if ratio is None else f"{ratio:.2f}"


def side_table(study: Study) -> list[str]:
    """The other metrics of a task with two classes; none for others."""
    lead = study.experiment.metric
    present = [
        name
        for name in SIDE_METRICS
        if name != lead and any(record["metrics"].get(name) is not None for record in study.records)
    ]
    if not present:
        return []
    by_metric = {name: {tuple(row.cell.items()): row for row in study.rows_of(name)} for name in present}
    axes = [axis.name for axis in study.experiment.axes]
    rows = []
    for row in study.rows:
        key, cells = tuple(row.cell.items()), [row.cell[axis] for axis in axes]
        settings = study.settings_of(row.cell)
        for name in present:
            found = by_metric[name].get(key)
            number = number_for(study.name, row.cell, settings, name)
            shown = NONE if found is None else words.mean_text(found.score, name)
            cells.append(shown if number is None else f"{shown} (paper {words.paper_text(number, name)})")
        rows.append(cells)
    return words.markdown_table([*axes, *map(words.metric_title, present)], rows)


def papers_own_table(study: Study) -> list[str]:
    """The paper's table, where none of its numbers is of a cell of ours: another data set, or another model."""
    metric = study.experiment.metric
    paper = paper_of(study.name)
    beside = (number_for(study.name, row.cell, study.settings_of(row.cell), metric) for row in study.rows)
    if paper is None or any(number is not None for number in beside):
        return []
    lines: list[str] = []
    for table in paper.tables_for(study.name):
        rows = [[*key, words.paper_text(number, metric)] for key, number in table.rows.items()]
        lines += [f"The paper's own ({table.where}: {table.what}), not the same cells:", ""]
        lines += [*words.markdown_table([*table.keys, words.metric_title(metric)], rows), ""]
    return lines


def shortcomings(study: Study) -> list[str]:
    """What is not run yet, and records that are not used."""
    lines = []
    lacking = study.missing()
    if lacking:
        shown = [
            f"{words.place_text(dict(cell)) or 'all'} ({words.seeds_text(seeds)})"
            for cell, seeds in list(lacking.items())[:MISSING_SHOWN]
        ]
        more = len(lacking) - len(shown)
        tail = f"; and {more} more cells" if more > 0 else ""
        lines += [f"**Partly run.** {sum(lacking.values())} runs are missing: {'; '.join(shown)}{tail}.", ""]
    if study.stale:
        lines += [
            f"**Not used:** {len(study.stale)} records in `results/{study.name}/records` belong to another "
            "config or an older one.",
            "",
        ]
    return lines


def alt_text(study: Study) -> str:
    """The figure in words."""
    return f"{study.experiment.title}: {words.metric_title(study.experiment.metric)} by cell"


_ALSO = (
    "active_ratio", "options", "data_options", "model_options", "normalise", "clip_norm", "lr", "momentum",
    "optimizer", "scheduler", "warmup_fraction", "phase1_budget", "ema_decay", "noise_std", "unit",
    "rows_per_unit", "subset", "validation",
)  # fmt: skip
_DEFAULTS = {entry.name: entry.default for entry in fields(Settings)}


def _is_worth_saying(study: Study, name: str, shared: Mapping[str, Any]) -> bool:
    """Whether a setting all cells share is not the default, or is one a two-phase method should state."""
    if name == "warmup_fraction":
        return name in shared and any(get_method(run.settings.method).warm_up for run in study.runs)
    return name in shared and shared[name] != _DEFAULTS[name]


def _models(study: Study) -> str:
    found: dict[str, set[int]] = {}
    for run in study.runs:
        found.setdefault(run.settings.model or "", set())
    for record in study.records:
        found.setdefault(record["model"], set()).add(record["d"])
    said = []
    for model, sizes in found.items():
        size = f" ({' or '.join(words.count_text(d) for d in sorted(sizes))} coordinates)" if sizes else ""
        said.append(f"`{model}`{size}")
    return f"Model {', '.join(said)}"


def _data(study: Study) -> str:
    found: dict[str, dict[str, None]] = {run.settings.dataset: {} for run in study.runs}
    for record in study.records:
        found[record["dataset"]][f"{record['data_variant']}, {_units(record)}"] = None
    said = [f"`{name}` ({'; or '.join(known)})" if known else f"`{name}`" for name, known in found.items()]
    return f"data {', '.join(said)}"


def _units(record: Any) -> str:
    unit = record["unit"]
    return f"{words.count_text(record['units'])} {unit}s"


def _privacy(study: Study, shared: Any) -> str:
    said = [f"delta {significant(shared['delta'])}"] if "delta" in shared else []
    if "epsilon" in shared and shared["epsilon"] != "inf":
        said.insert(0, f"epsilon {shared['epsilon']:g}")
    said += [f"accountant {str(shared['accountant']).upper()}"] if "accountant" in shared else []
    units = sorted({record["unit"] for record in study.records if record["private"]})
    said += [f"epsilon is per {' or '.join(units)}"] if units else []
    return ", ".join(said)


def _spent(row: Row) -> str:
    return "not private" if row.epsilon is None else epsilon_text(row.epsilon)


def incomplete(counts: Sequence[tuple[str, int, int]]) -> list[str]:
    """Experiments not run or partly run, from their name, the runs done and the runs asked for."""
    rows = [
        [f"`{name}`", f"{done} of {asked}", "partly run" if done else "not run"]
        for name, done, asked in counts
        if done < asked
    ]
    return words.markdown_table(["experiment", "runs done", ""], rows) if rows else []
