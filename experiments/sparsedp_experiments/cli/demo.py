"""`sparsedp demo`: the five methods on scikit-learn's digits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparsedp.cli import stdout_console
from sparsedp.runs.directory import holds_run
from sparsedp_experiments.cli import options


def demo(
    out: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/demo"),
    seeds: Annotated[int | None, typer.Option(help="How many seeds each, instead of the config's.")] = None,
    workers: options.Workers = None,
    as_json: options.Json = False,
) -> None:
    """Compare five methods on scikit-learn's digits at epsilon 3 and 8: two minutes at most, nothing to download.

    Ends with a table, a report in HTML, and what to try next. Settings: experiments/configs/demo.toml. Run it
    again to see the same runs, or --out elsewhere for new ones.
    """
    from dataclasses import replace

    from sparsedp_experiments.cli.compare import carry_out
    from sparsedp_experiments.runs.config import read_experiment, read_seeds

    experiment = read_experiment("demo")
    if seeds is not None:
        experiment = replace(experiment, seeds=read_seeds(seeds))
    carry_out(experiment, out, options.processes(workers), as_json)
    screen = stdout_console(as_json)
    runs = [path for path in sorted(out.iterdir()) if holds_run(path)]
    first = runs[0] if runs else out
    screen.print(
        "The default, method auto, goes by r, the noise of a dense step over the clip norm: "
        f"{_chosen(runs)}. Where a support pays: docs/fine-tuning.md and docs/results.md.\n",
        soft_wrap=True,
    )
    screen.print("[bold]What to try next[/bold]")
    for line in (
        f"sparsedp verify {first}",
        "sparsedp plan --units 1437 --batch-size 512 --epochs 30 --epsilon 1 --parameters 19210",
        "sparsedp train --dataset digits --method tp-coherent --epsilon 3",
        "sparsedp train --dataset mnist --method tp-topk --epsilon 3     (`sparsedp data get mnist` first)",
    ):
        screen.print(f"  {line}", soft_wrap=True, markup=False)


def _chosen(runs: list[Path]) -> str:
    """What method auto takes at each epsilon, from the plans of the dense runs: public numbers alone."""
    from sparsedp.methods.auto import method_beside, noise_ratio
    from sparsedp.runs.run import Run

    found: dict[float, str] = {}
    for run in map(Run.open, runs):
        if run.plan.method != "dp-sgd" or run.plan.target_epsilon is None:
            continue
        ratio = noise_ratio(run.plan, run.record["d"])
        method = method_beside(run.plan, run.record["d"])
        share = "" if method.active_ratio == 1.0 else f" at ratio {method.active_ratio:g}"
        found[run.plan.target_epsilon] = (
            f"{method.name}{share} at epsilon {run.plan.target_epsilon:g}, r {ratio:.2f}"
        )
    return "; ".join(found[epsilon] for epsilon in sorted(found))
