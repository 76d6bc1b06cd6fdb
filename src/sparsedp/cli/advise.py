"""`sparsedp advise`: would fewer coordinates have sufficed?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparsedp.cli import options
from sparsedp.cli.output import emit, people, run_folder

if TYPE_CHECKING:
    from rich.console import Console

    from sparsedp.diagnostics.advice import Advice


def advise(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    as_json: options.Json = False,
) -> None:
    """Say in plain words whether fewer coordinates would have sufficed, which share, and how sure that is.

    Example: `sparsedp advise runs/mnist-tp-topk-eps3`

    It reads what the warm-up released, so it costs no privacy. A run without a warm-up, of dp-sgd apart, is told what
    public numbers say: how loud its noise is.
    """
    from sparsedp.diagnostics.advice import advise_run

    advice = advise_run(run_folder(run))
    if as_json:
        emit({"run": str(run), **advice.to_json()})
    else:
        _show(advice, people(as_json))


def _show(advice: Advice, screen: Console) -> None:
    from rich.panel import Panel
    from rich.table import Table

    words = f"[bold]{advice.recommendation}[/bold]"
    if advice.confidence is not None:
        confidence = "above 99.9%" if advice.confidence > 0.999 else f"{advice.confidence:.1%}"
        words += f"\nAs far as noise goes: {advice.sure} (confidence {confidence})."
    screen.print(Panel(words, title="Advice", expand=False))
    for reason in advice.reasons:
        screen.print(f"- {reason}", markup=False)
    if advice.options:
        table = Table("ranking", title="Progress of a step, each at its best learning rate; dense is 1")
        for heading in ("coordinates", "progress", "give or take", "squared error saved (Prop. 5.1)"):
            table.add_column(heading, justify="right")
        best = max(option.progress.value for option in advice.options)
        for option in advice.options:
            table.add_row(
                option.ranking,
                f"{option.ratio:.0%}",
                f"{option.progress.value:.2f}",
                f"{2 * option.progress.std:.2f}",
                f"{option.gain:+.0%} of the dense noise",
                style="bold" if option.progress.value == best else None,
            )
        screen.print(table)
    for caveat in advice.caveats:
        screen.print(caveat, style="dim", markup=False)
