"""What a run's warm-up showed, for diagnostics: a ranking by its first half, energies by its second.

Post-processing of releases, so free; `methods/warmup.py` keeps it while the run is trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from sparsedp.diagnostics.criteria import SplitEnergies
from sparsedp.errors import DataError
from sparsedp.methods.timeline import noise_on_mean
from sparsedp.methods.warmup import MINIMUM_WARMUP, MOST_COORDINATES, looked_at, steps_looked_at
from sparsedp.runs.reader import Run


@final
@dataclass(frozen=True, slots=True, eq=False)
class WarmupStatistics:
    """Split energies of one warm-up, for each ranking.

    Attributes:
        splits: by name of the ranking; they differ in the order only.
        steps: how many steps were seen.
        planned: how many there were to see.
        noise_std: nu_1, on each coordinate of a released mean gradient.
    """

    splits: Mapping[str, SplitEnergies] = field(repr=False)
    steps: int
    planned: int
    noise_std: float


def statistics_of(run: Run) -> WarmupStatistics:
    """The statistics a run kept.

    Raises:
        DataError: it kept none, and why; or a file is damaged.
    """
    seen = run.warmup
    if seen is None:
        raise DataError(why_nothing(run))
    noise = noise_on_mean(run.plan, looked_at(run.plan))
    splits = {
        name: SplitEnergies(order, seen.first, seen.second, noise**2 / seen.even, noise**2 / seen.odd)
        for name, order in seen.orders.items()
    }
    return WarmupStatistics(splits, seen.steps, steps_looked_at(run.plan), noise)


def why_nothing(run: Run) -> str:
    """Why a run has no statistics, and what to do."""
    plan, record = run.plan, run.record
    steps, first = steps_looked_at(plan), plan.first_step(looked_at(plan).name)
    nothing = f"{run.path} has no warm-up statistics: "
    if not plan.is_private:
        return f"{nothing}{plan.method} is not private, so its gradients are no releases; train by a private method"
    if any(span.active < record["d"] and span.step < first + steps for span in run.spans):
        return (
            f"{nothing}{plan.method} has no warm-up and does not train every coordinate for its first {steps} steps, "
            "so nothing shows what the others would have held; train by a method with a warm-up, or by dp-sgd"
        )
    if steps < MINIMUM_WARMUP:
        return f"{nothing}{steps} steps are too few to split, {MINIMUM_WARMUP} are the least; train longer"
    if record["d"] > MOST_COORDINATES:
        return (
            f"{nothing}they are kept for at most {MOST_COORDINATES:,} coordinates, and it has {record['d']:,}"
        )
    if run.warming_up:
        return f"{nothing}its warm-up is not over; go on with `sparsedp train --resume {run.path}`, or resume=True"
    return f"{nothing}too many steps were lost; train again"
