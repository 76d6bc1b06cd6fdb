"""The application: its commands, and how mistakes are shown."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import Annotated

import typer
from rich.text import Text

from sparsedp.cli.audit import audit
from sparsedp.cli.check import check
from sparsedp.cli.diagnose import diagnose
from sparsedp.cli.methods import methods
from sparsedp.cli.output import EXIT_CODES, Exit, aside
from sparsedp.cli.plan import plan
from sparsedp.cli.report import report
from sparsedp.cli.tables import columns, predict, train
from sparsedp.cli.verify import verify
from sparsedp.errors import DataError, PrivacyError, SparseDPError
from sparsedp.grad_sample.buffers import keep_freed_memory

_EPILOG = "Exit codes: " + "; ".join(f"{code.value} {words}" for code, words in EXIT_CODES.items()) + "."

app = typer.Typer(
    name="sparsedp",
    help=(
        "Train PyTorch models with differential privacy, updating and noising only the coordinates that matter.\n\n"
        "Training is a call from Python, `sparsedp.fit` or `sparsedp.make_private`, or for tables `train`; the other "
        "commands plan a run, and verify, report and audit it."
    ),
    epilog=_EPILOG,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (columns, train, predict, plan, check, verify, report, diagnose, audit, methods):
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
