"""Records: one line of JSON for every point of a study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from sparsedp_experiments.figures.config import Point, Study
from sparsedp_experiments.runs.results import append_row, read_rows

FORMAT = 1
DIGITS = 5
"""Significant digits of a kept number: more than any interval over seeds resolves, and small files."""

Record = Mapping[str, Any]
Records = Mapping[str, Sequence[Record]]
"""By study."""


@final
@dataclass(frozen=True, slots=True)
class Store:
    """The file of all studies' records."""

    path: Path

    def find(self, study: Study, point: Point) -> Record | None:
        """A point's record, if it is there and was measured as the study says now."""
        digest = study.digest(point)
        return next((row for row in self._rows(study) if row["config_hash"] == digest), None)

    def keep(self, study: Study, point: Point, measured: Mapping[str, Any], commit: str | None) -> None:
        """Write a point's record."""
        head = {
            "format": FORMAT,
            "experiment": study.name,
            "config_hash": study.digest(point),
            "commit": commit,
        }
        append_row(self.path, {**head, "point": dict(point), **rounded(dict(measured))})

    def _rows(self, study: Study) -> list[Record]:
        return [row for row in read_rows(self.path) if row["experiment"] == study.name]

    def records(self, study: Study) -> list[Record]:
        """The records of a study that there are, in the grid's order; none before every cell has a seed."""
        known = {row["config_hash"]: row for row in self._rows(study)}
        found = [(point, known.get(study.digest(point))) for point in study.points()]
        cells = [{name: point[name] for name in point if name != "seed"} for point, _ in found]
        measured = [cell for cell, (_, record) in zip(cells, found, strict=True) if record is not None]
        whole = all(cell in measured for cell in cells)
        return [record for _, record in found if record is not None] if whole else []


def rounded(value: Any) -> Any:
    """Numbers to `DIGITS` significant digits, in lists and tables too; integers as they are."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {name: rounded(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(inner) for inner in value]
    return value
