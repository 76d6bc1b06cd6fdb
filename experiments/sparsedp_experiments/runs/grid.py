"""Grids: base settings, axes, rules for some cells. A cell is a choice on every axis, a run a cell with a seed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sparsedp.errors import SparseDPError
from sparsedp_experiments.runs.settings import KINDS, Settings, checked

Values = Mapping[str, Any]


class GridLevel(NamedTuple):
    """One choice on an axis: its label, and the settings it stands for."""

    label: str
    values: Values


@dataclass(frozen=True, slots=True)
class GridAxis:
    """A direction of the grid: a setting and its values, or a name of its own and tables of settings."""

    name: str
    levels: tuple[GridLevel, ...]

    @classmethod
    def parse(cls, name: str, values: Any) -> GridAxis:
        """An axis as a config file has it.

        Raises:
            SparseDPError: no list, an empty one, a label twice, or a value that is not the setting's.
        """
        if not isinstance(values, list) or not values:
            raise SparseDPError(f"grid.{name}: got {values!r}, expected a list of at least one value")
        read = _read_setting if name in KINDS else _read_bundle
        levels = tuple(read(name, value) for value in values)
        labels = [level.label for level in levels]
        if len(set(labels)) != len(labels):
            raise SparseDPError(f"grid.{name}: got {labels}, expected every value once")
        return cls(name, levels)


@dataclass(frozen=True, slots=True)
class CellRule:
    """Cells that match `where` get `change`; without a change they are left out."""

    where: Mapping[str, tuple[str, ...]]
    change: Values | None

    def matches(self, cell: Mapping[str, str]) -> bool:
        """Whether a cell has one of the wanted labels on every named axis."""
        return all(cell[axis] in labels for axis, labels in self.where.items())


@dataclass(frozen=True, slots=True)
class GridRun:
    """One run of an experiment.

    Attributes:
        cell: the label of every axis.
        seed: of this run.
        settings: everything else.
        name: readable, unique in the experiment, fit for a file name.
    """

    cell: Mapping[str, str]
    seed: int
    settings: Settings

    @property
    def name(self) -> str:
        """Labels, seed and the start of the settings' hash."""
        parts = [
            _slug(label if any(map(str.isalpha, label)) else f"{axis}{label}")
            for axis, label in self.cell.items()
        ]
        return "-".join([*parts, f"seed{self.seed}", self.settings.digest[:8]])

    def with_settings(self, **changes: Any) -> GridRun:
        """The same cell and seed with other settings."""
        return replace(self, settings=replace(self.settings, **changes))

    def smoke(self, subset: int, batch_size: int) -> GridRun:
        """The same on a few records, for an epoch."""
        return self.with_settings(epochs=1, subset=subset, batch_size=batch_size)

    @property
    def title(self) -> str:
        """For a person."""
        axes = ", ".join(
            f"{label if axis == 'method' else f'{axis} {label}'}" for axis, label in self.cell.items()
        )
        return f"{axes}, seed {self.seed}" if axes else f"seed {self.seed}"


def make_runs(
    base: Values, axes: Sequence[GridAxis], rules: Sequence[CellRule], seeds: Sequence[int]
) -> tuple[GridRun, ...]:
    """Every run, seeds outermost: all cells at the first seed come first, so a part of a sweep is a whole table."""
    cells = list(_cells(base, axes, rules))
    runs = [
        GridRun(cell, seed, Settings.from_json({**values, "seed": seed}))
        for seed in seeds
        for cell, values in cells
    ]
    by_digest: dict[str, GridRun] = {}
    for run in runs:
        same = by_digest.setdefault(run.settings.digest, run)
        if same is not run:
            raise SparseDPError(f"two cells are the same run: {same.title} and {run.title}; leave one out")
    return tuple(runs)


def _cells(
    base: Values, axes: Sequence[GridAxis], rules: Sequence[CellRule]
) -> list[tuple[dict[str, str], dict[str, Any]]]:
    cells = []
    for levels in itertools.product(*(axis.levels for axis in axes)):
        labels = {axis.name: level.label for axis, level in zip(axes, levels, strict=True)}
        values = dict(base)
        for level in levels:
            values |= level.values
        matching = [one for one in rules if one.matches(labels)]
        if any(one.change is None for one in matching):
            continue
        for one in matching:
            values |= one.change or {}
        cells.append((labels, values))
    return cells


def _read_setting(name: str, value: Any) -> GridLevel:
    checked(name, value)
    return GridLevel(_label(value), {name: value})


def _read_bundle(name: str, value: Any) -> GridLevel:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise SparseDPError(
            f"grid.{name}: {name} is not a setting, so its values must be tables with a name and settings, such as "
            f'{{ name = "wide", model = "mlp", lr = 0.5 }}; got {value!r}'
        )
    settings = {key: inner for key, inner in value.items() if key != "name"}
    for key, inner in settings.items():
        checked(key, inner)
    return GridLevel(value["name"], settings)


def _label(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return ",".join(map(_label, value))
    if isinstance(value, Mapping):
        return ",".join(f"{key}={_label(inner)}" for key, inner in value.items())
    return str(value)


def _slug(label: str) -> str:
    return "".join(c if c.isalnum() or c in "._" else "_" for c in label)
