"""The application: its commands, and how mistakes are shown."""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import sys
import warnings
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from sparsedp.cli.audit import audit
from sparsedp.cli.check import check
from sparsedp.cli.diagnose import diagnose
from sparsedp.cli.methods import methods
from sparsedp.cli.plan import plan
from sparsedp.cli.report import report
from sparsedp.cli.verify import verify
from sparsedp.core.memory import keep_freed_memory
from sparsedp.errors import DataError, PrivacyError, SparseDPError
from sparsedp.runs.folder import holds_run

# DOC options: Options that several commands share, and how they are read.
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on standard output, and nothing else.")
]
Method = Annotated[str | None, typer.Option(help="A method; `sparsedp methods` lists them.")]
Delta = Annotated[float | None, typer.Option(help="Of the guarantee; by default well below 1/N.")]
Epochs = Annotated[int | None, typer.Option(help="Passes over the data.")]
BatchSize = Annotated[int | None, typer.Option(help="Expected size of a batch (Poisson sampling).")]
ClipNorm = Annotated[
    str | None,
    typer.Option(metavar="C|C1,C2", help="Bound on a unit's gradient; two for warm-up and main phase."),
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


# DOC output: What commands print, and what they exit with.
class Exit(IntEnum):
    """Exit codes; `sparsedp --help` lists them."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    DATA = 3
    PRIVACY = 4
    MISMATCH = 5
    FAILED_RUNS = 6
    INTERRUPTED = 130


EXIT_CODES: Mapping[Exit, str] = {
    Exit.OK: "all went well",
    Exit.INTERNAL: "a bug in sparsedp: there is a traceback, please report it",
    Exit.USAGE: "a wrong flag, name or value; or a folder that cannot be used",
    Exit.DATA: "data or a file of a run is missing or damaged",
    Exit.PRIVACY: "refused: it would break, overstate or overspend a guarantee",
    Exit.MISMATCH: "verify found something that does not fit, or audit a leak",
    Exit.FAILED_RUNS: "some runs of a comparison or a sweep failed",
    Exit.INTERRUPTED: "stopped by Ctrl-C; it can be continued",
}


def run_folder(path: Path) -> Path:
    """The folder of a run, as typed.

    Raises:
        DataError: there is no run.
    """
    if not path.is_dir():
        raise DataError(f"{path} is no folder; give the folder of a run")
    if not holds_run(path):
        raise DataError(f"{path} holds no run; give the folder of a run")
    return path


def people(as_json: bool) -> Console:
    """Where results for people go: standard output, or nowhere when a machine reads it."""
    return Console(quiet=as_json, highlight=False, emoji=False)


def aside() -> Console:
    """Where progress, warnings and errors go: standard error."""
    return Console(stderr=True, highlight=False, emoji=False)


def emit(value: Any) -> None:
    """One JSON document on standard output; infinity is null."""
    sys.stdout.write(json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_EPILOG = "Exit codes: " + "; ".join(f"{code.value} {words}" for code, words in EXIT_CODES.items()) + "."

app = typer.Typer(
    name="sparsedp",
    help=(
        "Train PyTorch models with differential privacy, updating and noising only the coordinates that matter.\n\n"
        "Training is a call from Python, `sparsedp.fit` or `sparsedp.make_private`; the commands plan a run, "
        "and verify, report and audit it."
    ),
    epilog=_EPILOG,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (plan, check, verify, report, diagnose, audit, methods):
    app.command()(command)


def _version(wanted: bool) -> None:
    if wanted:
        from sparsedp import __version__

        sys.stdout.write(f"sparsedp {__version__}\n")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """What comes before any command."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise SparseDPError(
            "a command runs in one process, and torchrun has started several; start it without"
        )


def main() -> None:
    """The entry point."""
    run(app)


def run(commands: typer.Typer) -> None:
    """Run commands: one clear message for mistakes, a traceback for bugs."""
    keep_freed_memory()
    warnings.showwarning = _show_warning
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("sparsedp").setLevel(logging.INFO)
    try:
        commands()
    except SparseDPError as error:
        aside().print(Text.assemble(("Error: ", "bold red"), str(error)), soft_wrap=True)
        sys.exit(_code(error))


def _code(error: SparseDPError) -> Exit:
    if isinstance(error, DataError):
        return Exit.DATA
    return Exit.PRIVACY if isinstance(error, PrivacyError) else Exit.USAGE


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: object = None,
    line: object = None,
) -> None:
    aside().print(Text.assemble(("Warning: ", "bold yellow"), str(message)), soft_wrap=True)
