"""The command line: what all commands share, the application, and how mistakes are shown.

torch is loaded only by commands that need it.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sparsedp.errors import DataError, PrivacyError, SparseDPError


class Exit(IntEnum):
    """Exit codes; `sparsedp --help` lists them."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    DATA = 3
    PRIVACY = 4
    MISMATCH = 5
    INTERRUPTED = 130


EXIT_CODES: dict[int, str] = {
    Exit.OK: "all went well",
    Exit.INTERNAL: "a bug in sparsedp: there is a traceback, please report it",
    Exit.USAGE: "a wrong flag, name or value; or a file or folder that cannot be used",
    Exit.DATA: "data or a file of a run is missing or damaged",
    Exit.PRIVACY: "refused: it would break, overstate or overspend a guarantee",
    Exit.MISMATCH: "verify found something that does not fit, or audit a leak",
    Exit.INTERRUPTED: "stopped by Ctrl-C; it can be continued",
}

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on standard output, and nothing else.")
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run.")]
Method = Annotated[str | None, typer.Option(help="A method; `sparsedp methods` lists them.")]
Epsilon = Annotated[float | None, typer.Option("--epsilon", "-e", help="The budget; 3 if not given.")]
Delta = Annotated[float | None, typer.Option(help="Of the guarantee; by default well below 1/N.")]
Epochs = Annotated[int | None, typer.Option(help="Passes over the data; 20 if not given.")]
BatchSize = Annotated[
    int | None, typer.Option(help="Expected size of a batch, in units; near 4 sqrt(N) if not given.")
]
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


def numbers(text: str, name: str) -> list[float]:
    """Read a list of numbers with commas."""
    try:
        found = [float(item) for item in text.split(",") if item.strip()]
    except ValueError as error:
        raise SparseDPError(f"{name}: got {text!r}, expected numbers with commas, such as 1,3,8") from error
    if not found:
        raise SparseDPError(f"{name}: got {text!r}, expected at least one number")
    return found


def clip_bounds(text: str | None) -> float | tuple[float, ...] | str | None:
    """Read a clip norm, or a pair of them, or "auto"."""
    if text is None or text == "auto":
        return text
    found = numbers(text, "clip-norm")
    return found[0] if len(found) == 1 else tuple(found)


def imported_parts(path: str, parts: str) -> tuple[Any, Any, Any]:
    """Call `package.module:function` for the three parts; modules are looked up from the working directory too."""
    module, _, function = path.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise SparseDPError(f"{path}: {error}; expected package.module:function") from error
    finally:
        sys.path.pop(0)
    given = make()
    if not isinstance(given, tuple) or len(given) != 3:
        raise SparseDPError(f"{path}() gave {type(given).__name__}, expected {parts}")
    return given


def run_folder(path: Path) -> Path:
    """Return the directory of a run, as typed."""
    from sparsedp.runs.directory import holds_run

    if not holds_run(path):
        problem = "holds no run" if path.is_dir() else "is no folder"
        raise DataError(f"{path} {problem}; give the folder of a run")
    return path


def stdout_console(as_json: bool) -> Console:
    """Where results for people go: standard output, or nowhere when a machine reads it."""
    return Console(quiet=as_json, highlight=False, emoji=False)


def stderr_console() -> Console:
    """Where progress, warnings and errors go: standard error."""
    return Console(stderr=True, highlight=False, emoji=False)


def numbers_table(
    title: str, headings: Iterable[str], rows: Iterable[Iterable[str]], texts: int = 1
) -> Table:
    """A table for people; the columns after the first `texts` are aligned as numbers."""
    table = Table(title=title or None)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place < texts else "right")
    for row in rows:
        table.add_row(*row)
    return table


def print_json(value: Any) -> None:
    """Print one JSON document on standard output; infinity is null."""
    sys.stdout.write(json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")


def answered(value: Any, as_json: bool) -> Console:
    """Print an answer as JSON if asked to; gives the place where people read it."""
    if as_json:
        print_json(value)
    return stdout_console(as_json)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _version(wanted: bool) -> None:
    if wanted:
        from sparsedp import __version__

        sys.stdout.write(f"sparsedp {__version__}\n")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """What comes before any command."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise SparseDPError(
            "a command runs in one process, and torchrun has started several; start it without"
        )


def _application() -> typer.Typer:
    from sparsedp.cli import plan, runs, tables

    app = typer.Typer(
        name="sparsedp",
        help=(
            "Train PyTorch models with differential privacy.\n\n"
            "Before a run, `plan` says what a budget costs in noise, `methods` lists how it can be spent, and "
            "`check` whether a model can be trained. Training is a call from Python (`sparsedp.fit`, "
            "`sparsedp.make_private`), or `columns`, `train` and `predict` for tables. After it, `verify` checks "
            "what a run claims, `report` shows it on a page, `diagnose` says whether its support is any good, and "
            "`audit` attacks it."
        ),
        epilog="Exit codes: " + "; ".join(f"{int(code)} {words}" for code, words in EXIT_CODES.items()) + ".",
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for command in (
        plan.plan, runs.methods, runs.check, tables.columns, tables.train, tables.predict,
        runs.verify, runs.report, runs.diagnose, runs.audit,
    ):  # fmt: skip
        paragraphs = (command.__doc__ or "").split("\n\n")  # whose lines the terminal breaks, not the source
        app.command(help="\n\n".join(" ".join(one.split()) for one in paragraphs))(command)
    return app


def main() -> None:
    """Run the application: the entry point."""
    run(app)


def run(commands: typer.Typer) -> None:
    """Run commands: one clear message for mistakes, a traceback for bugs."""
    warnings.showwarning = _show_warning
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("sparsedp").setLevel(logging.INFO)
    try:
        commands()
    except (SparseDPError, OSError) as error:
        stderr_console().print(Text.assemble(("Error: ", "bold red"), str(error)), soft_wrap=True)
        if isinstance(error, DataError):
            sys.exit(Exit.DATA)
        sys.exit(Exit.PRIVACY if isinstance(error, PrivacyError) else Exit.USAGE)


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    stderr_console().print(Text.assemble(("Warning: ", "bold yellow"), str(message)), soft_wrap=True)


app = _application()
