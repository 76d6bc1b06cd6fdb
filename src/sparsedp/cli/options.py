"""Options that several commands share, and how they become settings."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from sparsedp.core.errors import SparseDPError

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on standard output, and nothing else.")
]
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
Method = Annotated[str | None, typer.Option(help="A method; `sparsedp methods` lists them.")]
Config = Annotated[Path | None, typer.Option(help="A TOML file with settings; flags come on top.")]
Delta = Annotated[float | None, typer.Option(help="Of the guarantee; by default well below 1/N.")]
Epochs = Annotated[int | None, typer.Option(help="Passes over the data.")]
BatchSize = Annotated[int | None, typer.Option(help="Expected size of a batch (Poisson sampling).")]
CacheFeatures = Annotated[
    bool | None,
    typer.Option(
        "--cache-features/--no-cache-features",
        help="Run the frozen first parts of a pretrained model once, keep what they give on disk, and train on that.",
    ),
]
Lr = Annotated[float | None, typer.Option(help="Learning rate.")]
ClipNorm = Annotated[
    str | None,
    typer.Option(metavar="C|C1,C2", help="Bound on a unit's gradient; two for warm-up and main phase."),
]
ActiveRatio = Annotated[
    float | None,
    typer.Option(metavar="RATIO", help="Share of the coordinates trained; the method has a default."),
]
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


def listed(text: str) -> list[str]:
    """The items of a list with commas."""
    return [item.strip() for item in text.split(",") if item.strip()]


def numbers(text: str, name: str) -> list[float]:
    """The numbers of a list with commas."""
    try:
        found = [float(item) for item in listed(text)]
    except ValueError as error:
        raise SparseDPError(f"{name}: got {text!r}, expected numbers with commas, such as 1,3,8") from error
    if not found:
        raise SparseDPError(f"{name}: got {text!r}, expected at least one number")
    return found


def bounds(text: str | None) -> float | list[float] | None:
    """A clip norm as typed, or a pair of them."""
    if text is None:
        return None
    found = numbers(text, "clip-norm")
    return found[0] if len(found) == 1 else found


def names(text: str | None) -> list[str] | None:
    """Names as typed."""
    return None if text is None else listed(text)


READ = {"clip_norm": bounds, "classes": names}
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
    from sparsedp.experiments.settings import checked

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
    from sparsedp.experiments.config import naming, read_toml
    from sparsedp.experiments.settings import checked

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
