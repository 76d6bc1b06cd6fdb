"""A study: an experiment file with the records there are for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from sparsedp_experiments.runs.config import OTHERS, Experiment, read_family
from sparsedp_experiments.runs.grid import GridRun
from sparsedp_experiments.runs.results import Results
from sparsedp_experiments.runs.table import Row, make_rows

Record = Mapping[str, Any]
Cell = Mapping[str, str]

ROOT = Path(__file__).parents[3]
TUNING = "-tuning"


class Measured(Protocol):
    """What a claim can be tested on: cells by label, and records with a cell, a seed and metrics."""

    @property
    def name(self) -> str:
        """Of the experiment."""

    @property
    def axes(self) -> Mapping[str, Sequence[str]]:
        """The labels of every axis."""

    @property
    def records(self) -> Sequence[Record]:
        """What is done."""


@dataclass(frozen=True)
class Study:
    """An experiment and what is known of it.

    Attributes:
        experiment: from the config.
        runs: every run the config asks for.
        records: those of them that are done, in the order of the runs.
        stale: hashes of its records that are of none of its runs; they are not used.
    """

    experiment: Experiment
    runs: tuple[GridRun, ...]
    records: tuple[Record, ...]
    stale: tuple[str, ...]

    @property
    def name(self) -> str:
        """Of the config and of the folder of results."""
        return self.experiment.name

    @property
    def axes(self) -> Mapping[str, Sequence[str]]:
        """The labels of every axis of the grid."""
        return {axis.name: [level.label for level in axis.levels] for axis in self.experiment.axes}

    @property
    def is_tuning(self) -> bool:
        """Whether it chose settings on a validation split."""
        return self.name.endswith(TUNING)

    @property
    def is_complete(self) -> bool:
        """Whether every run is done."""
        return len(self.records) == len(self.runs)

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """Every cell of the grid, in its order."""
        return tuple({tuple(run.cell.items()): run.cell for run in self.runs}.values())

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The results of every cell that has some."""
        return self.rows_of(self.experiment.metric)

    def rows_of(self, metric: str) -> tuple[Row, ...]:
        """The results by some metric, in the order of the grid."""
        found = {
            tuple(row.cell.items()): row for row in make_rows(self.records, metric, self.experiment.contrast)
        }
        return tuple(found[key] for cell in self.cells if (key := tuple(cell.items())) in found)

    @cached_property
    def _settings(self) -> Mapping[tuple[tuple[str, str], ...], Mapping[str, Any]]:
        first = {tuple(run.cell.items()): run for run in reversed(self.runs)}
        return {
            cell: {name: value for name, value in run.settings.to_json().items() if name != "seed"}
            for cell, run in first.items()
        }

    def settings_of(self, cell: Cell) -> Mapping[str, Any]:
        """The settings of a cell, without the seed."""
        return self._settings[tuple(cell.items())]

    def missing(self) -> dict[tuple[tuple[str, str], ...], int]:
        """How many seeds each unfinished cell lacks."""
        done = {record["config_hash"] for record in self.records}
        lacking = {tuple(cell.items()): 0 for cell in self.cells}
        for run in self.runs:
            lacking[tuple(run.cell.items())] += run.settings.digest not in done
        return {cell: seeds for cell, seeds in lacking.items() if seeds}


def noise_ratio(record: Record) -> float | None:
    """r: the norm of the noise of a step of the last phase, on what was active in the end, over the clip norm."""
    noise: Mapping[str, float] | None = record.get("noise")
    if not noise:
        return None
    last: float = noise.get("main", noise.get("train", 0.0))
    return last * math.sqrt(record["k"]) / float(record["batch_size"])


def read_study(experiment: Experiment, results: Path) -> Study:
    """The study of an experiment, with its records in a file."""
    runs = experiment.runs()
    records = Results(results, experiment.name)
    found = [records.find(run) for run in runs]
    return Study(experiment, runs, tuple(one for one in found if one is not None), records.stale(runs))


def read_studies(root: Path = ROOT) -> dict[str, Study]:
    """Every study of the repository by name."""
    folder = root / "experiments"
    found = {
        name: read_study(experiment, folder / "results" / f"{file.stem}.jsonl")
        for file in (folder / "configs").glob("*.toml")
        if file.stem not in OTHERS
        for name, experiment in read_family(file).items()
    }
    return dict(sorted(found.items()))
