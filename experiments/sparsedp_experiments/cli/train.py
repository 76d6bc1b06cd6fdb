"""`sparsedp train`: one private run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from sparsedp._validate import rounded_up
from sparsedp.cli import Exit, print_json, stderr_console, stdout_console
from sparsedp.errors import SparseDPError
from sparsedp_experiments.cli import options

if TYPE_CHECKING:
    from sparsedp.results import Callback, Event, Result
    from sparsedp_experiments.runs.settings import Settings


def train(
    dataset: options.Dataset = None,
    model: options.Model = None,
    method: Annotated[
        str | None,
        typer.Option(help="A method (`sparsedp methods` lists them); by default auto: by public numbers."),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option("--epsilon", "-e", help="The budget; 3 if not given.")
    ] = None,
    delta: options.Delta = None,
    epochs: options.Epochs = None,
    batch_size: options.BatchSize = None,
    lr: options.Lr = None,
    clip_norm: options.ClipNorm = None,
    active_ratio: options.ActiveRatio = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Makes the run reproducible, and not for release: a known seed gives the noise away."
        ),
    ] = None,
    cache_features: options.CacheFeatures = None,
    classes: options.Classes = None,
    unit: options.Unit = None,
    set_: options.Set = None,
    config: options.Config = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; never overwritten. Named for you if not given.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Go on with a stopped run, and nothing else.")
    ] = None,
    tensorboard: Annotated[
        bool,
        typer.Option(
            "--tensorboard", help="Also log released and public numbers for TensorBoard, in RUN/tensorboard."
        ),
    ] = False,
    snapshots: Annotated[
        bool,
        typer.Option(
            "--snapshots",
            help="Also keep the weights of 20 steps of the last phase, in RUN/snapshots, for `sparsedp diagnose`.",
        ),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Train a model with differential privacy and keep its plan, ledger, checkpoint and record in a folder.

    Example: `sparsedp train --dataset mnist --method tp-topk --epsilon 3`

    Your own data: `sparsedp train --dataset mine.npz --classes no,yes --epsilon 1`. The file has the arrays x_train,
    y_train, x_test, y_test, and units_train (whose row each is) where a person can have several rows.

    Ctrl-C stops between two steps; `sparsedp train --resume RUN` goes on. Where a data set knows whose rows are whose
    (patients), people are protected, not rows.

    Several processes: `torchrun --nproc-per-node 2 -m sparsedp train --dataset mnist --epsilon 3 --out RUN`
    """
    chosen = options.given(
        set_,
        dataset=dataset,
        model=model,
        method=method,
        epsilon=epsilon,
        delta=delta,
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        clip_norm=clip_norm,
        active_ratio=active_ratio,
        cache_features=cache_features,
        classes=classes,
        seed=seed,
    )
    if resume is not None:
        from sparsedp_experiments.runs.settings import settings_of_run

        if chosen or unit is not None or config is not None or out is not None:
            raise SparseDPError(
                "--resume goes on with a run as it was planned; drop the other settings, or start a new run"
            )
        from sparsedp import distributed

        extras = _Extras(tensorboard, snapshots, as_json)
        distributed.connect()
        if distributed.broadcast_from_main(lambda: _already_finished(resume, as_json)):
            return
        _go(distributed.broadcast_from_main(lambda: settings_of_run(resume)), resume, extras, resume=True)
        return
    from sparsedp.methods.auto import AUTO_METHOD

    values = options.with_unit({"method": AUTO_METHOD, **options.from_file(config), **chosen}, unit)
    if "dataset" not in values:
        raise SparseDPError("give --dataset (`sparsedp data` lists them), --config FILE, or --resume RUN")
    _go(values, out, _Extras(tensorboard, snapshots, as_json), resume=False)


class _Extras(NamedTuple):
    """What to keep and show besides the run itself."""

    tensorboard: bool
    snapshots: bool
    as_json: bool


def _go(values: dict[str, Any], out: Path | None, extras: _Extras, *, resume: bool) -> None:
    from sparsedp import distributed
    from sparsedp.callbacks import EpochLines, tensorboard_log
    from sparsedp.runs.directory import TENSORBOARD, check_new, free_folder, resumes
    from sparsedp_experiments.runs.execute import check, execute
    from sparsedp_experiments.runs.settings import Settings
    from sparsedp_experiments.theory.snapshots import watching

    settings = check(Settings.from_json(values))
    distributed.connect()
    main = distributed.is_main_process()
    if out is None and distributed.restarts():
        raise SparseDPError("the launcher has started this run again, and it has no name; give --out")
    if not main:
        logging.getLogger("sparsedp").setLevel(logging.WARNING)
    folder = distributed.broadcast_from_main(lambda: out or free_folder(Path("runs"), _name(settings)))
    resume = resumes(folder, resume)
    distributed.broadcast_from_main(lambda: None if resume else check_new(folder))
    screen, as_json = stderr_console() if main else Console(quiet=True), extras.as_json
    watched = screen.is_terminal and not as_json and main
    what = "Going on with" if resume else "Training"
    told = f"{what} {settings.model} on {settings.dataset} by {settings.method}, in {folder}"
    callbacks: list[Callback] = [] if as_json else [_Announcement(screen, told)]
    if not watched and not as_json and main:
        callbacks.append(EpochLines(screen, settings.epochs))
    if extras.tensorboard and main:
        callbacks.append(tensorboard_log(folder / TENSORBOARD))
    try:
        result = execute(
            settings,
            out=folder,
            resume=resume,
            callbacks=callbacks,
            watch=watching(folder, extras.snapshots) if main else lambda _: (),
            progress=watched,
        )
    except KeyboardInterrupt as interrupt:
        if main:
            _stopped(folder, as_json)
        raise typer.Exit(Exit.INTERRUPTED) from interrupt
    if not main:
        return
    if as_json:
        print_json(_record(folder))
    else:
        _show(result, settings, folder, stdout_console(as_json))


class _Announcement:
    """A callback that says what is trained and where, once: with the first step, as before it all can be refused."""

    def __init__(self, screen: Console, words: str) -> None:
        self._screen, self._words = screen, words

    def __call__(self, event: Event) -> None:
        if self._words:
            self._screen.print(self._words, soft_wrap=True)
            self._words = ""


def _already_finished(run: Path, as_json: bool) -> bool:
    """Whether nothing is left of a run to take up, and say so."""
    from sparsedp.runs.directory import CHECKPOINT, RECORD, check_file
    from sparsedp.runs.record import FINISHED
    from sparsedp.runs.run import Run

    opened = Run.open(run)
    if opened.record["status"] != FINISHED:
        return False
    for name in (RECORD, CHECKPOINT):
        check_file(opened.ledger, run / name)
    if as_json:
        print_json(_record(run))
    else:
        stderr_console().print(
            f"{run} is finished: every planned step is taken. `sparsedp report {run}` shows it; more training is a "
            "new run, with a budget of its own.",
            soft_wrap=True,
        )
    return True


def _name(settings: Settings) -> str:
    return f"{Path(settings.dataset).stem}-{settings.method}-eps{settings.epsilon:g}"


def _stopped(folder: Path, as_json: bool) -> None:
    from sparsedp.runs.directory import holds_run

    if not holds_run(folder):
        stderr_console().print("Stopped before the first step; nothing was spent.")
        return
    if as_json:
        print_json(_record(folder))
    stderr_console().print(
        f"Stopped with a checkpoint. Go on with: sparsedp train --resume {folder}", soft_wrap=True
    )


def _record(folder: Path) -> dict[str, Any]:
    from sparsedp.runs.run import Run

    return {"run": str(folder), **Run.open(folder).record}


def _show(result: Result, settings: Settings, folder: Path, screen: Console) -> None:
    """What came out, what it cost, and what to do with it."""
    from sparsedp.guarantee import guarantee

    table = Table(title=f"{result.method}", show_header=False)
    for name, value in result.metrics.items():
        table.add_row(f"held-out {name.replace('_', ' ')}", "-" if value is None else f"{value:.4f}")
    table.add_row("coordinates", f"{result.k:,} of {result.d:,} active at the end")
    if result.private:
        table.add_row(
            "epsilon spent",
            f"{rounded_up(result.ledger.epsilon, 5)} at delta {result.delta:g}, per {result.unit}",
        )
    screen.print(table)
    screen.print(guarantee(result.plan))
    if result.unit == "row" and settings.unit is None and Path(settings.dataset).suffix == ".npz":
        screen.print(
            "Rows are protected here. If a person can have several rows, add units_train (whose row each is), and "
            "people are; --unit says what they are called.",
            soft_wrap=True,
        )
    if not result.for_release:
        screen.print(
            "[yellow]Reproducible, not for release:[/yellow] a seed was given, or the method is not private."
        )
    screen.print(f"Run: {folder}")
    screen.print(
        f"Next: sparsedp verify {folder}; sparsedp report {folder}; sparsedp diagnose {folder}",
        soft_wrap=True,
    )
