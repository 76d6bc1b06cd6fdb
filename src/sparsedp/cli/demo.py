"""`sparsedp demo`: the five methods on scikit-learn's digits."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from sparsedp.cli import options
from sparsedp.cli.output import people
from sparsedp.runs.folder import holds_run


def demo(
    out: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/demo"),
    seeds: Annotated[int | None, typer.Option(help="How many seeds each, instead of the config's.")] = None,
    workers: options.Workers = None,
    as_json: options.Json = False,
) -> None:
    """Compare five methods on scikit-learn's digits at epsilon 3 and 8: two minutes at most, nothing to download.

    Ends with a table, a report in HTML, and what to try next. Settings: configs/demo.toml. Give the command again to
    see the same runs again, or --out elsewhere for new ones.
    """
    from dataclasses import replace

    from sparsedp.cli.compare import carry_out
    from sparsedp.experiments.config import read_experiment, read_seeds

    experiment = read_experiment(Path(str(files("sparsedp.cli") / "demo.toml")))
    if seeds is not None:
        experiment = replace(experiment, seeds=read_seeds(seeds))
    carry_out(experiment, out, options.processes(workers), as_json)
    screen = people(as_json)
    first = next((path for path in sorted(out.iterdir()) if holds_run(path)), out)
    screen.print(
        "A model of 4,810 coordinates has little to leave out: the default, method auto, trains all of it here: "
        "dp-sgd above. Where a support pays: docs/results.md.\n"
    )
    screen.print("[bold]What to try next[/bold]")
    for line in (
        f"sparsedp verify {first}",
        "sparsedp plan --records 1437 --batch-size 128 --epochs 30 --epsilon 1 --parameters 4810",
        "sparsedp train --dataset digits --method tp-coherent --epsilon 3",
        "sparsedp train --dataset mnist --method tp-topk --epsilon 3     (`sparsedp data get mnist` first)",
    ):
        screen.print(f"  {line}", soft_wrap=True, markup=False)
