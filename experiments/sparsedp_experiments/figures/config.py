"""A study: a committed file that says what is measured, at which points, on which data."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from sparsedp._serialization import canonical, sha256
from sparsedp.errors import SparseDPError
from sparsedp_experiments.runs.settings import Settings

Point = Mapping[str, Any]
"""One cell of a study's grid, such as `{"epsilon": 1, "seed": 0}`."""

_TABLES = ("settings", "grid", "measure")


@final
@dataclass(frozen=True, slots=True)
class Study:
    """What one table of configs/figures.toml says.

    Attributes:
        name: the table's.
        kind: which measurement, a row of `measures.KINDS`.
        title: for people.
        settings: of the run that is measured, as in experiment files; without epsilon and seed if the grid has them.
        grid: names and the values each takes; a record for every combination.
        measure: sizes, ratios and the like, for the measurement.
    """

    name: str
    kind: str
    title: str
    settings: Mapping[str, Any]
    grid: Mapping[str, Sequence[Any]]
    measure: Mapping[str, Any]

    def points(self) -> list[Point]:
        """Every cell of the grid, the last name fastest."""
        return [
            dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())
        ]

    def by_seed(self) -> list[list[Point]]:
        """The points, those of one seed together; all of them if the grid has no seeds."""
        seeds = self.grid.get("seed", [None])
        return [[point for point in self.points() if point.get("seed") == seed] for seed in seeds]

    def run_settings(self, point: Point) -> Settings:
        """The settings of the run at a point: what the grid names and a run knows replaces what the file says."""
        known = {name: value for name, value in point.items() if name in Settings.__slots__}
        return Settings.from_json({**self.settings, **known})

    def digest(self, point: Point) -> str:
        """Names what a record was measured from; titles may change without measuring again."""
        about = {"kind": self.kind, "settings": self.settings, "measure": self.measure, "point": point}
        return sha256(canonical(about))


def record_name(point: Point) -> str:
    """The file name of a point's record."""
    return "-".join(f"{name}{value}" for name, value in point.items()) or "all"


def load_studies(file: Path) -> list[Study]:
    """Every study of a file, by name.

    Raises:
        SparseDPError: one lacks a kind, title or grid, or says something else too.
    """
    return [_study(name, given) for name, given in sorted(tomllib.loads(file.read_text()).items())]


def _study(name: str, given: Mapping[str, Any]) -> Study:
    unknown = sorted(set(given) - {"kind", "title", "about", *_TABLES})
    if unknown or not all(isinstance(given.get(key), str) for key in ("kind", "title")):
        raise SparseDPError(
            f"{name}: got {sorted(given)}, expected kind, title and some of the tables {', '.join(_TABLES)}"
        )
    grid = given.get("grid", {})
    if not all(isinstance(values, list) and values for values in grid.values()):
        raise SparseDPError(f"{name}: expected a list of values for every name of [grid], got {grid}")
    return Study(
        name, given["kind"], given["title"], given.get("settings", {}), grid, given.get("measure", {})
    )
