"""`sparsedp compare`: methods, budgets and seeds at matched privacy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsedp.cli import Exit, print_json, stdout_console
from sparsedp.errors import SparseDPError
from sparsedp_experiments.cli import options

if TYPE_CHECKING:
    from sparsedp_experiments.runs.config import Experiment
    from sparsedp_experiments.runs.runner import Status, Workplace

FIVE_METHODS = "dp-sgd,tp-rand,tp-topk,on-rand,on-topk"


def compare(
    dataset: options.Dataset = None,
    model: options.Model = None,
    methods: Annotated[str, typer.Option(metavar="M1,M2,...", help="Methods to compare.")] = FIVE_METHODS,
    epsilons: Annotated[str, typer.Option(metavar="E1,E2,...", help="Budgets.")] = "3",
    seeds: Annotated[int, typer.Option(help="How many seeds each, from 0 on.")] = 3,
    delta: options.Delta = None,
    epochs: options.Epochs = None,
    batch_size: options.BatchSize = None,
    lr: options.Lr = None,
    clip_norm: options.ClipNorm = None,
    active_ratio: options.ActiveRatio = None,
    classes: options.Classes = None,
    set_: options.Set = None,
    config: options.Config = None,
    metric: Annotated[
        str, typer.Option(help="What to compare: accuracy, auc, balanced_accuracy, ...")
    ] = "accuracy",
    out: Annotated[
        Path | None, typer.Option(help="Folder of the runs; runs/compare-DATASET by default.")
    ] = None,
    workers: options.Workers = None,
    as_json: options.Json = False,
) -> None:
    """Compare methods at the same epsilon, delta, epochs, batches and seeds.

    Example: `sparsedp compare --dataset fashion-mnist --epsilons 1,3 --seeds 5`

    Shows mean, spread, and the paired difference to dp-sgd with a 95 % t interval over seeds. Give the same command
    again to go on after a stop; more seeds, methods or budgets add to what is there. Every run keeps its own folder.
    Give an active ratio with --active-ratio; dp-sgd ignores it.
    """
    base = {
        **options.from_file(config),
        **options.given(
            set_,
            dataset=dataset,
            model=model,
            delta=delta,
            epochs=epochs,
            batch_size=batch_size,
            lr=lr,
            clip_norm=clip_norm,
            active_ratio=active_ratio,
            classes=classes,
        ),
    }
    clash = sorted({"method", "epsilon", "seed"} & set(base))
    if clash:
        raise SparseDPError(f"{clash} are what compare goes through: give --methods, --epsilons and --seeds")
    if "dataset" not in base:
        raise SparseDPError("give --dataset (`sparsedp data` lists them), or --config FILE with one")
    from sparsedp_experiments.runs.comparison import comparison

    name = f"compare-{Path(str(base['dataset'])).stem}"
    experiment = comparison(
        name, base, options.listed(methods), options.numbers(epsilons, "epsilons"), seeds, metric
    )
    carry_out(experiment, out or Path("runs") / name, options.processes(workers), as_json)


def carry_out(experiment: Experiment, out: Path, workers: int, as_json: bool) -> None:
    """Run a comparison in a folder, show its table, write its report."""
    from sparsedp_experiments.cli.running import run_on_screen, summary
    from sparsedp_experiments.comparison.page import write_comparison
    from sparsedp_experiments.runs.comparison import claim
    from sparsedp_experiments.runs.results import Results
    from sparsedp_experiments.runs.runner import Workplace

    runs = experiment.runs()
    claim(out, experiment)
    place = Workplace(Results(out / "records.jsonl", experiment.name), out, keep_runs=True, workers=workers)
    status = run_on_screen(experiment, runs, place, as_json)
    report = write_comparison(out) if status.records else None
    if as_json:
        print_json(
            {
                **summary(experiment, status, place),
                "out": str(out),
                "report": None if report is None else str(report),
            }
        )
    else:
        _show(experiment, status, place, report)
    if status.failures:
        raise typer.Exit(Exit.FAILED_RUNS)


def _show(experiment: Experiment, status: Status, place: Workplace, report: Any) -> None:
    from sparsedp_experiments.cli.running import resolved, results_table, rows_of

    screen, rows = stdout_console(False), rows_of(experiment, status)
    screen.print(results_table(experiment, rows))
    screen.print(resolved(rows, experiment.contrast.baseline))
    screen.print(
        "Mean ± standard deviation at the final epoch on held-out data, which is outside the guarantee; paired "
        "difference with its 95 % interval; epsilon spent. Seeded runs are not for release."
    )
    screen.print(f"Runs: {place.runs}", soft_wrap=True)
    if report is not None:
        screen.print(f"Report: {report}", soft_wrap=True)
