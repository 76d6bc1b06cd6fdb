"""What `sparsedp diagnose` shows: tables of what anyone may see, a bar for each stage, and what is not private."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sparsedp.diagnostics.criteria import NoisyEstimate
from sparsedp.diagnostics.visible import Visible
from sparsedp.report.numbers import percent, significant

MOST_ROWS = 40
"""Of a table on the screen; --json has everything."""


@final
class Stages:
    """Shows a bar for the stage at work, and what each took when it is done."""

    def __init__(self, screen: Console, *, shown: bool) -> None:
        self._screen, self._shown = screen, shown
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=screen, transient=True, disable=not shown)
        self._task = self._bar.add_task("", total=None, visible=False)
        self._at: tuple[str, float] | None = None
        self.seconds: list[tuple[str, float]] = []

    def say(self, stage: str) -> None:
        """Begin a stage; the one before it is done."""
        self._end()
        self._at = (stage, time.monotonic())
        self._bar.reset(self._task, description=stage, total=None, visible=True)

    def progress(self, done: int, whole: int) -> None:
        """So much of the stage is done."""
        self._bar.update(self._task, completed=done, total=whole)

    def _end(self) -> None:
        if self._at is None:
            return
        name, began = self._at
        self.seconds.append((name, time.monotonic() - began))
        if self._shown:
            self._screen.print(f"{name}: {self.seconds[-1][1]:.1f} s")
        self._at = None

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._bar.stop()


def show_visible(seen: Visible, screen: Console) -> None:
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
    _show_splits(seen, screen)
    _show_layers(seen, screen)
    _show_overlaps(seen, screen)
    wire = seen.wire
    screen.print(
        f"On the wire: {wire.per_step:,.0f} bytes a step ({wire.values // wire.steps:,} of values, "
        f"{wire.indices:,} of indices every {wire.steps:,} steps), {percent(wire.share)} of a dense update."
    )
    screen.print(
        f"Noise energy of a step: {significant(noise.sparse_energy)} on the support, "
        f"{significant(noise.dense_energy)} on all coordinates."
    )
    if noise.best_rate_at_most is not None:
        most = noise.best_rate_at_most
        verdict = f"freezing more than {percent(most)}" if most else "freezing any coordinate at random"
        screen.print(f"By RS's bound {verdict} cannot pay at this noise.")


def _show_splits(seen: Visible, screen: Console) -> None:
    if not seen.splits:
        return
    ratio = seen.size / seen.dimension
    table = Table(
        "ranking", title=f"Energy in the best {percent(ratio)}: ranked and measured by different steps"
    )
    for heading in (
        "share of energy",
        "95 %",
        "random",
        "swapped, energy",
        "swapped, coherent",
        "bound (B.1)",
    ):
        table.add_column(heading, justify="right")
    for name, split in seen.splits.items():
        odds = seen.odds.get(name)
        chances = ("-", "-", "-") if odds is None else (odds.energy, odds.coherent, odds.bernstein)
        shown = [chance if isinstance(chance, str) else percent(chance) for chance in chances]
        table.add_row(name, *_share(split.share), percent(split.active_ratio), *shown)
    screen.print(table)
    screen.print(
        "Swapped: how likely the warm-up's noise ranks an average frozen coordinate above an average active one.",
        style="dim",
    )


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


def show_nonprivate(file: Path, content: Mapping[str, Any], screen: Console) -> None:
    """The values of a run's `nonprivate.json`, under the words that belong there."""
    table = Table("value", title="NOT PRIVATE", title_style="bold red")
    table.add_column("", justify="right")
    for entry in content["values"]:
        table.add_row(entry["name"], significant(float(entry["value"]), 4))
    screen.print(table)
    for remark in content["remarks"]:
        screen.print(f"- {remark}", markup=False)
    screen.print(f"Written: {file}. Figures: sparsedp report {file.parent} --nonprivate", soft_wrap=True)
