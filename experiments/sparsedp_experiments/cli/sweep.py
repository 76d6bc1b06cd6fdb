"""`sparsedp sweep`: an experiment from a config file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsedp.cli import Exit, print_json, stderr_console, stdout_console
from sparsedp_experiments.cli import options

if TYPE_CHECKING:
    from sparsedp_experiments.runs.forecast import Forecast

_SMOKE = {"subset": 256, "batch_size": 32}


def sweep(
    config: Annotated[
        str,
        typer.Argument(
            metavar="NAME | FILE.toml",
            help="A committed experiment by its name, or a file that holds one; see docs/experiments.md.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="Append records to this file; by default that of the experiment's family, or results/NAME.jsonl.",
        ),
    ] = None,
    work: Annotated[
        Path | None, typer.Option(help="Folder of unfinished runs; runs/NAME by default.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="How many seeds, instead of the config's.")] = None,
    keep_runs: Annotated[
        bool, typer.Option("--keep-runs", help="Keep every run's folder (checkpoint, ledger).")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Say what is left to do, and how long it will take, by timed steps."),
    ] = False,
    smoke: Annotated[
        bool,
        typer.Option(
            "--smoke",
            help="One epoch on 256 records of each run, to see that all of it works.",
        ),
    ] = False,
    workers: options.Workers = None,
    threads: options.Threads = 1,
    as_json: options.Json = False,
) -> None:
    """Run every cell of an experiment, seed by seed, and keep one line of JSON per run.

    Example: `sparsedp sweep rs-figure2`

    What has a record is skipped, so the same command goes on after a stop or a kill, and a partial sweep is already a
    table: all cells at the first seed come first.
    """
    from dataclasses import replace

    from sparsedp_experiments.cli.running import results_table, rows_of, run_on_screen, summary
    from sparsedp_experiments.runs.config import read_experiment, read_seeds, records_of
    from sparsedp_experiments.runs.forecast import forecast
    from sparsedp_experiments.runs.results import Results
    from sparsedp_experiments.runs.runner import Status, Workplace

    processes = options.processes(workers, threads)
    experiment = read_experiment(config)
    if seeds is not None:
        experiment = replace(experiment, seeds=read_seeds(seeds))
    name = f"{experiment.name}-smoke" if smoke else experiment.name
    runs = experiment.runs()
    if smoke:
        runs = tuple(run.smoke(**_SMOKE) for run in runs if run.seed == experiment.seeds[0])
    results = Results(out or (Path("runs") / f"{name}.jsonl" if smoke else records_of(config)), name)
    place = Workplace(results, work or Path("runs") / name, keep_runs, processes, threads)
    expected: Forecast | None = None
    if dry_run:
        found: dict[int, Any] = {
            number: record for number, run in enumerate(runs) if (record := results.find(run)) is not None
        }
        status = Status(len(runs), records=found)
        with stdout_console(as_json).status(f"Timing a few steps of {status.left} runs"):
            expected = forecast(runs, found)
    else:
        status = run_on_screen(experiment, runs, place, as_json)
    stale = len(results.stale(runs))
    if as_json:
        hours = {"expected_hours": expected.hours(place.workers)} if expected else {}
        print_json(
            {**summary(experiment, status, place), "left": status.left, "other_records": stale, **hours}
        )
    else:
        screen = stdout_console(as_json)
        if status.records:
            screen.print(results_table(experiment, rows_of(experiment, status)))
        screen.print(
            f"{len(status.records)} of {status.total} runs done, records in {results.path}", soft_wrap=True
        )
        if expected is not None and expected.runs:
            screen.print(in_words(expected, place.workers), soft_wrap=True)
        if stale:
            stderr_console().print(
                f"{stale} other records there belong to another config or an older one; left alone."
            )
    if status.failures:
        raise typer.Exit(Exit.FAILED_RUNS)


def in_words(expected: Forecast, workers: int) -> str:
    """A forecast for people."""
    hours = expected.hours(workers)
    told = f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.0f} minutes"
    kinds = "1 kind" if expected.measured == 1 else f"{expected.measured} kinds"
    timed = [f"{kinds} of runs timed by a few steps"] if expected.measured else []
    recorded = [f"{'the others' if timed else 'All'} by their records"] if expected.recorded else []
    return (
        f"{expected.runs} left: about {told} with {min(workers, expected.runs)} at a time on a machine that does "
        f"nothing else. {', '.join(timed + recorded)}."
    )
