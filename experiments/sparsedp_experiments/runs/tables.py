"""Studies: experiments with their records, the papers' numbers beside them, and both as Markdown tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from sparsedp._validate import epsilon_text, significant
from sparsedp.methods import get_method
from sparsedp_experiments.runs.grid import (
    CONFIGS,
    RESULTS,
    Experiment,
    GridRun,
    family_files,
    label,
    read_family,
)
from sparsedp_experiments.runs.papers import PAPER_NAMES, base_name, number_for, paper_text, read_paper
from sparsedp_experiments.runs.results import CONFIDENCE, Record, Results, Row, make_rows
from sparsedp_experiments.runs.settings import ABLATIONS, Settings
from sparsedp_experiments.runs.text import (
    NONE,
    Cell,
    difference_text,
    markdown_table,
    mean_text,
    metric_title,
    place_text,
    seeds_text,
    settings_text,
    signed,
)

TUNING = "-tuning"
REMOVED_METHODS = ("votes", "head-votes", "head-probe", "tp-block-coherent")
"""Methods that the library had when records of them were made."""
JPEG = "The CIFAR-10 here is JPEG-compressed."
SIDE_METRICS = (
    "auc", "average_precision", "recall_at_90_specificity", "recall_at_prevalence", "recall_at_10",
    "balanced_accuracy", "sensitivity", "specificity",
)  # fmt: skip
"""Shown beside the leading metric where there are two classes."""
_ALSO = (
    "active_ratio", "options", "data_options", "model_options", "normalise", "clip_norm", "lr", "momentum",
    "optimizer", "scheduler", "warmup_fraction", "phase1_budget", "ema_decay", "noise_std", "unit",
    "rows_per_unit", "subset", "validation",
)  # fmt: skip
_DEFAULTS = {entry.name: entry.default for entry in fields(Settings)}


@dataclass(frozen=True)
class Study:
    """An experiment and what is known of it."""

    experiment: Experiment
    runs: tuple[GridRun, ...]  # every run the config asks for
    records: tuple[Record, ...]  # those that are done, in the order of the runs, then the historical ones
    stale: tuple[str, ...]  # hashes of its records that are of none of its runs; they are not used
    historical: tuple[Record, ...] = ()  # of methods removed since: they are shown, and cannot be run again

    @property
    def name(self) -> str:
        return self.experiment.name

    @property
    def axes(self) -> Mapping[str, Sequence[str]]:
        """The labels of every axis of the grid, and those that only historical records have."""
        found = {axis.name: [level.label for level in axis.levels] for axis in self.experiment.axes}
        for record in self.historical:
            for axis, found_label in record["cell"].items():
                found[axis] += [] if found_label in found[axis] else [found_label]
        return found

    @property
    def asked(self) -> int:
        """How many runs the config asks for, and asked for when it named methods that were removed."""
        return len(self.runs) + len(self.historical)

    @property
    def is_tuning(self) -> bool:
        """Whether it chose settings on a validation split."""
        return self.name.endswith(TUNING)

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """Every cell of the grid in its order, then those of historical records."""
        own = [run.cell for run in self.runs] + [record["cell"] for record in self.historical]
        return tuple({tuple(cell.items()): cell for cell in own}.values())

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The results of every cell that has some."""
        return self.rows_of(self.experiment.metric)

    def rows_of(self, metric: str) -> tuple[Row, ...]:
        """The results by some metric, in the order of the grid."""
        rows = make_rows(self.records, metric, self.experiment.contrast)
        found = {tuple(row.cell.items()): row for row in rows}
        return tuple(found[key] for cell in self.cells if (key := tuple(cell.items())) in found)

    @cached_property
    def _settings(self) -> Mapping[tuple[tuple[str, str], ...], Mapping[str, Any]]:
        first = {tuple(run.cell.items()): run for run in reversed(self.runs)}
        known = {cell: run.settings.to_json() for cell, run in first.items()}
        known |= {tuple(record["cell"].items()): record["settings"] for record in self.historical}
        return {
            cell: {name: value for name, value in settings.items() if name != "seed"}
            for cell, settings in known.items()
        }

    def settings_of(self, cell: Cell) -> Mapping[str, Any]:
        """The settings of a cell, without the seed."""
        return self._settings[tuple(cell.items())]

    def missing(self) -> dict[tuple[tuple[str, str], ...], int]:
        """How many seeds each unfinished cell lacks."""
        done = {record["config_hash"] for record in self.records}
        lacking = {tuple(run.cell.items()): 0 for run in self.runs}
        for run in self.runs:
            lacking[tuple(run.cell.items())] += run.settings.digest not in done
        return {cell: seeds for cell, seeds in lacking.items() if seeds}

    @property
    def is_jpeg(self) -> bool:
        """Whether it shows CIFAR-10 that is not known to be exact."""
        datasets = {base_name(run.settings.dataset) for run in self.runs}
        of_cifar = (record for record in self.records if base_name(record["dataset"]) == "cifar10")
        variants = {record["data_variant"] for record in of_cifar}
        exact = bool(variants) and not any(variant.startswith("jpeg") for variant in variants)
        return "cifar10" in datasets and not exact


def read_study(experiment: Experiment, results: Path) -> Study:
    """The study of an experiment, with its records in a file."""
    runs, records = experiment.runs(), Results(results, experiment.name)
    found = [record for run in runs if (record := records.find(run)) is not None]
    rest = {digest: records.row(digest) for digest in records.stale(runs)}
    historical = tuple(row for row in rest.values() if _is_historical(row))
    stale = tuple(digest for digest, row in rest.items() if not _is_historical(row))
    return Study(experiment, runs, (*found, *historical), stale, historical)


def read_studies(configs: Path = CONFIGS, results: Path = RESULTS) -> dict[str, Study]:
    """Every study of the repository by name."""
    found = {
        name: read_study(experiment, results / f"{file.stem}.jsonl")
        for file in family_files(configs)
        for name, experiment in read_family(file).items()
    }
    return dict(sorted(found.items()))


def noise_ratio(record: Record) -> float | None:
    """r: the norm of the noise of a step of the last phase, on what was active in the end, over the clip norm."""
    noise: Mapping[str, float] | None = record.get("noise")
    if not noise:
        return None
    last: float = noise.get("main", noise.get("train", 0.0))
    return last * math.sqrt(record["k"]) / float(record["batch_size"])


def _is_historical(record: Record) -> bool:
    settings = record["settings"]
    return settings.get("method") in REMOVED_METHODS or settings.get("active_ratio") == "auto"


def section(study: Study, tuning: Sequence[str], notes: str) -> list[str]:
    """Everything about one experiment: what was run, the tables, what is missing, and what we say about it."""
    lines = [f"### {study.experiment.title}", "", what_was_run(study, tuning), ""]
    if study.rows:
        side = "validation" if study.is_tuning else "test"
        said = (
            f"Final epoch, {side} {metric_title(study.experiment.metric)}, mean ± standard deviation over seeds; "
            f"paired difference to {baseline_text(study)} with {100 * CONFIDENCE:g} % interval."
        )
        lines += [f"{said} {JPEG}" if study.is_jpeg else said, "", *results_table(study), ""]
        lines += [*extra, ""] if (extra := side_table(study)) else []
        lines += papers_own_table(study)
    lines += shortcomings(study)
    return [*lines, notes, ""] if notes else lines


def what_was_run(study: Study, tuning: Sequence[str]) -> str:
    """Model, data, epochs, batch, seeds, privacy and where all of it is kept, in a few sentences."""
    settings = [study.settings_of(cell) for cell in study.cells]
    first = settings[0]
    shared = {name: first[name] for name in first if all(one.get(name) == first[name] for one in settings)}
    parts = [_models(study), _data(study)]
    parts += [f"{shared['epochs']} epochs"] if "epochs" in shared else ["epochs by cell"]
    parts += [f"batch {shared['batch_size']:,}"] if "batch_size" in shared else []
    parts += [
        _privacy(study, shared),
        settings_text(shared, [name for name in _ALSO if _is_told(study, name, shared)]),
    ]
    seeds = seeds_text(len(study.experiment.seeds))
    lines = [f"{'; '.join(part for part in parts if part and part != NONE)}; {seeds}."]
    if tuning:
        lines.append(
            f"Settings from a validation split ({', '.join(f'`{name}`' for name in tuning)}, under Tuning)."
        )
    done = f"{len(study.records)} of {study.asked} runs, {hours_text(study)}"
    return " ".join([*lines, f"`sweep {study.name}` ({done})."])


def results_table(study: Study) -> list[str]:
    """One row per cell: mean, paired difference, the paper's number, epsilon spent, r, settings."""
    metric, extra = study.experiment.metric, varying(study)
    axes = [axis.name for axis in study.experiment.axes]
    numbers = [number_for(study.name, row.cell, study.settings_of(row.cell), metric) for row in study.rows]
    with_paper = any(number is not None for number in numbers)
    with_difference = any(row.difference is not None for row in study.rows)
    headings = [*axes, "seeds", metric_title(metric)]
    headings += [f"less {baseline_text(study)}"] if with_difference else []
    headings += ["paper", "ours less paper"] if with_paper else []
    headings += ["epsilon spent", "r", *(["settings"] if extra else [])]
    ratios = {tuple(record["cell"].items()): noise_ratio(record) for record in study.records}
    rows = []
    for row, number in zip(study.rows, numbers, strict=True):
        cells = [*(row.cell[axis] for axis in axes), str(row.score.count), mean_text(row.score, metric)]
        cells += [difference_text(row.difference, metric)] if with_difference else []
        if with_paper:
            ahead = NONE if number is None else signed(row.score.mean - number.value, metric)
            cells += [paper_text(number, metric), ahead]
        ratio = ratios.get(tuple(row.cell.items()))
        cells += ["not private" if row.epsilon is None else epsilon_text(row.epsilon)]
        cells += [NONE if ratio is None else f"{ratio:.2f}"]
        cells += [settings_text(study.settings_of(row.cell), extra)] if extra else []
        rows.append(cells)
    return markdown_table(headings, rows)


def side_table(study: Study) -> list[str]:
    """The other metrics of a task with two classes; none for others."""
    metrics = [record["metrics"] for record in study.records]
    known = [name for name in SIDE_METRICS if any(one.get(name) is not None for one in metrics)]
    present = [name for name in known if name != study.experiment.metric]
    if not present:
        return []
    by_metric = {name: {tuple(row.cell.items()): row for row in study.rows_of(name)} for name in present}
    axes = [axis.name for axis in study.experiment.axes]
    rows = []
    for row in study.rows:
        cells, settings = [row.cell[axis] for axis in axes], study.settings_of(row.cell)
        for name in present:
            found = by_metric[name].get(tuple(row.cell.items()))
            number = number_for(study.name, row.cell, settings, name)
            shown = NONE if found is None else mean_text(found.score, name)
            cells.append(shown if number is None else f"{shown} (paper {paper_text(number, name)})")
        rows.append(cells)
    return markdown_table([*axes, *map(metric_title, present)], rows)


def papers_own_table(study: Study) -> list[str]:
    """The paper's table, where none of its numbers is of a cell of ours: another data set, or another model."""
    metric = study.experiment.metric
    paper = next((read_paper(name) for name in PAPER_NAMES if study.name.startswith(f"{name}-")), None)
    beside = (number_for(study.name, row.cell, study.settings_of(row.cell), metric) for row in study.rows)
    if paper is None or any(number is not None for number in beside):
        return []
    lines: list[str] = []
    for table in paper.tables_for(study.name):
        rows = [[*key, paper_text(number, metric)] for key, number in table.rows.items()]
        lines += [f"The paper's own ({table.where}: {table.what}), not the same cells:", ""]
        lines += [*markdown_table([*table.keys, metric_title(metric)], rows), ""]
    return lines


def shortcomings(study: Study) -> list[str]:
    """What is not run yet, records that are not used, and rows of methods that were removed since."""
    lines = []
    if lacking := study.missing():
        shown = [
            f"{place_text(dict(cell)) or 'all'} ({seeds_text(seeds)})" for cell, seeds in lacking.items()
        ]
        tail = f"; and {len(shown) - 6} more cells" if len(shown) > 6 else ""
        lines += [
            f"**Partly run.** {sum(lacking.values())} runs are missing: {'; '.join(shown[:6])}{tail}.",
            "",
        ]
    if study.stale:
        lines += [f"**Not used:** {len(study.stale)} records belong to another config or an older one.", ""]
    names = dict.fromkeys(place_text(record["cell"]) for record in study.historical)
    said = f"Historical, of methods removed since; they cannot be run again: {'; '.join(names)}."
    return [*lines, said, ""] if names else lines


def _is_told(study: Study, name: str, shared: Mapping[str, Any]) -> bool:
    """Whether a setting all cells share is not the default, or is one a two-phase method should state."""
    if name == "warmup_fraction":
        return name in shared and any(
            run.settings.method not in ABLATIONS and get_method(run.settings.method).warm_up
            for run in study.runs
        )
    return name in shared and shared[name] != _DEFAULTS[name]


def _models(study: Study) -> str:
    found: dict[str, set[int]] = {run.settings.model or "": set() for run in study.runs}
    for record in study.records:
        found.setdefault(record["model"], set()).add(record["d"])
    sizes = {model: " or ".join(f"{d:,}" for d in sorted(known)) for model, known in found.items()}
    said = [f"`{model}`" + (f" ({size} coordinates)" if size else "") for model, size in sizes.items()]
    return f"Model {', '.join(said)}"


def _data(study: Study) -> str:
    found: dict[str, dict[str, None]] = {run.settings.dataset: {} for run in study.runs}
    for record in study.records:
        units = f"{record['units']:,} {record['unit']}s"
        found[record["dataset"]][f"{record['data_variant']}, {units}"] = None
    said = [f"`{name}` ({'; or '.join(known)})" if known else f"`{name}`" for name, known in found.items()]
    return f"data {', '.join(said)}"


def _privacy(study: Study, shared: Mapping[str, Any]) -> str:
    said = [f"delta {significant(shared['delta'])}"] if "delta" in shared else []
    if "epsilon" in shared and shared["epsilon"] != "inf":
        said.insert(0, f"epsilon {shared['epsilon']:g}")
    said += [f"accountant {str(shared['accountant']).upper()}"] if "accountant" in shared else []
    units = sorted({record["unit"] for record in study.records if record["private"]})
    return ", ".join(said + ([f"epsilon is per {' or '.join(units)}"] if units else []))


def varying(study: Study) -> list[str]:
    """Settings that differ between cells and that no axis shows by its labels."""
    axes = [axis.name for axis in study.experiment.axes]
    every = [(study.settings_of(cell), cell) for cell in study.cells]
    names = dict.fromkeys(name for settings, _ in every for name in settings)
    shown = {
        name for name in names for axis in axes if all(label(s.get(name)) == cell[axis] for s, cell in every)
    }
    return [name for name in names if len({repr(s.get(name)) for s, _ in every}) > 1 and name not in shown]


def baseline_text(study: Study) -> str:
    """What the cells of a study are compared with."""
    axis, baseline = study.experiment.contrast.axis, study.experiment.contrast.baseline
    return baseline if any(map(str.isalpha, baseline)) else f"{axis} {baseline}"


def hours_text(study: Study) -> str:
    """The computing time of a study."""
    hours = sum(record["seconds"] for record in study.records) / 3600
    return f"{hours:.1f} core hours" if hours >= 0.1 else "minutes"
