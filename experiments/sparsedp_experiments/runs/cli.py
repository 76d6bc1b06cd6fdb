"""The laboratory's commands: `python -m sparsedp_experiments train | sweep | compare | demo | data ...`."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from sparsedp.cli import (
    EXIT_CODES,
    Epochs,
    Epsilon,
    Exit,
    Json,
    numbers,
    print_json,
    run_folder,
    stderr_console,
    stdout_console,
)
from sparsedp.cli import run as run_app
from sparsedp.errors import SparseDPError

FAILED_RUNS = 6
FIVE_METHODS = "dp-sgd,tp-rand,tp-topk,on-rand,on-topk"
_EXIT_CODES = EXIT_CODES | {FAILED_RUNS: "some runs of a comparison or a sweep failed"}

Dataset = Annotated[str | None, typer.Option("--dataset", "-d", help="A data set; `data` lists them.")]
Method = Annotated[str | None, typer.Option(help="`sparsedp methods` lists them; auto: by public numbers.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting of experiments/README.md: momentum=0.5."),
]
Workers = Annotated[int | None, typer.Option(min=1, help="Processes; one per core by default.")]

app = typer.Typer(
    name="python -m sparsedp_experiments",
    help=(
        "Re-run the papers, and train on named data sets.\n\n"
        "Start with [bold]demo[/bold]: two minutes, nothing to download. Then "
        "[bold]train --dataset mnist --method tp-topk --epsilon 3[/bold]."
    ),
    epilog="Exit codes: " + "; ".join(f"{int(code)} {words}" for code, words in _EXIT_CODES.items()) + ".",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="List the data sets, download them.", rich_markup_mode="rich")
app.add_typer(data_app, name="data")


def main() -> None:
    """The entry point."""
    run_app(app)


@app.command()
def train(
    dataset: Dataset = None,
    method: Method = None,
    epsilon: Epsilon = None,
    epochs: Epochs = None,
    seed: Annotated[int | None, typer.Option(help="Makes the run reproducible, and not for release.")] = None,
    set_: Set = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; never overwritten.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Go on with a stopped run.")] = None,
    snapshots: Annotated[
        bool,
        typer.Option("--snapshots", help="Also keep the weights of 20 steps, for `diagnose --nonprivate`."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a model with differential privacy and keep its plan, ledger, checkpoint and record in a folder.

    Example: `train --dataset mnist --method tp-topk --epsilon 3`

    Ctrl-C stops between two steps; `train --resume RUN` goes on. Where a data set knows whose rows are whose
    (patients), people are protected, not rows.

    Several processes: `torchrun --nproc-per-node 2 -m sparsedp_experiments train --dataset mnist --out RUN`
    """
    from sparsedp import distributed
    from sparsedp.methods.auto import AUTO_METHOD
    from sparsedp_experiments.runs.settings import settings_of_run

    chosen = given(set_, dataset=dataset, method=method, epsilon=epsilon, epochs=epochs, seed=seed)
    if resume is None:
        _train({"method": AUTO_METHOD, **chosen}, out, snapshots, as_json, resume=False)
        return
    if chosen or out is not None:
        raise SparseDPError(
            "--resume goes on with a run as it was planned; drop the other settings, or start a new run"
        )
    distributed.connect()
    if distributed.broadcast_from_main(lambda: _is_finished(resume)):
        if distributed.is_main_process():
            stderr_console().print(f"{resume} is finished: every planned step is taken.", soft_wrap=True)
            _show(resume, as_json)
        return
    values = distributed.broadcast_from_main(lambda: settings_of_run(resume))
    _train(values, resume, snapshots, as_json, resume=True)


def _train(values: dict[str, Any], out: Path | None, snapshots: bool, as_json: bool, *, resume: bool) -> None:
    from sparsedp import distributed
    from sparsedp.callbacks import EpochLines
    from sparsedp.runs.directory import check_new, holds_run, resumes
    from sparsedp_experiments.runs.demo import free_folder
    from sparsedp_experiments.runs.execute import check, execute
    from sparsedp_experiments.runs.settings import Settings
    from sparsedp_experiments.theory.trajectory import watching

    settings = check(Settings.from_json(values))
    distributed.connect()
    main = distributed.is_main_process()
    if out is None and distributed.restarts():
        raise SparseDPError("the launcher has started this run again, and it has no name; give --out")
    name = f"{settings.dataset}-{settings.method}-eps{settings.epsilon:g}"
    folder = distributed.broadcast_from_main(lambda: out or free_folder(Path("runs"), name))
    resume = resumes(folder, resume)
    distributed.broadcast_from_main(lambda: None if resume else check_new(folder))
    screen = Console(stderr=True, quiet=as_json or not main, highlight=False)
    callbacks = [] if screen.is_terminal else [EpochLines(screen, settings.epochs)]
    look = watching(folder, snapshots) if main else lambda _: ()
    progress = screen.is_terminal and not screen.quiet
    try:
        execute(settings, out=folder, resume=resume, callbacks=callbacks, watch=look, progress=progress)
    except KeyboardInterrupt as interrupt:
        if main and not holds_run(folder):
            stderr_console().print("Stopped before the first step; nothing was spent.")
        elif main:
            stderr_console().print(
                f"Stopped with a checkpoint. Go on with: train --resume {folder}", soft_wrap=True
            )
        raise typer.Exit(Exit.INTERRUPTED) from interrupt
    if main:
        _show(folder, as_json)


def _is_finished(run: Path) -> bool:
    """Whether nothing is left of a run to take up; its files are checked then."""
    from sparsedp.runs.directory import CHECKPOINT, RECORD, check_file
    from sparsedp.runs.record import FINISHED
    from sparsedp.runs.run import Run

    opened = Run.open(run)
    if opened.record["status"] != FINISHED:
        return False
    for name in (RECORD, CHECKPOINT):
        check_file(opened.ledger, run / name)
    return True


def _show(folder: Path, as_json: bool) -> None:
    """What came out of a run and what it cost."""
    from sparsedp.guarantee import guarantee
    from sparsedp.runs.run import Run

    run = Run.open(folder)
    if as_json:
        print_json({"run": str(folder), **run.record})
        return
    table = Table(title=run.record["method"], show_header=False)
    for name, value in (run.record["metrics"] or {}).items():
        table.add_row(f"held-out {name.replace('_', ' ')}", "-" if value is None else f"{value:.4f}")
    table.add_row("coordinates", f"{run.record['k']:,} of {run.record['d']:,} active at the end")
    screen = stdout_console(False)
    screen.print(table)
    screen.print(guarantee(run.plan))
    if not run.record["publishable"]:
        screen.print("[yellow]Reproducible, not for release:[/yellow] a seed was given.")
    screen.print(f"Run: {folder}\nNext: sparsedp verify {folder}; sparsedp report {folder}", soft_wrap=True)


@app.command()
def sweep(
    config: Annotated[
        str,
        typer.Argument(metavar="NAME | FILE.toml", help="A committed experiment's name, or a file with one."),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Append here instead of the family's file.")
    ] = None,
    workers: Workers = None,
) -> None:
    """Run every cell of an experiment, seed by seed, and keep one line of JSON per run.

    Example: `sweep rs-figure2`. What has a record is skipped, so the same command goes on after a stop or a kill, and
    a partial sweep is already a table: all cells at the first seed come first. Unfinished runs are in runs/NAME.
    """
    from sparsedp_experiments.runs.grid import read_experiment, records_of

    other = other_experiment(config)
    if other is not None:
        other()
        return
    experiment = read_experiment(config)
    _run(experiment, out or records_of(config), Path("runs") / experiment.name, workers, keep_runs=False)


def other_experiment(name: str) -> Callable[[], None] | None:
    """What makes the records of an experiment that is no grid, by name; None for all others."""
    from sparsedp_experiments.attacks.audits import audit_missing
    from sparsedp_experiments.figures.study import load_studies, measure_missing
    from sparsedp_experiments.runs.partition import noise_table, train_missing
    from sparsedp_experiments.tabular_rates import simulate_missing

    known: dict[str, Callable[[], None]] = {
        "rs-table3": train_missing,
        "adadpigu-table3": lambda: print("\n".join(noise_table())),
        "audit": audit_missing,
        "table-rates": simulate_missing,
    }
    return known.get(name) or next(
        (partial(measure_missing, [study]) for study in load_studies() if study.name == name), None
    )


@app.command()
def compare(
    dataset: Dataset = None,
    methods: Annotated[str, typer.Option(metavar="M1,M2,...", help="Methods to compare.")] = FIVE_METHODS,
    epsilons: Annotated[str, typer.Option(metavar="E1,E2,...", help="Budgets.")] = "3",
    seeds: Annotated[int, typer.Option(help="How many seeds each, from 0 on.")] = 3,
    set_: Set = None,
    metric: Annotated[str, typer.Option(help="What to compare: accuracy, auc, loss, ...")] = "accuracy",
    out: Annotated[
        Path | None, typer.Option(help="Folder of the runs; runs/compare-DATASET by default.")
    ] = None,
    workers: Workers = None,
) -> None:
    """Compare methods at the same epsilon, delta, epochs, batches and seeds: a sweep without a file.

    Example: `compare --dataset fashion-mnist --epsilons 1,3 --seeds 5`. Shows mean, spread, and the paired difference
    to dp-sgd with a 95 % t interval over seeds. The same command goes on after a stop; more seeds, methods
    or budgets add to what is there. Every run keeps its own folder.
    """
    from sparsedp.methods import get_method
    from sparsedp_experiments.runs.grid import parse_experiment

    base = given(set_, dataset=dataset)
    clash = sorted({"method", "epsilon", "seed"} & set(base))
    if clash:
        raise SparseDPError(f"{clash} are what compare goes through: give --methods, --epsilons and --seeds")
    name = f"compare-{base.get('dataset')}"
    ratio, names = base.pop("active_ratio", None), [one.strip() for one in methods.split(",")]
    sparse = [method for method in names if get_method(method).ranking is not None]
    content: dict[str, Any] = {
        "title": name, "seeds": seeds, "metric": metric, "base": base,
        "grid": {"epsilon": numbers(epsilons, "epsilons"), "method": names},
    }  # fmt: skip
    if ratio is not None and sparse:
        content["override"] = [{"where": {"method": sparse}, "set": {"active_ratio": ratio}}]
    folder = out or Path("runs") / name
    _run(parse_experiment(content, name), folder / "records.jsonl", folder, workers, keep_runs=True)


def _run(experiment: Any, records: Path, work: Path, workers: int | None, *, keep_runs: bool) -> None:
    """Run everything that is not done behind a bar, then print the table of all of it."""
    from sparsedp_experiments.runs.pool import Status, Workplace, run_all
    from sparsedp_experiments.runs.results import Results
    from sparsedp_experiments.runs.tables import read_study, results_table, shortcomings

    runs, screen = experiment.runs(), stderr_console()
    processes = workers or len(os.sched_getaffinity(0))
    place = Workplace(Results(records, experiment.name), work, keep_runs, processes)
    bar = Progress(console=screen, transient=True, disable=not screen.is_terminal)
    task = bar.add_task("", total=len(runs))

    def watch(status: Status) -> None:
        at_work = "; ".join(runs[number].title for number in sorted(status.at_work))
        bar.update(task, completed=status.total - status.left, description=at_work)

    try:
        with bar:
            status = run_all(experiment.name, runs, place, watch)
    except KeyboardInterrupt as interrupt:
        screen.print(
            "Stopped; runs at work have a checkpoint. The same command goes on where this one stopped."
        )
        raise typer.Exit(Exit.INTERRUPTED) from interrupt
    for message in sorted(status.warnings):
        screen.print(f"Warning: {message}", markup=False, soft_wrap=True)
    for number, message in status.failures.items():
        screen.print(f"Failed: {runs[number].title}: {message}", markup=False, soft_wrap=True)
    study = read_study(experiment, records)
    lines = [*results_table(study), "", *shortcomings(study)] if study.rows else []
    lines.append(f"{len(status.records)} of {status.total} runs done, records in {records}")
    stdout_console(False).print("\n".join(lines), markup=False, soft_wrap=True)
    if status.failures:
        raise typer.Exit(FAILED_RUNS)


@app.command()
def demo(out: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/demo")) -> None:
    """Where a support gains nothing and where it gains much: two minutes at most, nothing to download.

    Digits (2 methods), and a table of 5,000 independent features of which 20 matter (2 methods), at epsilon 3 and 1.
    Settings: experiments/configs/demo.toml and demo-wide.toml.
    """
    from sparsedp_experiments.runs.demo import run_demo

    run_demo(out)


@app.command()
def page() -> None:
    """Make experiments/RESULTS.md anew from the records."""
    from sparsedp_experiments.runs.page import PAGE, write_page

    said = write_page()
    if said:
        stderr_console().print(said.strip())
    stdout_console(False).print(f"Written: {PAGE}", soft_wrap=True)


@app.command()
def figures(
    out: Annotated[Path, typer.Argument(help="Folder of the SVG files.")] = Path("runs/figures"),
) -> None:
    """Draw the papers' figures from records; `sweep NAME` measures a study of configs/figures.toml."""
    from sparsedp_experiments.figures.plots import draw_all

    for path in draw_all(out):
        stdout_console(False).print(path, soft_wrap=True)


@app.command()
def diagnose(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    nonprivate: Annotated[
        bool, typer.Option("--nonprivate", help="Say that the results are not private.")
    ] = False,
    data: Annotated[str, typer.Option(help="Rows to look at: test or train.")] = "test",
    rows: Annotated[int, typer.Option(min=2, help="At most so many.")] = 2000,
) -> None:
    """Measure gradients without noise at a run's weights, and the bounds of the papers' theory there. Not private.

    Example: `diagnose runs/mnist-tp-topk-eps3 --nonprivate`. Values go to RUN/nonprivate.json alone. What the
    releases themselves say of a run's support is shown by `sparsedp diagnose RUN`.
    """
    folder = run_folder(run)
    if not nonprivate:
        raise SparseDPError(
            "add --nonprivate: what is measured here is not private; or use `sparsedp diagnose`"
        )
    from sparsedp_experiments.theory.diagnose import BANNER, diagnose_run

    stderr_console().print(BANNER, style="bold red")
    found = diagnose_run(folder, data, rows)
    table = Table("value", "", title="NOT PRIVATE", title_style="bold red")
    for entry in found["values"]:
        table.add_row(entry["name"], f"{entry['value']:.4g}")
    screen = stdout_console(False)
    screen.print(table)
    for remark in found["remarks"]:
        screen.print(f"- {remark}", markup=False)


@data_app.callback(invoke_without_command=True)
def data(context: typer.Context) -> None:
    """List the data sets: where they are looked for, what is missing and how to get it.

    Files are looked for in $SPARSEDP_DATA and then in the per-user cache. `data get mnist` downloads MNIST.
    """
    if context.invoked_subcommand is not None:
        return
    from sparsedp_experiments.data import DATASETS, SOURCES, status
    from sparsedp_experiments.data.files import DATA_VARIABLE, search_roots

    found = {name: status(source) for name, source in SOURCES.items()}
    screen, table = stdout_console(False), Table("--dataset", "what", "status", title="Data sets")
    for name, spec in DATASETS.items():
        there = spec.source is None or not found[spec.source.name].missing
        table.add_row(name, spec.title, "[green]there[/green]" if there else "[red]missing[/red]")
    screen.print(table)
    for name, one in found.items():
        if one.missing:
            missing = ", ".join(one.missing)
            screen.print(f"{name}: {missing} missing. {one.source.remedy}", soft_wrap=True)
    searched = ", ".join(map(str, search_roots(None)))
    screen.print(f"Looked for in {searched}; {DATA_VARIABLE} names a folder.", soft_wrap=True)


@data_app.command("get")
def get(name: Annotated[str, typer.Argument(help="A data set, such as mnist.")]) -> None:
    """Download a data set from its official address into the per-user cache, and check its checksum."""
    from sparsedp_experiments.data import get as download

    for path in download(name):
        stdout_console(False).print(str(path), soft_wrap=True)


def given(others: list[str] | None = None, **flags: Any) -> dict[str, Any]:
    """The settings that were given as flags, and those given with `--set`."""
    from sparsedp_experiments.runs.settings import checked

    chosen = {name: value for name, value in flags.items() if value is not None}
    for item in others or []:
        name, equals, text = item.partition("=")
        if not equals:
            raise SparseDPError(f"--set: got {item!r}, expected KEY=VALUE, such as momentum=0.5")
        try:
            value = tomllib.loads(f"value = {text.strip()}")["value"]
        except tomllib.TOMLDecodeError:
            value = text.strip()
        name = name.strip().replace("-", "_")
        checked(name, value)
        chosen[name] = value
    return chosen
