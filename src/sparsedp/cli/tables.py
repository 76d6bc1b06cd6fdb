"""`sparsedp columns`, `train` and `predict`: tables from the shell, by the estimators of `sparsedp.sklearn`."""

from __future__ import annotations

import csv
import importlib
import json
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from sparsedp._files import read_json
from sparsedp.cli import (
    Delta,
    Epochs,
    Exit,
    Json,
    answered,
    numbers,
    run_folder,
    stderr_console,
    stdout_console,
)
from sparsedp.errors import DataError, PrivacyError, SparseDPError

if TYPE_CHECKING:
    from sparsedp.sklearn.base import PrivateEstimator

_SETTINGS, _PAGE = "estimator.json", "guarantee.html"
_HEAD = """\
# A description of every column, from what it means (a data dictionary), never from the values it has.
#   ["number", low, high]      clamped and centred; bounds may be dates, "1920-01-01"
#   ["count", high]            counts and amounts, of which few are large: a logarithm is taken
#   ["category", ["a", "b"]]   names, codes: all possible levels; others are one level, missing another
#   ["code", "icd10"]          diagnoses or drugs by chapter: icd9, icd10, atc, or a list of prefixes
#   "unit"                     who is protected: the id of the patient each row belongs to
#   "drop"                     left out: free text, other ids, what is known only after the outcome
# A target to be classified is a category; one to be regressed is a number, and its bounds are needed.

[columns]
"""

Tables = Annotated[
    list[Path], typer.Argument(metavar="TABLE...", help="CSV or Parquet files with the same columns.")
]


def columns(
    tables: Tables,
    out: Annotated[Path | None, typer.Option(help="The file to write; standard output by default.")] = None,
) -> None:
    """Draft columns.toml from the header of a table alone, to be filled in from a data dictionary.

    No value of the data is read: bounds and levels are left open, as taken from the data they would not be public.

    Example: `sparsedp columns patients.csv --out columns.toml`
    """
    header = _header(tables[0])
    text = _HEAD + "".join(f"{json.dumps(name)} = {_draft(name, kind)}\n" for name, kind in header.items())
    if out is None:
        sys.stdout.write(text)
        return
    if out.exists():
        raise SparseDPError(f"{out} is there already; give another --out")
    out.write_text(text, encoding="utf-8")
    stdout_console(False).print(
        f"Draft: {out}. Fill in what is open, then sparsedp train --columns {out}", soft_wrap=True
    )


def train(
    tables: Tables,
    target: Annotated[str, typer.Option(help="The column to predict.")],
    columns: Annotated[Path, typer.Option(help="What all columns are; `sparsedp columns` drafts it.")],
    run_dir: Annotated[Path, typer.Option(help="The run directory to make.")],
    epsilon: Annotated[float, typer.Option(help="The budget, never exceeded.")],
    delta: Delta = None,
    unit: Annotated[str | None, typer.Option(help="The column of who is protected.")] = None,
    held_out: Annotated[
        float, typer.Option(min=0.0, max=0.9, help="Share of the units to test on, by a hash of their ids.")
    ] = 0.2,
    hidden: Annotated[
        str | None, typer.Option(metavar="N,N", help="Widths of hidden layers, if any.")
    ] = None,
    kind: Annotated[str, typer.Option("--model", metavar="NAME", help="linear or additive.")] = "linear",
    epochs: Epochs = None,
    seed: Annotated[int | None, typer.Option(help="Reproducible, and not for release.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")] = False,
    as_json: Json = False,
) -> None:
    """Train a private model on tables, and write the guarantee as a page to print.

    Example: `sparsedp train patients.csv --target readmitted --unit patient_id --columns columns.toml --epsilon 1
    --run-dir runs/first`
    """
    from sparsedp.sklearn.data import held_out_by_hash

    rules = _descriptions(columns)
    for option, name in (("--target", target), ("--unit", unit)):
        if name is not None and name not in rules:
            raise DataError(f"{option}: got {name!r}, expected one of the columns described in {columns}")
    if unit is not None:
        rules = {**{name: rule for name, rule in rules.items() if rule != "unit"}, unit: "unit"}
    told = {name: rule for name, rule in rules.items() if name != target}
    settings: dict[str, Any] = {
        "columns": told, "target": target, **_task(target, rules[target]), "epsilon": epsilon, "delta": delta,
        "hidden_layer_sizes": [int(width) for width in numbers(hidden, "hidden")] if hidden else [],
        "model": kind, "name": tables[0].stem, "run_dir": str(run_dir), "random_state": seed,
        **({} if epochs is None else {"epochs": epochs}),
    }  # fmt: skip
    table = read_tables(tables)
    y = _target(table, target, settings)
    who = next((name for name, rule in told.items() if rule == "unit"), None)
    ids = np.arange(len(y)).astype(str) if who is None else table[who]
    apart = held_out_by_hash(ids, held_out)
    if held_out and (apart.all() or not apart.any()):
        raise DataError(f"--held-out: a share of {held_out:g} leaves one side empty; give another, or 0")
    model = _estimator(settings).set_params(resume=resume)
    features = [name for name in table.columns if name != target]
    test = (table.part(features, apart), y[apart]) if held_out else None
    try:
        model.fit(table.part(features, ~apart), y[~apart], eval_set=test)
    except KeyboardInterrupt as interrupt:
        from sparsedp.runs.directory import holds_run

        if holds_run(run_dir):
            stderr_console().print(
                f"Stopped. The same command with --resume goes on with {run_dir}", soft_wrap=True
            )
        raise typer.Exit(Exit.INTERRUPTED) from interrupt
    names = [*model.encoder_.feature_names_in_, *told]  # the model's own order first
    settings |= {"columns": {name: told[name] for name in names}, "knots": model.encoder_.knots}
    text = json.dumps(settings, indent=1, default=str) + "\n"  # TOML has dates
    (run_dir / _SETTINGS).write_text(text, encoding="utf-8")
    page = model.guarantee_report(run_dir / _PAGE)
    metrics = {name: value for name, value in model.result_.metrics.items() if value is not None}
    answer = {"run": str(run_dir), "epsilon": model.epsilon_, "delta": model.delta_, "metrics": metrics}
    screen = answered(answer, as_json)
    screen.print(model.encoder_.describe(), soft_wrap=True, markup=False)
    screen.print(model.guarantee_, soft_wrap=True)
    if metrics:
        said = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        screen.print(f"held-out (exact, outside the guarantee): {said}", soft_wrap=True)
    screen.print(f"Run: {run_dir}\nFor the data-protection officer: {page}", soft_wrap=True)


def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run of `sparsedp train`.")],
    tables: Tables,
    out: Annotated[
        Path | None, typer.Option(help="The CSV file to write; standard output by default.")
    ] = None,
) -> None:
    """Predict for new examples, one line each: the prediction, and the probability of each class.

    Example: `sparsedp predict runs/first new.csv --out predicted.csv`
    """
    model = load_estimator(run)
    table = read_tables(tables)
    features = table.part([name for name in table.columns if name in model.encoder_.columns])
    found: dict[str, Any] = {"predicted": model.predict(features)}
    if hasattr(model, "classes_"):
        shares = model.predict_proba(features)
        found |= {f"p({label})": shares[:, place] for place, label in enumerate(model.classes_)}
    with nullcontext(sys.stdout) if out is None else open(out, "w", newline="", encoding="utf-8") as file:
        written = csv.writer(file, lineterminator="\n")
        written.writerow(found)
        for line in zip(*found.values(), strict=True):
            written.writerow([f"{one:.6g}" if isinstance(one, (float, np.floating)) else one for one in line])
    if out is not None:
        stdout_console(False).print(f"{table.shape[0]} predictions: {out}", soft_wrap=True)


@dataclass
class ReadTable:
    """Columns by name, as the estimators take a frame."""

    values: dict[str, np.ndarray]

    def __post_init__(self) -> None:
        self.columns = list(self.values)
        self.shape = (len(next(iter(self.values.values()), ())), len(self.values))

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.values:
            raise DataError(f"{name!r} is no column of the table, which has {', '.join(self.columns[:12])}")
        return self.values[name]

    def part(self, names: Sequence[str], rows: Any = slice(None)) -> ReadTable:
        """Some of the columns, and of the examples."""
        return ReadTable({name: self.values[name][rows] for name in names})


def read_tables(paths: Sequence[Path]) -> ReadTable:
    """The rows of CSV and Parquet files one after the other; of CSV all values are text, as they stand."""
    parts = [_read(path) for path in paths]
    for path, part in zip(paths, parts, strict=True):
        if odd := sorted(set(part) ^ set(parts[0])):
            raise DataError(f"{path}: its columns differ from those of {paths[0]} by {odd[:6]}")
    return ReadTable({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


def _estimator(settings: dict[str, Any]) -> PrivateEstimator:
    from sparsedp.sklearn import SparseDPClassifier, SparseDPRegressor

    given = {name: value for name, value in settings.items() if name not in ("target", "knots")}
    return SparseDPClassifier(**given) if "classes" in given else SparseDPRegressor(**given)


def load_estimator(run: Path) -> PrivateEstimator:
    """The fitted estimator of a run of `sparsedp train`, for predictions."""
    from sparsedp.runs.run import load_weights
    from sparsedp.sklearn import PublicEncoder
    from sparsedp.sklearn.data import network, widths_of

    settings = read_json(run_folder(run) / _SETTINGS)
    model = _estimator(settings)
    model.encoder_ = PublicEncoder(settings["columns"], knots=settings["knots"])
    if "classes" in settings:
        model.classes_ = np.unique(np.asarray(settings["classes"]))
    features = len(model.encoder_.get_feature_names_out())
    model.model_ = network(features, model._outputs(), widths_of(model.hidden_layer_sizes), 0)
    load_weights(run, model.model_)
    model.model_.double().eval()
    return model


def _descriptions(path: Path) -> dict[str, Any]:
    """The table [columns] of a file of rules, as `PublicEncoder` takes them."""
    try:
        found: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))["columns"]
    except (OSError, ValueError, KeyError) as error:
        expected = "a TOML file with a table [columns], as `sparsedp columns` drafts it"
        raise DataError(f"{path}: {error!r}, expected {expected}") from error
    return found


def _task(target: str, rule: Any) -> dict[str, Any]:
    """What the target's description asks for: classes, or bounds of a regression."""
    from sparsedp.sklearn.columns import reads_as

    kind, *given = [rule] if isinstance(rule, str) else rule
    if kind == "category":
        return {"classes": [reads_as(level) for level in given[0]]}
    if kind == "number" and all(isinstance(side, (int, float)) for side in given):
        return {"target_bounds": [float(side) for side in given]}
    raise PrivacyError(
        f'target {target!r}: got {rule!r}, expected ["category", [classes]] to classify or ["number", low, high] to '
        "regress, from public knowledge"
    )


def _target(table: ReadTable, target: str, settings: dict[str, Any]) -> np.ndarray:
    from sparsedp.sklearn.columns import reads_as

    if "classes" in settings:
        return np.array([reads_as(value) for value in table[target].tolist()])
    try:
        return np.asarray(table[target], dtype=np.float64)
    except (TypeError, ValueError):  # whose message would show a value
        raise DataError(f"target {target!r} holds what is no number; leave such rows out") from None


def _draft(name: str, kind: str) -> str:
    """The open description of a column, by its name and declared type."""
    from sparsedp.sklearn.data import names_somebody

    declared = f"declared {kind}; " if kind else ""
    if names_somebody(name):
        return f'"unit"  # {declared}looks like an id by its name: "unit" if it says who is protected, else "drop"'
    if "date" in kind or "time" in kind:
        return f'["number", "YYYY-MM-DD", "YYYY-MM-DD"]  # {declared}first and last day there can be'
    if any(word in kind for word in ("str", "bool", "categorical", "enum")):
        return f'["category", []]  # {declared}all levels there can be'
    if any(word in kind for word in ("float", "decimal")):
        return f'["number", "LOW", "HIGH"]  # {declared}bounds from what it means'
    return f'"FILL IN"  # {declared}a number, a count, a category, a code, or drop'


def _header(path: Path) -> dict[str, str]:
    """The columns' names, and of Parquet their declared types; no row is read."""
    with _no_value_in_errors(path):
        if polars := _polars(path):
            return {name: str(kind).lower() for name, kind in polars.read_parquet_schema(path).items()}
        with open(path, newline="", encoding="utf-8-sig") as file:
            return dict.fromkeys(_names(path, csv.reader(file)), "")


def _read(path: Path) -> dict[str, np.ndarray]:
    with _no_value_in_errors(path):
        if polars := _polars(path):
            frame = polars.read_parquet(path)
            return {name: frame[name].to_numpy() for name in frame.columns}
        with open(path, newline="", encoding="utf-8-sig") as file:
            lines, rows = csv.reader(file), []
            names = _names(path, lines)
            for line in filter(None, lines):
                if len(line) != len(names):
                    found = f"line {lines.line_num} has {len(line)} values"
                    raise DataError(f"{path}: {found}, expected {len(names)}, as the header")
                rows.append(line)
    if not rows:
        raise DataError(f"{path}: expected rows below the header, found none")
    columns = zip(names, zip(*rows, strict=True), strict=True)
    return {name: np.array(values, dtype=object) for name, values in columns}


@contextmanager
def _no_value_in_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except SparseDPError:
        raise
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; give a CSV or Parquet file") from error
    except Exception as error:
        raise DataError(f"{path}: {type(error).__name__}, expected CSV in UTF-8, or Parquet") from None


def _names(path: Path, lines: Any) -> list[str]:
    """The header of a CSV file."""
    names: list[str] = next(lines, [])
    if len(names) == 1 and any(mark in names[0] for mark in ";\t|"):
        raise DataError(f"{path}: expected commas between the columns; export it so, or give Parquet")
    if not names or len(set(names)) < len(names):
        raise DataError(f"{path}: expected a header with a different name for each column")
    return names


def _polars(path: Path) -> Any:
    """What reads a Parquet file; None for any other."""
    if path.suffix.lower() not in (".parquet", ".pq"):
        return None
    try:
        return importlib.import_module("polars")
    except ImportError as error:
        raise SparseDPError("reading Parquet takes polars; install it, or give CSV") from error
