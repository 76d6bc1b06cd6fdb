"""The papers' own numbers, beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sparsedp.errors import SparseDPError
from sparsedp_experiments.runs.config import read_toml

PAPERS = Path(__file__).parents[1] / "papers"
FILES = ("tp-topk", "rs", "adadpigu")
CLAIMS = "claims"
_UNITS = {"%": 100.0, "1": 1.0}


@dataclass(frozen=True, slots=True)
class Number:
    """A number of a paper, in our units: shares are between 0 and 1.

    Attributes:
        value: as our records would have it.
        spread: standard deviation or standard error, if the paper gives one.
        spread_kind: which of the two.
        where: paper and table.
    """

    value: float
    spread: float | None
    spread_kind: str | None
    where: str


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a paper.

    Attributes:
        id: its name in the file.
        where: its number in the paper.
        what: what it shows.
        keys: names of what tells its rows apart.
        rows: number by labels, in the order of the keys.
        assume: labels a cell of ours has when it does not say.
        context: methods we do not have; shown, never matched.
    """

    id: str
    where: str
    what: str
    keys: tuple[str, ...]
    rows: Mapping[tuple[str, ...], Number]
    assume: Mapping[str, str]
    context: bool

    def find(self, labels: Mapping[str, str]) -> Number | None:
        """The number with these labels; labels the table does not have do not matter."""
        wanted = {**self.assume, **labels}
        if self.context or not set(self.keys) <= set(wanted):
            return None
        return self.rows.get(tuple(wanted[key] for key in self.keys))


@dataclass(frozen=True, slots=True)
class Paper:
    """What a paper reports, and what must be known to read it."""

    name: str
    reference: str
    notes: tuple[str, ...]
    tables: tuple[Table, ...]
    stated: tuple[tuple[str, str], ...]

    def table(self, name: str) -> Table:
        """One of its tables."""
        return next(table for table in self.tables if table.id == name)

    def tables_for(self, study: str) -> list[Table]:
        """Those an experiment repeats: `table2` for `tp-topk-table2-mnist`."""
        key = _part_of_paper(study)
        return [one for one in self.tables if one.id.split("-")[0] == key and not one.context]


def label(value: Any) -> str:
    """A value as the cells of an experiment write it."""
    return f"{value:g}" if isinstance(value, float) else str(value)


@cache
def read_paper(name: str, folder: Path = PAPERS) -> Paper:
    """A paper's numbers.

    Raises:
        SparseDPError: a row does not fit its table.
    """
    content = read_toml(folder / f"{name}.toml")
    title = content["name"]
    return Paper(
        title,
        content["reference"],
        tuple(content.get("notes", ())),
        tuple(_table(title, table) for table in content["table"]),
        tuple((one["where"], one["says"]) for one in content.get("stated", ())),
    )


def paper_of(study: str) -> Paper | None:
    """The paper an experiment repeats, by the start of its name."""
    return next((read_paper(name) for name in FILES if study.startswith(f"{name}-")), None)


def number_for(
    study: str, cell: Mapping[str, str], settings: Mapping[str, Any], metric: str
) -> Number | None:
    """The paper's number for a cell of an experiment, if it has one.

    Labels come from the cell's settings, then from the cell. A data set's scattering is that data set.
    """
    paper = paper_of(study)
    if paper is None:
        return None
    plain = {name: label(value) for name, value in settings.items() if not isinstance(value, (dict, list))}
    labels = {**cell, **plain, "metric": metric, "dataset": base_name(plain["dataset"])}
    if labels["epsilon"] == "inf":
        labels["method"] = "non-private"
    found = (
        table.find(labels)
        for table in paper.tables_for(study)
        if ("metric" in table.keys) == (metric != "accuracy")
    )
    return next((number for number in found if number is not None), None)


def base_name(dataset: str) -> str:
    """A data set's name without the form it is loaded in."""
    return dataset.removesuffix("-scattering").removesuffix("-natural")


def _part_of_paper(study: str) -> str:
    prefix = next(name for name in FILES if study.startswith(f"{name}-"))
    return study.removeprefix(f"{prefix}-").split("-")[0]


def _table(paper: str, content: Mapping[str, Any]) -> Table:
    keys, kind, scale = tuple(content["keys"]), content.get("spread"), _UNITS[content["unit"]]
    length = len(keys) + (2 if kind else 1)
    rows: dict[tuple[str, ...], Number] = {}
    for row in content["rows"]:
        if len(row) != length:
            raise SparseDPError(f"{paper}, {content['id']}: got the row {row}, expected {length} entries")
        key, numbers = tuple(map(label, row[: len(keys)])), [value / scale for value in row[len(keys) :]]
        if key in rows:
            raise SparseDPError(f"{paper}, {content['id']}: two rows for {key}; leave one out")
        where = f"{paper}, {content['where']}"
        rows[key] = Number(numbers[0], numbers[1] if kind else None, kind, where)
    return Table(
        content["id"],
        content["where"],
        content["what"],
        keys,
        rows,
        content.get("assume", {}),
        content.get("context", False),
    )


def text_lines(paper: Paper) -> Sequence[str]:
    """What must be known to read a paper's numbers, as a list."""
    return [f"- {note}" for note in paper.notes] + [f"- {where}: {says}" for where, says in paper.stated]
