"""The papers' numbers (`papers/*.toml`), and which of them is that of a cell of ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sparsedp_experiments.runs.grid import label, read_toml
from sparsedp_experiments.runs.text import NONE, Cell, markdown_table, value_text

PAPERS = Path(__file__).parents[1] / "papers"
PAPER_NAMES = ("tp-topk", "rs", "adadpigu")
_UNITS = {"%": 100.0, "1": 1.0}


@dataclass(frozen=True, slots=True)
class Number:
    """A number of a paper, in our units: shares are between 0 and 1."""

    value: float
    spread: float | None
    spread_kind: str | None


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a paper."""

    id: str  # its name in the file
    where: str  # its number in the paper
    what: str  # what it shows
    keys: tuple[str, ...]  # names of what tells its rows apart
    rows: Mapping[tuple[str, ...], Number]  # number by labels, in the order of the keys
    assume: Mapping[str, str]  # labels a cell of ours has when it does not say
    context: bool  # methods we do not have; shown, never matched

    def find(self, labels: Mapping[str, str]) -> Number | None:
        """The number with these labels; labels the table does not have do not matter."""
        wanted = {**self.assume, **labels}
        if self.context or not set(self.keys) <= set(wanted):
            return None
        return self.rows.get(tuple(wanted[key] for key in self.keys))


@dataclass(frozen=True, slots=True)
class Paper:
    """What a paper reports, and what must be known to read it."""

    reference: str
    notes: tuple[str, ...]
    tables: tuple[Table, ...]

    def table(self, name: str) -> Table:
        return next(table for table in self.tables if table.id == name)

    def tables_for(self, study: str) -> list[Table]:
        """Those an experiment repeats: `table2` for `tp-topk-table2-mnist`."""
        prefix = next(name for name in PAPER_NAMES if study.startswith(f"{name}-"))
        key = study.removeprefix(f"{prefix}-").split("-")[0]
        return [one for one in self.tables if one.id.split("-")[0] == key and not one.context]


@cache
def read_paper(name: str, folder: Path = PAPERS) -> Paper:
    """A paper's numbers."""
    content = read_toml(folder / f"{name}.toml")
    stated = (f"{one['where']}: {one['says']}" for one in content.get("stated", ()))
    tables = tuple(map(_paper_table, content["table"]))
    return Paper(content["reference"], (*content.get("notes", ()), *stated), tables)


def _paper_table(content: Mapping[str, Any]) -> Table:
    keys, kind, scale = tuple(content["keys"]), content.get("spread"), _UNITS[content["unit"]]
    rows = {}
    for row in content["rows"]:
        key, numbers = tuple(map(label, row[: len(keys)])), [value / scale for value in row[len(keys) :]]
        rows[key] = Number(numbers[0], numbers[1] if kind else None, kind)
    assume, context = content.get("assume", {}), content.get("context", False)
    return Table(content["id"], content["where"], content["what"], keys, rows, assume, context)


def number_for(study: str, cell: Cell, settings: Mapping[str, Any], metric: str) -> Number | None:
    """The paper's number for a cell of an experiment, if it has one.

    Labels come from the cell's settings, then from the cell. A data set's scattering is that data set.
    """
    paper = next((read_paper(name) for name in PAPER_NAMES if study.startswith(f"{name}-")), None)
    if paper is None:
        return None
    plain = {name: label(value) for name, value in settings.items() if not isinstance(value, (dict, list))}
    labels = {**cell, **plain, "metric": metric, "dataset": base_name(plain["dataset"])}
    if labels["epsilon"] == "inf":
        labels["method"] = "non-private"
    tables = [one for one in paper.tables_for(study) if ("metric" in one.keys) == (metric != "accuracy")]
    return next((number for table in tables if (number := table.find(labels)) is not None), None)


def base_name(dataset: str) -> str:
    """A data set's name without the form it is loaded in."""
    return dataset.removesuffix("-scattering").removesuffix("-natural")


def context_tables(paper: Paper) -> list[str]:
    """What a paper reports of methods that are not here: a row for each, a column for each epsilon."""
    lines: list[str] = []
    for table in (one for one in paper.tables if one.context):
        place = table.keys.index("epsilon")
        columns = list(dict.fromkeys(key[place] for key in table.rows))
        rests = list(dict.fromkeys((*key[:place], *key[place + 1 :]) for key in table.rows))
        rows = [
            [
                *rest,
                *(
                    paper_text(table.rows.get((*rest[:place], one, *rest[place:])), "accuracy")
                    for one in columns
                ),
            ]
            for rest in rests
        ]
        headings = [
            *(key for key in table.keys if key != "epsilon"),
            *(f"epsilon {label(one)}" for one in columns),
        ]
        lines += [f"{table.where}, {table.what}:", "", *markdown_table(headings, rows), ""]
    return lines


def paper_text(number: Number | None, metric: str) -> str:
    """A paper's number with its spread; a standard error is marked."""
    if number is None:
        return NONE
    if number.spread is None:
        return value_text(number.value, metric)
    mark = " (SE)" if number.spread_kind == "standard error" else ""
    return f"{value_text(number.value, metric)} ± {value_text(number.spread, metric)}{mark}"
