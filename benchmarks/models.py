"""Time one step on the models people bring: `python -m benchmarks.models`.

Transformers, residual and recurrent networks (`benchmarks/model_shapes.py`): plain SGD, Opacus in three modes, ours
dense and on whole rows. Every row is measured in a process of its own; the processes of a model take turns.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence

from benchmarks.contenders import Job
from benchmarks.model_workloads import MODELS, why_not
from benchmarks.report import ModelRows, Row, Verdict, print_json, print_report
from benchmarks.step import Effort, measure, read_arguments

RATIOS = (0.2, 0.02)
DENSE = ("sgd", "opacus-hooks", "opacus-ew", "opacus-ghost", "sparsedp")
LEAST_SPEEDUP, MOST_OVER_SGD, MOST_MEMORY_OVER_SGD = 1.3, 2.0, 1.3
FULL = Effort(turns=7, seconds=1.0, ratios=RATIOS)
QUICK = Effort(turns=2, seconds=0.3, ratios=RATIOS)
QUICK_OF_SLOW = Effort(turns=1, seconds=0.3, ratios=RATIOS)
SLOW = {"gpt2-2-layers", "gpt2-2-layers-dropout", "vit-tiny", "resnet18-gn", "convnext-tiny", "lite0-whole"}
"""Models whose steps take a second and more: in a quick run they have one turn."""


def jobs_of(model: str, rows: int | None = None) -> list[Job]:
    """The dense contenders, then ours on whole rows."""
    dense = [Job(model, contender, rows=rows) for contender in DENSE]
    return dense + [Job(model, "sparsedp", ratio, "clustered", rows) for ratio in RATIOS]


def verdicts(model: str, rows: Sequence[Row]) -> Iterator[Verdict]:
    """Every bar that applies to a model."""
    ran = ModelRows([row for row in rows if "error" not in row])
    sgd, opacus = ran.sgd, ran.fastest_opacus
    for row in ran.ours():
        seconds, kind = row["median_seconds"], f"{row['support']} {row['active_ratio']:g}"
        if opacus:
            value = opacus["median_seconds"] / seconds
            yield Verdict(f"{model}: speed-up over {opacus['contender']}, {kind}", value, LEAST_SPEEDUP, True)
        yield Verdict(f"{model}: step over SGD's, {kind}", seconds / sgd["median_seconds"], MOST_OVER_SGD)
        memory = row["peak_rss_mb"] / sgd["peak_rss_mb"]
        yield Verdict(f"{model}: peak memory over SGD's, {kind}", memory, MOST_MEMORY_OVER_SGD)


def effort_for(model: str, *, quick: bool) -> Effort:
    """How long to measure a model."""
    if not quick:
        return FULL
    return QUICK_OF_SLOW if model in SLOW else QUICK


def main() -> None:
    """Measure, then print the table and the verdicts, or JSON."""
    arguments = read_arguments(__doc__.splitlines()[0], MODELS, "five to ten minutes: fewer steps")
    rows: list[dict[str, object]] = []
    for model in arguments.models:
        if (reason := why_not(model)) is not None:
            print(f"{model}: left out: {reason}", file=sys.stderr, flush=True)
            continue
        effort = effort_for(model, quick=arguments.quick)
        load = f"load average {os.getloadavg()[0]:.1f} before it"
        print(f"{model}: {effort.turns} turns, {load}", file=sys.stderr, flush=True)
        rows += measure(jobs_of(model), effort, arguments.threads)
    if arguments.json:
        print_json(rows, arguments.threads)
    else:
        print_report(rows, verdicts, LEAST_SPEEDUP)


if __name__ == "__main__":
    main()
