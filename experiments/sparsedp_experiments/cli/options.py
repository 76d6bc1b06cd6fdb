"""Options of the laboratory's commands, and how they become settings."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from sparsedp.cli import (
    ActiveRatio,
    BatchSize,
    ClipNorm,
    Delta,
    Epochs,
    Json,
    Method,
    clip_bounds,
    numbers,
)
from sparsedp.errors import SparseDPError
from sparsedp_experiments.runs.config import naming, read_toml
from sparsedp_experiments.runs.settings import checked

__all__ = [
    "ActiveRatio", "BatchSize", "ClipNorm", "Delta", "Epochs", "Json", "Method", "listed", "numbers",
]  # fmt: skip


def listed(text: str) -> list[str]:
    """Read the items of a list with commas."""
    return [item.strip() for item in text.split(",") if item.strip()]


Dataset = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        "-d",
        help="A data set (`sparsedp data` lists them), an .npz file or a folder of pictures.",
    ),
]
Model = Annotated[
    str | None, typer.Option("--model", "-m", help="A model's name; the data set has a default.")
]
Config = Annotated[Path | None, typer.Option(help="A TOML file with settings; flags come on top.")]
CacheFeatures = Annotated[
    bool | None,
    typer.Option(
        "--cache-features/--no-cache-features",
        help="Run the frozen first parts of a pretrained model once, keep what they give on disk, and train on that.",
    ),
]
Lr = Annotated[float | None, typer.Option(help="Learning rate.")]
Classes = Annotated[
    str | None,
    typer.Option(metavar="A,B,...", help="Names of the classes, for an .npz file: they are public."),
]
Unit = Annotated[
    str | None,
    typer.Option(
        help="What one of those in units_train of an .npz file is called, such as patient; row protects rows instead."
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Any other setting of docs/experiments.md, such as momentum=0.5."
    ),
]
Workers = Annotated[int | None, typer.Option(help="Processes; one per core by default.")]
Threads = Annotated[
    int,
    typer.Option(
        help="Of each process. More than one is for long runs, when few are left; last digits change."
    ),
]


def names(text: str | None) -> list[str] | None:
    """Names as typed."""
    return None if text is None else listed(text)


def _clip_norm(text: str) -> float | list[float] | None:
    """A clip norm, or a pair of them as settings keep it."""
    found = clip_bounds(text)
    return list(found) if isinstance(found, tuple) else found


READ = {"clip_norm": _clip_norm, "classes": names}
"""Flags whose text is read here; the others come as they are."""


def given(others: list[str] | None = None, **flags: Any) -> dict[str, Any]:
    """The settings that were given as flags, and those given with `--set`."""
    read = {name: READ[name](value) if name in READ else value for name, value in flags.items()}
    chosen = {name: value for name, value in read.items() if value is not None}
    for item in others or []:
        name, equals, value = item.partition("=")
        if not equals:
            raise SparseDPError(f"--set: got {item!r}, expected KEY=VALUE, such as momentum=0.5")
        chosen |= _setting(name.strip().replace("-", "_"), _value(value.strip()))
    return chosen


def _setting(name: str, value: Any) -> dict[str, Any]:
    checked(name, value)
    return {name: value}


def with_unit(values: dict[str, Any], unit: str | None) -> dict[str, Any]:
    """Settings with what `--unit` says: rows instead of people, or what people are called."""
    if unit is None:
        return values
    if unit == "row":
        return {**values, "unit": unit}
    return {**values, "data_options": {**values.get("data_options", {}), "unit": unit}}


def from_file(path: Path | None) -> dict[str, Any]:
    """The settings in a file: its `[base]` table, or the file itself where there is none."""
    if path is None:
        return {}
    content = read_toml(path)
    base = content.get("base", content)
    if not isinstance(base, dict):
        raise SparseDPError(f"{path}: base is {base!r}, expected a table of settings")
    with naming(path):
        for name, value in base.items():
            checked(name, value)
    return base


def _value(text: str) -> Any:
    """A TOML value, or the text itself where it is none."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def processes(wanted: int | None, threads: int = 1) -> int:
    """How many workers: as told, or as many as give every core this process may use a thread."""
    import os

    for name, value in (("workers", wanted), ("threads", threads)):
        if value is not None and value < 1:
            raise SparseDPError(f"{name}: got {value}, expected at least 1")
    return wanted or max(1, len(os.sched_getaffinity(0)) // threads)
