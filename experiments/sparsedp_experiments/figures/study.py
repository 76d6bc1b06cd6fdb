"""Studies behind the papers' figures (configs/figures.toml): what is measured at which points, and the records."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from rich.progress import track

from sparsedp._serialization import canonical, sha256
from sparsedp_experiments.runs.grid import CONFIGS, RESULTS, read_toml
from sparsedp_experiments.runs.results import append_row, commit, read_rows
from sparsedp_experiments.runs.settings import Settings

Point = Mapping[str, Any]
"""One cell of a study's grid, such as `{"epsilon": 1, "seed": 0}`."""

_TABLES = ("settings", "grid", "measure")


@final
@dataclass(frozen=True, slots=True)
class Study:
    """What one table of configs/figures.toml says."""

    name: str  # the table's
    kind: str  # which measurement, a row of `measure_missing`
    title: str  # for people
    settings: Mapping[str, Any]  # of the run, as in experiment files; without what the grid has
    grid: Mapping[str, Sequence[Any]]  # names and the values each takes; a record for every combination
    measure: Mapping[str, Any]  # sizes, ratios and the like

    def points(self) -> list[Point]:
        """Every cell of the grid, the last name fastest."""
        return [
            dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())
        ]

    def run_settings(self, point: Point) -> Settings:
        """The settings of the run at a point: what the grid names and a run knows replaces what the file says."""
        known = {name: value for name, value in point.items() if name in Settings.__slots__}
        return Settings.from_json({**self.settings, **known})

    def digest(self, point: Point) -> str:
        """Names what a record was measured from; titles may change without measuring again."""
        about = {"kind": self.kind, "settings": self.settings, "measure": self.measure, "point": point}
        return sha256(canonical(about))


def load_studies(file: Path = CONFIGS / "figures.toml") -> list[Study]:
    """Every study of a file, by name."""
    return [
        Study(name, told["kind"], told["title"], *(told.get(table, {}) for table in _TABLES))
        for name, told in sorted(read_toml(file).items())
    ]


FORMAT = 1
RECORDS = RESULTS / "figures.jsonl"
DIGITS = 5
"""Significant digits of a kept number: more than any interval over seeds resolves, and small files."""

FigureRecord = Mapping[str, Any]
FigureRecords = Mapping[str, Sequence[FigureRecord]]
"""By study."""


def records_of_study(study: Study, path: Path = RECORDS) -> list[FigureRecord]:
    """The records of a study that there are, in the grid's order; none before every cell has a seed."""
    known = {row["config_hash"]: row for row in read_rows(path) if row["experiment"] == study.name}
    found = [(point, known.get(study.digest(point))) for point in study.points()]
    cells = [{name: point[name] for name in point if name != "seed"} for point, _ in found]
    measured = [cell for cell, (_, record) in zip(cells, found, strict=True) if record is not None]
    whole = all(cell in measured for cell in cells)
    return [record for _, record in found if record is not None] if whole else []


def measure_missing(studies: Sequence[Study], path: Path = RECORDS) -> None:
    """Measure the points that have no record yet, seed by seed; needs the data sets."""
    from sparsedp_experiments.figures import attacks, bounds, support

    kinds: Mapping[str, Callable[[Study, Point], dict[str, Any]]] = {
        "warmup": support.measure_warmup,
        "freezing": support.measure_freezing,
        "wire": support.measure_wire,
        "bounds": bounds.measure_bounds,
        "symmetry": bounds.measure_symmetry,
        "inversion": attacks.measure_inversion,
        "least-squares": attacks.measure_least_squares,
        "misranking": attacks.measure_misranking,
    }
    done = {row["config_hash"] for row in read_rows(path)}
    asked = [(study, point) for study in studies for point in study.points()]
    left = [(study, point) for study, point in asked if study.digest(point) not in done]
    left.sort(key=lambda one: int(one[1].get("seed", 0)))
    for study, point in track(left, description="measuring"):
        head = {
            "format": FORMAT,
            "experiment": study.name,
            "config_hash": study.digest(point),
            "commit": commit(),
        }
        append_row(path, {**head, "point": dict(point), **rounded(kinds[study.kind](study, point))})


def rounded(value: Any) -> Any:
    """Numbers to `DIGITS` significant digits, in lists and tables too; integers as they are."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {name: rounded(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(inner) for inner in value]
    return value
