"""Options that several commands share, and how they are read."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Annotated, Any

import typer

from sparsedp.errors import SparseDPError

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on standard output, and nothing else.")
]
Method = Annotated[str | None, typer.Option(help="A method; `sparsedp methods` lists them.")]
Delta = Annotated[float | None, typer.Option(help="Of the guarantee; by default well below 1/N.")]
Epochs = Annotated[int | None, typer.Option(help="Passes over the data.")]
BatchSize = Annotated[int | None, typer.Option(help="Expected size of a batch (Poisson sampling).")]
ClipNorm = Annotated[
    str | None,
    typer.Option(
        "--max-grad-norm",
        "--clip-norm",
        metavar="C|C1,C2",
        help="Bound on a unit's gradient; two for warm-up and main phase.",
    ),
]
ActiveRatio = Annotated[
    float | None,
    typer.Option(metavar="RATIO", help="Share of the coordinates trained; the method has a default."),
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


def imported(path: str, giving: str) -> Any:
    """What `package.module:function` gives; modules are looked up from the working directory too.

    Raises:
        SparseDPError: there is no such function, or it fails.
    """
    module, _, function = path.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise SparseDPError(f"{path}: {error}; expected package.module:function") from error
    finally:
        sys.path.pop(0)
    try:
        return make()
    except Exception as error:
        raise SparseDPError(
            f"{path}() raised {type(error).__name__} ({error}); expected it to give {giving}"
        ) from error
