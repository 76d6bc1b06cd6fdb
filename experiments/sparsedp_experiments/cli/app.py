"""The laboratory's application: its commands, several of which torchrun may start."""

from __future__ import annotations

import os

import typer

from sparsedp.cli import EXIT_CODES, run
from sparsedp.errors import SparseDPError
from sparsedp_experiments.cli.audit import audit
from sparsedp_experiments.cli.compare import compare
from sparsedp_experiments.cli.data import data_app
from sparsedp_experiments.cli.demo import demo
from sparsedp_experiments.cli.diagnose import diagnose
from sparsedp_experiments.cli.sweep import sweep
from sparsedp_experiments.cli.train import train

app = typer.Typer(
    name="python -m sparsedp_experiments",
    help=(
        "Re-run the papers, and train on named data sets.\n\n"
        "Start with [bold]demo[/bold]: two minutes, nothing to download. Then "
        "[bold]train --dataset mnist --method tp-topk --epsilon 3[/bold]."
    ),
    epilog="Exit codes: " + "; ".join(f"{code.value} {words}" for code, words in EXIT_CODES.items()) + ".",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (demo, train, compare, sweep, audit, diagnose):
    app.command()(command)
app.add_typer(data_app, name="data")


@app.callback()
def root(context: typer.Context) -> None:
    """What comes before any command."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ
    if several and context.invoked_subcommand != "train":
        raise SparseDPError(
            f"`{context.invoked_subcommand}` runs in one process, and torchrun has started several; start it without"
        )


def main() -> None:
    """The entry point."""
    run(app)
