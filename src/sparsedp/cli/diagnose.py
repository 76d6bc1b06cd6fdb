"""`sparsedp diagnose`: is a run's support any good?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from sparsedp._validate import percent, significant
from sparsedp.cli import options
from sparsedp.cli.output import emit, people, run_folder

if TYPE_CHECKING:
    from rich.console import Console

    from sparsedp.diagnostics.criteria import NoisyEstimate
    from sparsedp.diagnostics.visible import Visible

MOST_ROWS = 40
"""Of a table on the screen; --json has everything."""


def diagnose(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    as_json: options.Json = False,
) -> None:
    """Show how good a run's support is, from its releases and public numbers alone: it costs nothing.

    Example: `sparsedp diagnose runs/first`
    """
    from sparsedp.diagnostics.visible import look

    seen = look(run_folder(run))
    if as_json:
        emit({"run": str(run), "visible": seen.to_json()})
    else:
        show(seen, people(as_json))


def show(seen: Visible, screen: Console) -> None:
    """What releases and public numbers say."""
    k, d, noise = seen.size, seen.dimension, seen.noise
    screen.print(
        f"[bold]Support[/bold]: {k:,} of {d:,} coordinates, {percent(k / d)}. From releases alone: free."
    )
    if seen.proxy is not None:
        null = seen.proxy.null
        screen.print(
            f"Proxy concentration rho_sig {percent(seen.proxy.seen)}; pure noise gives {percent(null.mean)} "
            f"(give or take {percent(2 * null.std)})."
        )
    if seen.missing is not None:
        screen.print(f"No split estimate: {seen.missing}.", markup=False, soft_wrap=True)
    for decision in seen.decisions:
        screen.print(f"Step {decision['step']}: keeps {decision['reason']}.", markup=False, soft_wrap=True)
    _show_splits(seen, screen)
    _show_layers(seen, screen)
    _show_overlaps(seen, screen)
    screen.print(
        f"Noise energy of a step: {significant(noise.sparse_energy)} on the support, "
        f"{significant(noise.dense_energy)} on all coordinates."
    )
    if noise.noise_ratios:
        parts = ", ".join(f"{ratio:.2f} on {name}" for name, ratio in noise.noise_ratios.items())
        screen.print(f"A step's noise over its clip norm, r: {parts}.")


def _show_splits(seen: Visible, screen: Console) -> None:
    if not seen.splits:
        return
    ratio = seen.size / seen.dimension
    table = Table(
        "ranking", title=f"Energy in the best {percent(ratio)}: ranked and measured by different steps"
    )
    for heading in ("share of energy", "95 %", "random"):
        table.add_column(heading, justify="right")
    for name, split in seen.splits.items():
        table.add_row(name, *_share(split.share), percent(split.active_ratio))
    screen.print(table)


def _share(share: NoisyEstimate | None) -> tuple[str, str]:
    if share is None:
        return "lost in noise", "-"
    low, high = share.value - 1.96 * share.std, share.value + 1.96 * share.std
    return percent(share.value), f"{percent(low)} to {percent(high)}"


def _show_layers(seen: Visible, screen: Console) -> None:
    table = Table("parameter", title="Active coordinates by parameter")
    for heading in ("active", "of", "share"):
        table.add_column(heading, justify="right")
    for layer in seen.layers[:MOST_ROWS]:
        table.add_row(layer.name, f"{layer.active:,}", f"{layer.size:,}", percent(layer.active_ratio))
    screen.print(table)


def _show_overlaps(seen: Visible, screen: Console) -> None:
    if not seen.overlaps:
        return
    table = Table("supports", "", title="Overlap")
    for heading in ("shared", "by chance, 95 %", "dropped"):
        table.add_column(heading, justify="right")
    for first, second, found in seen.overlaps[:MOST_ROWS]:
        low, high = found.random.interval()
        table.add_row(
            first, second, percent(found.share), f"{percent(low)} to {percent(high)}", percent(found.churn)
        )
    screen.print(table)
