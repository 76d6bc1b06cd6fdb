"""Experiments: TOML with base settings, a grid, rules for some cells, and seeds (experiments/README.md).

A cell is a choice on every axis of the grid, a run a cell with a seed.
"""

from __future__ import annotations

import difflib
import itertools
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
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
        """An axis as a config file has it."""
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
    """One run of an experiment: the label of every axis, the seed, and everything else."""

    cell: Mapping[str, str]
    seed: int
    settings: Settings

    @property
    def name(self) -> str:
        """Labels, seed and the start of the settings' hash: unique in the experiment, fit for a file name."""
        parts = [
            _slug(label if any(map(str.isalpha, label)) else f"{axis}{label}")
            for axis, label in self.cell.items()
        ]
        return "-".join([*parts, f"seed{self.seed}", self.settings.digest[:8]])

    @property
    def title(self) -> str:
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
) -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    for levels in itertools.product(*(axis.levels for axis in axes)):
        labels = {axis.name: level.label for axis, level in zip(axes, levels, strict=True)}
        values = dict(base)
        matching = [rule.change for rule in rules if rule.matches(labels)]
        for change in (*(level.values for level in levels), *matching):
            values |= change or {}
        if None not in matching:
            yield labels, values


def _read_setting(name: str, value: Any) -> GridLevel:
    checked(name, value)
    return GridLevel(label(value), {name: value})


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


def label(value: Any) -> str:
    """A value as the cells of an experiment write it."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return ",".join(map(label, value))
    if isinstance(value, Mapping):
        return ",".join(f"{key}={label(inner)}" for key, inner in value.items())
    return str(value)


def _slug(label: str) -> str:
    return "".join(c if c.isalnum() or c in "._" else "_" for c in label)


LABORATORY = Path(__file__).parents[2]
CONFIGS, RESULTS = LABORATORY / "configs", LABORATORY / "results"

_TOP = ("title", "description", "seeds", "metric", "contrast", "base", "grid", "override", "skip")


@dataclass(frozen=True, slots=True)
class Contrast:
    """Which axis is compared, and the label everything on it is compared with."""

    axis: str = "method"
    baseline: str = "dp-sgd"


@dataclass(frozen=True, slots=True)
class Experiment:
    """A grid of runs and how to read its results."""

    name: str  # of the file, and of its results
    title: str  # one line for tables
    description: str  # what it is about, in a few sentences
    base: Mapping[str, Any]  # settings of every cell
    axes: tuple[GridAxis, ...]  # the grid
    rules: tuple[CellRule, ...]  # overrides and skips, in the file's order; later ones win
    seeds: tuple[int, ...]  # the runs of each cell
    metric: str  # what tables show
    contrast: Contrast  # the paired comparison tables make

    def runs(self) -> tuple[GridRun, ...]:
        """Every run, recipes filled in and every name checked, in the order to run them."""
        from sparsedp_experiments.runs.execute import check

        drafts, found = make_runs(self.base, self.axes, self.rules, self.seeds), []
        for run in drafts:
            with naming(run.title):
                found.append(replace(run, settings=check(run.settings)))
        return tuple(found)


def read_experiment(config: Path | str) -> Experiment:
    """The experiment in a file of its own, or a committed one by its name."""
    path = Path(config)
    if path.suffix == ".toml":
        with naming(path):
            return parse_experiment(read_toml(path), path.stem)
    return read_family(_family(str(config)))[str(config)]


def read_family(path: Path) -> dict[str, Experiment]:
    """Every experiment of a file, by the name of its table."""
    with naming(path):
        return {name: parse_experiment(content, name) for name, content in read_toml(path).items()}


def committed_families() -> dict[str, Path]:
    """The file of every committed experiment, by the experiment's name."""
    return {name: path for path in family_files(CONFIGS) for name in read_toml(path)}


def family_files(folder: Path) -> tuple[Path, ...]:
    """The files of a folder that hold experiments: tables with a base and a grid."""

    def has_experiments(content: Mapping[str, Any]) -> bool:
        return any(isinstance(table, dict) and {"base", "grid"} <= set(table) for table in content.values())

    return tuple(path for path in sorted(folder.glob("*.toml")) if has_experiments(read_toml(path)))


def records_of(config: Path | str) -> Path:
    """The file of an experiment's records: that of its family, or one of its own under `results` here."""
    path = Path(config)
    if path.suffix == ".toml":
        return Path("results") / f"{path.stem}.jsonl"
    return RESULTS / f"{_family(str(config)).stem}.jsonl"


def _family(name: str) -> Path:
    known = committed_families()
    if name not in known:
        near = ", ".join(difflib.get_close_matches(name, known, n=3)) or f"those in {CONFIGS}"
        raise SparseDPError(
            f"no experiment named {name!r}; there are {near}, or give the path of a TOML file"
        )
    return known[name]


@contextmanager
def naming(what: Path | str) -> Iterator[None]:
    """Put the name of a file or a run before what is wrong in it."""
    try:
        yield
    except SparseDPError as error:
        raise type(error)(f"{what}: {error}") from error


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file's content."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SparseDPError(f"{path}: cannot be read ({error}); give the path of a TOML file") from error
    except tomllib.TOMLDecodeError as error:
        raise SparseDPError(f"{path}: not TOML: {error}") from error


def parse_experiment(content: Mapping[str, Any], name: str) -> Experiment:
    """The experiment a TOML document describes."""
    unknown = sorted(set(content) - set(_TOP))
    if unknown:
        near = [key for key in unknown if key in KINDS]
        hint = f"; settings such as {near[0]} belong under [base]" if near else ""
        raise SparseDPError(f"got {unknown}, expected some of {', '.join(_TOP)}{hint}")
    base = _typed(content, "base", {}, "a table [base]")
    for key, value in base.items():
        checked(key, value)
    axes = tuple(
        GridAxis.parse(key, values) for key, values in _typed(content, "grid", {}, "a table [grid]").items()
    )
    overrides, skips = (
        [_rule(item, axes, kind) for item in _typed(content, kind, [], f"tables [[{kind}]]")]
        for kind in ("override", "skip")
    )
    return Experiment(
        name=name,
        title=str(content.get("title", name)),
        description=str(content.get("description", "")).strip(),
        base=base,
        axes=axes,
        rules=(*overrides, *skips),
        seeds=read_seeds(content.get("seeds", 1)),
        metric=str(content.get("metric", "accuracy")),
        contrast=_contrast(content.get("contrast", {}), axes),
    )


def read_seeds(value: Any) -> tuple[int, ...]:
    """Seeds as a list, or how many from 0 on."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    given = range(value) if whole else value
    fits = isinstance(given, (list, range)) and all(type(seed) is int and seed >= 0 for seed in given)
    if not fits or not given or len(set(given)) != len(given):
        raise SparseDPError(
            f"seeds: got {value!r}, expected how many (>= 1), or a list of different whole numbers"
        )
    return tuple(given)


def _typed(content: Mapping[str, Any], key: str, empty: Any, expected: str) -> Any:
    value = content.get(key, empty)
    if not isinstance(value, type(empty)):
        raise SparseDPError(f"{key}: got {value!r}, expected {expected}")
    return value


def _rule(item: Mapping[str, Any], axes: Sequence[GridAxis], kind: str) -> CellRule:
    """`where` and, for an override, what to `set`."""
    expected = {"where", "set"} if kind == "override" else {"where"}
    if set(item) != expected or not all(isinstance(value, dict) for value in item.values()):
        raise SparseDPError(f"[[{kind}]]: got {dict(item)!r}, expected the tables {sorted(expected)}")
    labels = {axis.name: [level.label for level in axis.levels] for axis in axes}
    where = {}
    for axis, wanted in item["where"].items():
        found = tuple(label(value) for value in (wanted if isinstance(wanted, list) else [wanted]))
        if axis not in labels or not set(found) <= set(labels[axis]):
            known = f"one of {labels[axis]}" if axis in labels else f"an axis of the grid: {sorted(labels)}"
            raise SparseDPError(f"[[{kind}]] where {axis} = {wanted!r}: expected {known}")
        where[axis] = found
    change = item.get("set")
    for key, value in (change or {}).items():
        checked(key, value)
    return CellRule(where, change)


def _contrast(value: Any, axes: Sequence[GridAxis]) -> Contrast:
    if not isinstance(value, dict) or not set(value) <= {"axis", "baseline"}:
        raise SparseDPError(f'contrast: got {value!r}, expected {{ axis = "method", baseline = "dp-sgd" }}')
    found = Contrast(**{key: label(inner) for key, inner in value.items()})
    labels = {axis.name: [level.label for level in axis.levels] for axis in axes}
    if value and found.baseline not in labels.get(found.axis, []):
        raise SparseDPError(
            f"contrast: no {found.baseline!r} on an axis {found.axis!r} of the grid; it has {labels}"
        )
    return found
