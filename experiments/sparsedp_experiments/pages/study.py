"""A study: an experiment file with the records there are for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from sparsedp_experiments.runs.config import Experiment, family_files, read_family
from sparsedp_experiments.runs.grid import GridRun
from sparsedp_experiments.runs.results import Results
from sparsedp_experiments.runs.table import Row, make_rows

Record = Mapping[str, Any]
Cell = Mapping[str, str]

ROOT = Path(__file__).parents[3]
TUNING = "-tuning"
REMOVED_METHODS = ("votes", "head-votes", "head-probe", "tp-block-coherent")
"""Methods that the library had when records of them were made."""


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
        records: those of them that are done, in the order of the runs, then the historical ones.
        stale: hashes of its records that are of none of its runs; they are not used.
        historical: records of methods that were removed since; they are shown, and cannot be run again.
    """

    experiment: Experiment
    runs: tuple[GridRun, ...]
    records: tuple[Record, ...]
    stale: tuple[str, ...]
    historical: tuple[Record, ...] = ()

    @property
    def name(self) -> str:
        """Of the config and of the folder of results."""
        return self.experiment.name

    @property
    def axes(self) -> Mapping[str, Sequence[str]]:
        """The labels of every axis of the grid, and those that only historical records have."""
        found = {axis.name: [level.label for level in axis.levels] for axis in self.experiment.axes}
        for record in self.historical:
            for axis, label in record["cell"].items():
                found[axis] += [] if label in found[axis] else [label]
        return found

    @property
    def asked(self) -> int:
        """How many runs the config asks for, and asked for when it named methods that were removed."""
        return len(self.runs) + len(self.historical)

    @property
    def is_tuning(self) -> bool:
        """Whether it chose settings on a validation split."""
        return self.name.endswith(TUNING)

    @property
    def is_complete(self) -> bool:
        """Whether every run is done."""
        return len(self.records) == self.asked

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
        found = {
            tuple(row.cell.items()): row for row in make_rows(self.records, metric, self.experiment.contrast)
        }
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
    found = [record for run in runs if (record := records.find(run)) is not None]
    rest = {digest: records.row(digest) for digest in records.stale(runs)}
    historical = tuple(row for row in rest.values() if is_historical(row))
    stale = tuple(digest for digest, row in rest.items() if not is_historical(row))
    return Study(experiment, runs, (*found, *historical), stale, historical)


def is_historical(record: Record) -> bool:
    """Whether a record is of a method or an option that the library had once."""
    settings = record["settings"]
    return settings.get("method") in REMOVED_METHODS or settings.get("active_ratio") == "auto"


def read_studies(root: Path = ROOT) -> dict[str, Study]:
    """Every study of the repository by name."""
    folder = root / "experiments"
    found = {
        name: read_study(experiment, folder / "results" / f"{file.stem}.jsonl")
        for file in family_files(folder / "configs")
        for name, experiment in read_family(file).items()
    }
    return dict(sorted(found.items()))
