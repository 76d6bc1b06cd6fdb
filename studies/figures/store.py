"""Records: one small JSON file for every point of a study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from sparsedp.core.files import read_json, write_json
from studies.figures.config import Point, Study, record_name

FORMAT = 1
DIGITS = 5
"""Significant digits of a kept number: more than any interval over seeds resolves, and small files."""

Record = Mapping[str, Any]
Records = Mapping[str, Sequence[Record]]
"""By study."""


@final
@dataclass(frozen=True, slots=True)
class Store:
    """The folder of all studies' records, `<study>/records/<point>.json`."""

    root: Path

    def file(self, study: Study, point: Point) -> Path:
        """Where a point's record is."""
        return self.root / study.name / "records" / f"{record_name(point)}.json"

    def find(self, study: Study, point: Point) -> Record | None:
        """A point's record, if it is there and was measured as the study says now."""
        file = self.file(study, point)
        if not file.is_file():
            return None
        found = read_json(file)
        same = isinstance(found, dict) and found.get("config_hash") == study.digest(point)
        return found if same else None

    def keep(self, study: Study, point: Point, measured: Mapping[str, Any], commit: str | None) -> None:
        """Write a point's record."""
        file = self.file(study, point)
        file.parent.mkdir(parents=True, exist_ok=True)
        head = {"format": FORMAT, "study": study.name, "config_hash": study.digest(point), "commit": commit}
        write_json(file, {**head, "point": dict(point), **rounded(dict(measured))})

    def records(self, study: Study) -> list[Record]:
        """The records of a study that there are, in the grid's order; none before every cell has a seed."""
        found = [(point, self.find(study, point)) for point in study.points()]
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
