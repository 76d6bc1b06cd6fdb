"""`sparsedp diagnose`: is a run's support any good?"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsedp.cli import options
from sparsedp.cli.output import Exit, aside, emit, people, run_folder
from sparsedp.core.errors import SparseDPError

if TYPE_CHECKING:
    from sparsedp.cli.diagnosing import Stages

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

    Examples: `sparsedp diagnose runs/mnist-tp-topk-eps3`, `sparsedp diagnose runs/mnist-tp-topk-eps3 --nonprivate`.

    Without --nonprivate it reads releases and public numbers only, and costs nothing. With it, gradients at the final
    weights are measured on the run's data set, and along the run if it was trained with --snapshots;
    `sparsedp report RUN --nonprivate` shows the figures.
    """
    folder = run_folder(run)
    if not nonprivate and (data is not None or rows is not None):
        raise SparseDPError(
            "--data and --rows say what --nonprivate looks at; add --nonprivate, or drop them"
        )
    from sparsedp.cli.diagnosing import show_visible
    from sparsedp.diagnostics.visible import look

    seen = look(folder)
    found: dict[str, Any] = {"run": str(run), "visible": seen.to_json()}
    if not as_json:
        show_visible(seen, people(as_json))
    if nonprivate:
        found |= _without_noise(folder, data or Data.TEST, ROWS if rows is None else rows, as_json)
    if as_json:
        emit(found)


def _without_noise(folder: Path, data: Data, rows: int, as_json: bool) -> dict[str, Any]:
    from sparsedp.cli.diagnosing import Stages, show_nonprivate
    from sparsedp.core.files import read_json

    screen = aside()
    screen.print(BANNER, style="bold red")
    with Stages(screen, shown=not as_json) as stages:
        try:
            file = _measure(folder, data, rows, stages)
        except KeyboardInterrupt as interrupt:
            screen.print("Stopped; nothing was written.")
            raise typer.Exit(Exit.INTERRUPTED) from interrupt
    content = read_json(file)
    if not as_json:
        show_nonprivate(file, content, people(as_json))
    seconds = [{"stage": name, "seconds": round(value, 3)} for name, value in stages.seconds]
    return {"nonprivate": content, "stages": seconds, "file": str(file)}


def _measure(folder: Path, data: Data, rows: int, stages: Stages) -> Path:
    from sparsedp.cli.train import saved_settings
    from sparsedp.core.randomness import PublicRandomness
    from sparsedp.diagnostics.diagnose import diagnose_nonprivate
    from sparsedp.experiments.execute import check
    from sparsedp.experiments.finished_model import finished_model
    from sparsedp.experiments.settings import Settings

    settings = check(Settings.from_json(saved_settings(folder)))
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
