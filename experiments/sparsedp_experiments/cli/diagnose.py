"""`diagnose`: is a run's support any good, by gradients without noise and by the papers' theory too?"""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, final

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sparsedp._validate import percent, significant
from sparsedp.cli import Exit, print_json, run_folder, stderr_console, stdout_console
from sparsedp.cli.runs import show_support as show_released
from sparsedp.errors import SparseDPError
from sparsedp_experiments.cli import options

if TYPE_CHECKING:
    from rich.console import Console

    from sparsedp_experiments.theory.nonprivate_file import Diagnostics
    from sparsedp_experiments.theory.visible import Theory

ROWS = 2000
BANNER = (
    "Not private: this looks at the run's data without noise. The results go to RUN/nonprivate.json and into no "
    "other file. Do not publish them or choose anything by them."
)


class Data(StrEnum):
    """Which rows to look at."""

    TEST = "test"
    TRAIN = "train"


def diagnose(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    nonprivate: Annotated[
        bool,
        typer.Option(
            "--nonprivate", help="Also look at gradients without noise. The results are not private."
        ),
    ] = False,
    data: Annotated[
        Data | None,
        typer.Option(help="With --nonprivate: rows to look at, held-out ones (test) by default."),
    ] = None,
    rows: Annotated[
        int | None, typer.Option(help=f"With --nonprivate: look at so many rows at most; {ROWS} by default.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Show how good a run's support is, what its noise does to rankings, and what its updates weigh on the wire.

    Examples: `diagnose runs/mnist-tp-topk-eps3`, `diagnose runs/mnist-tp-topk-eps3 --nonprivate`.

    Without --nonprivate it reads releases and public numbers only, and costs nothing. With it, gradients at the final
    weights are measured on the run's data set, and along the run if it was trained with --snapshots;
    `RUN/nonprivate.svg` shows the figures.
    """
    folder = run_folder(run)
    if not nonprivate and (data is not None or rows is not None):
        raise SparseDPError(
            "--data and --rows say what --nonprivate looks at; add --nonprivate, or drop them"
        )
    from sparsedp.diagnostics import look
    from sparsedp_experiments.theory.visible import theory_of

    seen, theory = look(folder), theory_of(folder)
    found: dict[str, Any] = {"run": str(run), "visible": {**seen.to_json(), **theory.to_json()}}
    if not as_json:
        show_released(seen, stdout_console(as_json))
        _show_theory(theory, stdout_console(as_json))
    if nonprivate:
        found |= _without_noise(folder, data or Data.TEST, ROWS if rows is None else rows, as_json)
    if as_json:
        print_json(found)


def _without_noise(folder: Path, data: Data, rows: int, as_json: bool) -> dict[str, Any]:
    from sparsedp_experiments.theory.nonprivate_file import draw_diagnostics, read_diagnostics

    screen = stderr_console()
    screen.print(BANNER, style="bold red")
    with _Stages(screen, shown=not as_json) as stages:
        try:
            file = _measure(folder, data, rows, stages)
        except KeyboardInterrupt as interrupt:
            screen.print("Stopped; nothing was written.")
            raise typer.Exit(Exit.INTERRUPTED) from interrupt
    found = read_diagnostics(folder)
    draw_diagnostics(folder, found)
    if not as_json:
        _show_nonprivate(file, found, stdout_console(as_json))
    seconds = [{"stage": name, "seconds": round(value, 3)} for name, value in stages.seconds]
    return {"nonprivate": found.to_json(), "stages": seconds, "file": str(file)}


def _measure(folder: Path, data: Data, rows: int, stages: _Stages) -> Path:
    from sparsedp.randomness import PublicRandomness
    from sparsedp_experiments.runs.execute import check
    from sparsedp_experiments.runs.finished_model import finished_model
    from sparsedp_experiments.runs.settings import Settings, settings_of_run
    from sparsedp_experiments.theory.diagnose import diagnose_nonprivate

    settings = check(Settings.from_json(settings_of_run(folder)))
    stages.say("data and model")
    subject = finished_model(settings, data.value, rows)
    return diagnose_nonprivate(
        folder,
        subject.model,
        subject.loss,
        subject.batches,
        PublicRandomness(0),
        stages.say,
        progress=stages.progress,
        fresh=subject.fresh,
    )


@final
class _Stages:
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


def _show_theory(found: Theory, screen: Console) -> None:
    """What the papers' bounds say of the run, from released and public numbers."""
    if found.odds:
        table = Table("ranking", title="How likely noise swaps an active and a frozen coordinate")
        for heading in ("energy", "coherent", "bound (B.1)"):
            table.add_column(heading, justify="right")
        for name, odds in found.odds.items():
            table.add_row(name, *(percent(chance) for chance in (odds.energy, odds.coherent, odds.bernstein)))
        screen.print(table)
    wire = found.wire
    screen.print(
        f"On the wire: {wire.per_step:,.0f} bytes a step ({wire.values // wire.steps:,} of values, "
        f"{wire.indices:,} of indices every {wire.steps:,} steps), {percent(wire.share)} of a dense update."
    )
    if found.best_rate_at_most is not None:
        most = found.best_rate_at_most
        verdict = f"freezing more than {percent(most)}" if most else "freezing any coordinate at random"
        screen.print(f"By RS's bound {verdict} cannot pay at this noise.")


def _show_nonprivate(file: Path, found: Diagnostics, screen: Console) -> None:
    """A run's values that are not private, under the words that belong there."""
    table = Table("value", title="NOT PRIVATE", title_style="bold red")
    table.add_column("", justify="right")
    for entry in found.values:
        table.add_row(entry["name"], significant(float(entry["value"]), 4))
    screen.print(table)
    for remark in found.remarks:
        screen.print(f"- {remark}", markup=False)
    screen.print(f"Written: {file}. Figures: nonprivate.svg beside it", soft_wrap=True)
