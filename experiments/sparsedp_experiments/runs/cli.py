"""The laboratory's commands: `python -m sparsedp_experiments train | sweep | compare | demo | data ...`."""

from __future__ import annotations

import logging
import os
import tomllib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from sparsedp.cli import (
    EXIT_CODES,
    BatchSize,
    Delta,
    Epochs,
    Epsilon,
    Exit,
    Json,
    clip_bounds,
    numbers,
    print_json,
    run_folder,
    stderr_console,
    stdout_console,
)
from sparsedp.cli import run as run_app
from sparsedp.cli.runs import Confidence, Out, Steps, run_audit
from sparsedp.errors import SparseDPError

FIVE_METHODS = "dp-sgd,tp-rand,tp-topk,on-rand,on-topk"
_SMOKE = {"subset": 256, "batch_size": 32}


def listed(text: str) -> list[str]:
    """Read the items of a list with commas."""
    return [item.strip() for item in text.split(",") if item.strip()]


def _clip_norm(text: str) -> float | list[float] | str | None:
    """A clip norm, or a pair of them as settings keep it."""
    found = clip_bounds(text)
    return list(found) if isinstance(found, tuple) else found


_READ: dict[str, Callable[[str], Any]] = {"clip_norm": _clip_norm}
"""Flags whose text is read here; the others come as they are."""

Dataset = Annotated[
    str | None,
    typer.Option("--dataset", "-d", help="A data set; `data` lists them."),
]
Model = Annotated[
    str | None, typer.Option("--model", "-m", help="A model's name; the data set has a default.")
]
Method = Annotated[str | None, typer.Option(help="`sparsedp methods` lists them; auto: by public numbers.")]
ClipNorm = Annotated[str | None, typer.Option(metavar="C|C1,C2", help="Bound on a unit's gradient.")]
ActiveRatio = Annotated[float | None, typer.Option(help="Share of the coordinates trained.")]
Lr = Annotated[float | None, typer.Option(help="Learning rate.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Any other setting of experiments/README.md: momentum=0.5."
    ),
]
Config = Annotated[Path | None, typer.Option(help="A TOML file with settings; flags come on top.")]
Workers = Annotated[int | None, typer.Option(help="Processes; one per core by default.")]
Threads = Annotated[int, typer.Option(help="Of each process; with more than one, last digits change.")]

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
data_app = typer.Typer(help="List data sets, check their files, download them.", rich_markup_mode="rich")
app.add_typer(data_app, name="data")


def main() -> None:
    """The entry point."""
    run_app(app)


@app.callback()
def root(context: typer.Context) -> None:
    """What comes before any command."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ
    if several and context.invoked_subcommand != "train":
        raise SparseDPError(
            f"`{context.invoked_subcommand}` runs in one process, and torchrun has started several; start it without"
        )


@app.command()
def train(
    dataset: Dataset = None,
    model: Model = None,
    method: Method = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    lr: Lr = None,
    clip_norm: ClipNorm = None,
    active_ratio: ActiveRatio = None,
    seed: Annotated[int | None, typer.Option(help="Makes the run reproducible, and not for release.")] = None,
    set_: Set = None,
    config: Config = None,
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
    chosen = given(
        set_, dataset=dataset, model=model, method=method, epsilon=epsilon, delta=delta, epochs=epochs,
        batch_size=batch_size, lr=lr, clip_norm=clip_norm, active_ratio=active_ratio, seed=seed,
    )  # fmt: skip
    if resume is not None:
        if chosen or config is not None or out is not None:
            raise SparseDPError(
                "--resume goes on with a run as it was planned; drop the other settings, or start a new run"
            )
        from sparsedp import distributed
        from sparsedp_experiments.runs.settings import settings_of_run

        distributed.connect()
        if distributed.broadcast_from_main(lambda: _already_finished(resume, as_json)):
            return
        values = distributed.broadcast_from_main(lambda: settings_of_run(resume))
        _train(values, resume, snapshots, as_json, resume=True)
        return
    _train(_values(chosen, config), out, snapshots, as_json, resume=False)


def _train(values: dict[str, Any], out: Path | None, snapshots: bool, as_json: bool, *, resume: bool) -> None:
    from sparsedp import distributed
    from sparsedp.callbacks import EpochLines
    from sparsedp.results import CallbackLike
    from sparsedp.runs.directory import check_new, holds_run, resumes
    from sparsedp_experiments.runs.demo import free_folder
    from sparsedp_experiments.runs.execute import check, execute
    from sparsedp_experiments.runs.screen import Announcement, show_run
    from sparsedp_experiments.runs.settings import Settings
    from sparsedp_experiments.theory.trajectory import watching

    settings = check(Settings.from_json(values))
    distributed.connect()
    main = distributed.is_main_process()
    if out is None and distributed.restarts():
        raise SparseDPError("the launcher has started this run again, and it has no name; give --out")
    if not main:
        logging.getLogger("sparsedp").setLevel(logging.WARNING)
    name = f"{Path(settings.dataset).stem}-{settings.method}-eps{settings.epsilon:g}"
    folder = distributed.broadcast_from_main(lambda: out or free_folder(Path("runs"), name))
    resume = resumes(folder, resume)
    distributed.broadcast_from_main(lambda: None if resume else check_new(folder))
    screen = stderr_console() if main else Console(quiet=True)
    watched = screen.is_terminal and not as_json and main
    callbacks: list[CallbackLike] = []
    if not as_json and main:
        what = "Going on with" if resume else "Training"
        told = f"{what} {settings.model} on {settings.dataset} by {settings.method}, in {folder}"
        callbacks.append(Announcement(screen, told))
        callbacks += [] if watched else [EpochLines(screen, settings.epochs)]
    look = watching(folder, snapshots) if main else lambda _: ()
    try:
        result = execute(
            settings, out=folder, resume=resume, callbacks=callbacks, watch=look, progress=watched
        )
    except KeyboardInterrupt as interrupt:
        if main and not holds_run(folder):
            stderr_console().print("Stopped before the first step; nothing was spent.")
        elif main:
            if as_json:
                print_json(_record(folder))
            stderr_console().print(
                f"Stopped with a checkpoint. Go on with: train --resume {folder}", soft_wrap=True
            )
        raise typer.Exit(Exit.INTERRUPTED) from interrupt
    if not main:
        return
    if as_json:
        print_json(_record(folder))
    else:
        show_run(result, folder, stdout_console(as_json))


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
        said = f"{run} is finished: every planned step is taken. More training is a new run, with its own budget."
        stderr_console().print(said, soft_wrap=True)
    return True


def _record(folder: Path) -> dict[str, Any]:
    from sparsedp.runs.run import Run

    return {"run": str(folder), **Run.open(folder).record}


@app.command()
def sweep(
    config: Annotated[
        str,
        typer.Argument(metavar="NAME | FILE.toml", help="A committed experiment's name, or a file with one."),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Append here instead of the family's file.")
    ] = None,
    work: Annotated[
        Path | None, typer.Option(help="Folder of unfinished runs; runs/NAME by default.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="How many seeds, instead of the config's.")] = None,
    keep_runs: Annotated[bool, typer.Option("--keep-runs", help="Keep every run's folder.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what is done and what is left, and run nothing.")
    ] = False,
    smoke: Annotated[bool, typer.Option("--smoke", help="One epoch on 256 records of each run.")] = False,
    workers: Workers = None,
    threads: Threads = 1,
    as_json: Json = False,
) -> None:
    """Run every cell of an experiment, seed by seed, and keep one line of JSON per run.

    Example: `sweep rs-figure2`. What has a record is skipped, so the same command goes on after a stop or a kill, and
    a partial sweep is already a table: all cells at the first seed come first.
    """
    from sparsedp_experiments.runs.grid import read_experiment, read_seeds, records_of
    from sparsedp_experiments.runs.pool import Status, Workplace
    from sparsedp_experiments.runs.results import Results
    from sparsedp_experiments.runs.screen import results_table, rows_of, run_on_screen, summary

    processes = _processes(workers, threads)
    other = other_experiment(config)
    if other is not None:
        other()
        return
    experiment = read_experiment(config)
    if seeds is not None:
        experiment = replace(experiment, seeds=read_seeds(seeds))
    name = f"{experiment.name}-smoke" if smoke else experiment.name
    runs = experiment.runs()
    if smoke:
        runs = tuple(run.smoke(**_SMOKE) for run in runs if run.seed == experiment.seeds[0])
    results = Results(out or (Path("runs") / f"{name}.jsonl" if smoke else records_of(config)), name)
    place = Workplace(results, work or Path("runs") / name, keep_runs, processes, threads)
    if dry_run:
        found: dict[int, Any] = {
            n: record for n, run in enumerate(runs) if (record := results.find(run)) is not None
        }
        status = Status(len(runs), records=found)
    else:
        status = run_on_screen(experiment, runs, place, as_json)
    stale = len(results.stale(runs))
    if as_json:
        print_json({**summary(experiment, status, place), "left": status.left, "other_records": stale})
    else:
        screen = stdout_console(as_json)
        if status.records:
            screen.print(results_table(experiment, rows_of(experiment, status)))
        screen.print(
            f"{len(status.records)} of {status.total} runs done, records in {results.path}", soft_wrap=True
        )
        if stale:
            stderr_console().print(
                f"{stale} other records there belong to another config or an older one; left alone."
            )
    if status.failures:
        raise typer.Exit(Exit.FAILED_RUNS)


def other_experiment(name: str) -> Callable[[], None] | None:
    """What makes the records of an experiment that is no grid, by name; None for all others."""
    if name == "rs-table3":
        from sparsedp_experiments.runs.partition import train_missing

        return train_missing
    if name == "adadpigu-table3":
        from sparsedp_experiments.runs.partition import noise_table

        return lambda: print("\n".join(noise_table()))
    if name == "audit":
        from sparsedp_experiments.attacks.audits import audit_missing

        return audit_missing
    if name == "table-rates":
        from sparsedp_experiments.tabular_rates import simulate_missing

        return simulate_missing
    from sparsedp_experiments.figures.study import load_studies, measure_missing

    study = next((study for study in load_studies() if study.name == name), None)
    if study is None:
        return None
    return lambda: measure_missing([study])


@app.command()
def compare(
    dataset: Dataset = None,
    model: Model = None,
    methods: Annotated[str, typer.Option(metavar="M1,M2,...", help="Methods to compare.")] = FIVE_METHODS,
    epsilons: Annotated[str, typer.Option(metavar="E1,E2,...", help="Budgets.")] = "3",
    seeds: Annotated[int, typer.Option(help="How many seeds each, from 0 on.")] = 3,
    delta: Delta = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    lr: Lr = None,
    clip_norm: ClipNorm = None,
    active_ratio: ActiveRatio = None,
    set_: Set = None,
    config: Config = None,
    metric: Annotated[str, typer.Option(help="What to compare: accuracy, auc, loss, ...")] = "accuracy",
    out: Annotated[
        Path | None, typer.Option(help="Folder of the runs; runs/compare-DATASET by default.")
    ] = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Compare methods at the same epsilon, delta, epochs, batches and seeds.

    Example: `compare --dataset fashion-mnist --epsilons 1,3 --seeds 5`. Shows mean, spread, and the paired difference
    to dp-sgd with a 95 % t interval over seeds. The same command goes on after a stop; more seeds, methods
    or budgets add to what is there. Every run keeps its own folder.
    """
    flags = given(
        set_, dataset=dataset, model=model, delta=delta, epochs=epochs, batch_size=batch_size, lr=lr,
        clip_norm=clip_norm, active_ratio=active_ratio,
    )  # fmt: skip
    base = {**from_file(config), **flags}
    clash = sorted({"method", "epsilon", "seed"} & set(base))
    if clash:
        raise SparseDPError(f"{clash} are what compare goes through: give --methods, --epsilons and --seeds")
    if "dataset" not in base:
        raise SparseDPError("give --dataset (`data` lists them), or --config FILE with one")
    from sparsedp_experiments.runs.grid import comparison
    from sparsedp_experiments.runs.pool import Workplace
    from sparsedp_experiments.runs.results import UNRESOLVED, Results, verdict
    from sparsedp_experiments.runs.screen import results_table, rows_of, run_on_screen, summary

    name = f"compare-{Path(str(base['dataset'])).stem}"
    experiment = comparison(name, base, listed(methods), numbers(epsilons, "epsilons"), seeds, metric)
    folder, runs, processes = out or Path("runs") / name, experiment.runs(), _processes(workers)
    place = Workplace(Results(folder / "records.jsonl", name), folder, keep_runs=True, workers=processes)
    status = run_on_screen(experiment, runs, place, as_json)
    if as_json:
        print_json({**summary(experiment, status, place), "out": str(folder)})
    else:
        screen, rows = stdout_console(False), rows_of(experiment, status)
        said = {
            ", ".join(row.cell.values()): verdict(row.difference, metric) for row in rows if row.difference
        }
        resolved = "; ".join(f"{cell} is {found}" for cell, found in said.items() if found != UNRESOLVED)
        screen.print(results_table(experiment, rows))
        screen.print(
            f"Against {experiment.contrast.baseline}, at 95 %, one cell at a time: "
            f"{resolved or 'no difference is resolved'}.\nMean ± standard deviation at the final epoch on held-out "
            "data, which is outside the guarantee; paired difference with its 95 % interval; epsilon spent. Seeded "
            "runs are not for release."
        )
        screen.print(f"Runs: {folder}", soft_wrap=True)
    if status.failures:
        raise typer.Exit(Exit.FAILED_RUNS)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/demo"),
    as_json: Json = False,
) -> None:
    """Where a support gains nothing and where it gains much: two minutes at most, nothing to download.

    Digits (2 methods), and a table of 5,000 independent features of which 20 matter (2 methods), at epsilon 3 and 1.
    Settings: experiments/configs/demo.toml.
    """
    from sparsedp_experiments.runs.demo import run_demo

    run_demo(out, as_json)


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
def audit(
    run: Annotated[Path | None, typer.Argument(metavar="[RUN]", help="The folder of a run.")] = None,
    dataset: Dataset = None,
    model: Model = None,
    method: Method = None,
    epsilon: Epsilon = None,
    set_: Set = None,
    config: Config = None,
    confidence: Confidence = 0.95,
    steps: Steps = 200,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Attack what settings would train (`audit --dataset digits`), or the run that they started (`audit RUN`).

    Shows lower bounds on epsilon beside the epsilon that is claimed, as `sparsedp audit`.
    """
    chosen = given(set_, dataset=dataset, model=model, method=method, epsilon=epsilon)
    if run is not None and (chosen or config is not None):
        raise SparseDPError(
            "audit: got a run and settings; a run is audited as it was planned, so drop one or the other"
        )
    from sparsedp_experiments.runs.settings import settings_of_run

    values = _values(chosen, config) if run is None else settings_of_run(run_folder(run))

    def attack() -> Any:
        from sparsedp_experiments.attacks.audits import audit_settings
        from sparsedp_experiments.runs.settings import Settings

        found = Settings.from_json(values)
        return audit_settings(found, run=run, confidence=confidence, steps=steps, progress=not as_json)

    run_audit(attack, run, out, as_json)


@app.command()
def diagnose(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    nonprivate: Annotated[
        bool,
        typer.Option(
            "--nonprivate", help="Also measure gradients without noise. The results are not private."
        ),
    ] = False,
    data: Annotated[
        str | None, typer.Option(help="With --nonprivate: rows to look at, test or train.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(help="With --nonprivate: at most so many; 2000 by default.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what a run's releases say of its support, and with --nonprivate what the papers' theory says.

    Example: `diagnose runs/mnist-tp-topk-eps3 --nonprivate`. Measured values go to RUN/nonprivate.json alone.
    """
    folder = run_folder(run)
    if not nonprivate and (data is not None or rows is not None):
        raise SparseDPError(
            "--data and --rows say what --nonprivate looks at; add --nonprivate, or drop them"
        )
    if data not in (None, "test", "train"):
        raise SparseDPError(f"--data: got {data!r}, expected test or train")
    from sparsedp.cli.runs import show_support as show
    from sparsedp.diagnostics import inspect_run
    from sparsedp_experiments.theory.diagnose import BANNER, diagnose_run, theory_of
    from sparsedp_experiments.theory.trajectory import support_changes

    seen, theory = inspect_run(folder), theory_of(folder)
    seen = replace(seen, overlaps=(*seen.overlaps, *support_changes(folder)))
    found: dict[str, Any] = {"run": str(run), "visible": {**seen.to_json(), **theory.to_json()}}
    screen = stdout_console(as_json)
    if not as_json:
        show(seen, screen)
    for line in theory.lines():
        screen.print(line, soft_wrap=True)
    if nonprivate:
        stderr_console().print(BANNER, style="bold red")
        values = diagnose_run(
            folder, data or "test", 2000 if rows is None else rows, partial(stderr_console().print)
        )
        found["nonprivate"] = values
        table = Table("value", "", title="NOT PRIVATE", title_style="bold red")
        for entry in values["values"]:
            table.add_row(entry["name"], f"{entry['value']:.4g}")
        screen.print(table)
        for remark in values["remarks"]:
            screen.print(f"- {remark}", markup=False)
    if as_json:
        print_json(found)


@data_app.callback(invoke_without_command=True)
def data(
    context: typer.Context,
    check: Annotated[
        bool, typer.Option("--check", help="Compare every file with the public original.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the data sets: where they are looked for, what is missing and how to get it.

    Files are looked for in $SPARSEDP_DATA and then in the per-user cache. `data get mnist` downloads MNIST. With
    --check, files are compared with checksums of the public originals; a file that differs gives exit code 3.
    """
    if context.invoked_subcommand is not None:
        return
    from sparsedp_experiments.data import DATASETS, SOURCES, status
    from sparsedp_experiments.data.files import DATA_VARIABLE, search_roots
    from sparsedp_experiments.data.registry import DIFFERENT

    found = {name: status(spec) for name, spec in SOURCES.items()}
    sums = {name: one.checksums() if check else [None] * len(one.files) for name, one in found.items()}
    sources: list[dict[str, Any]] = [
        {
            "name": name, "title": one.source.title, "records": one.source.records, "task": one.source.task,
            "complete": not one.missing, "form": None if one.missing else one.form, "missing": list(one.missing),
            "files": [
                {"path": str(path), "checksum": known}
                for (_, path), known in zip(one.files, sums[name], strict=True)
            ],
            "remedy": one.source.remedy if one.missing else None,
        }
        for name, one in found.items()
    ]  # fmt: skip
    if as_json:
        rows = [
            {"name": k, "title": v.title, "source": v.source and v.source.name} for k, v in DATASETS.items()
        ]
        print_json(
            {"searched": [str(path) for path in search_roots(None)], "sources": sources, "datasets": rows}
        )
    else:
        screen, table = stdout_console(False), Table("--dataset", "what", "status", title="Data sets")
        for name, spec in DATASETS.items():
            there = spec.source is None or not found[spec.source.name].missing
            table.add_row(name, spec.title, "[green]there[/green]" if there else "[red]missing[/red]")
        screen.print(table)
        for one in sources:
            for file in one["files"]:
                screen.print(f"{file['path']}" + (f"  {file['checksum']}" if check else ""), soft_wrap=True)
            if one["missing"]:
                missing = ", ".join(one["missing"])
                screen.print(f"{one['name']}: {missing} missing. {one['remedy']}", soft_wrap=True)
        screen.print(
            f"Looked for in {', '.join(map(str, search_roots(None)))}; {DATA_VARIABLE} names a folder."
        )
    if any(known == DIFFERENT for one in sums.values() for known in one):
        raise typer.Exit(Exit.DATA)


@data_app.command("get")
def get(
    name: Annotated[str, typer.Argument(help="A data set, such as mnist.")], as_json: Json = False
) -> None:
    """Download a data set from its official address into the per-user cache, and check its checksum."""
    from sparsedp_experiments.data import get as download

    shown: dict[str, int] = {}

    def tell(file: str, done: int, total: int | None) -> None:
        percent = 100 * done // total if total else 0
        if not as_json and shown.get(file, -10) + 10 <= percent:
            shown[file] = percent
            stderr_console().print(f"{file}: {percent} %" if total else f"{file}: {done:,} bytes")

    paths = download(name, progress=tell)
    if as_json:
        print_json({"name": name, "files": [str(path) for path in paths]})
    for path in paths:
        stdout_console(as_json).print(str(path), soft_wrap=True)


def given(others: list[str] | None = None, **flags: Any) -> dict[str, Any]:
    """The settings that were given as flags, and those given with `--set`."""
    from sparsedp_experiments.runs.settings import checked

    known = {name: value for name, value in flags.items() if value is not None}
    chosen = {name: _READ[name](value) if name in _READ else value for name, value in known.items()}
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


def from_file(path: Path | None) -> dict[str, Any]:
    """The settings in a file: its `[base]` table, or the file itself where there is none."""
    from sparsedp_experiments.runs.grid import naming, read_toml
    from sparsedp_experiments.runs.settings import checked

    if path is None:
        return {}
    content = read_toml(path)
    base = content.get("base", content)
    if not isinstance(base, dict):
        raise SparseDPError(f"{path}: base is {base!r}, expected a table of settings")
    with naming(path):
        for name, value in base.items():
            checked(name, value)
    return base


def _values(chosen: dict[str, Any], config: Path | None) -> dict[str, Any]:
    from sparsedp.methods.auto import AUTO_METHOD

    values = {"method": AUTO_METHOD, **from_file(config), **chosen}
    if "dataset" not in values:
        raise SparseDPError("give --dataset (`data` lists them), --config FILE, or the folder of a run")
    return values


def _processes(wanted: int | None, threads: int = 1) -> int:
    """How many workers: as told, or as many as give every core this process may use a thread."""
    for name, value in (("workers", wanted), ("threads", threads)):
        if value is not None and value < 1:
            raise SparseDPError(f"{name}: got {value}, expected at least 1")
    return wanted or max(1, len(os.sched_getaffinity(0)) // threads)
