"""How long the rest of an experiment will take, before it is begun: from records, and from a few timed steps."""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean, median
from typing import Any, final

from sparsedp._serialization import canonical
from sparsedp.results import Event, StepReport
from sparsedp.training.data import count_units
from sparsedp_experiments.runs.execute import check, execute, load_data
from sparsedp_experiments.runs.grid import GridRun
from sparsedp_experiments.runs.settings import Settings

TIMED_STEPS = 4
"""After one that is not timed: it compiles, allocates and fills caches."""

_FREE = ("seed", "lr", "clip_norm", "epsilon", "delta", "momentum", "weight_decay", "scheduler", "accountant")
"""Settings that change what a step computes, not how long it takes."""


@final
@dataclass(frozen=True, slots=True)
class Forecast:
    """What is left.

    Attributes:
        seconds: of each run, in the order they are run.
        measured: how many kinds of runs were timed just now, as there was no record of any.
        recorded: how many kinds of runs have records to go by.
    """

    seconds: tuple[float, ...]
    measured: int
    recorded: int

    @property
    def runs(self) -> int:
        """How many are left."""
        return len(self.seconds)

    def hours(self, workers: int) -> float:
        """With so many processes at a time, each as fast as one alone, that take the next run when they are free."""
        free_at = [0.0] * workers
        for seconds in self.seconds:
            heapq.heapreplace(free_at, free_at[0] + seconds)
        return max(free_at) / 3600


def forecast(runs: Sequence[GridRun], records: Mapping[int, Mapping[str, Any]]) -> Forecast:
    """What the runs without a record will take: as long as those of their kind that have one, or as timed steps say.

    **Privacy.** The timed steps are seeded, their model is thrown away, and nothing is written.
    """
    known: dict[str, list[float]] = {}
    for number, record in records.items():
        known.setdefault(_kind(runs[number].settings), []).append(float(record["seconds"]))
    expected = {kind: mean(seconds) for kind, seconds in known.items()}
    left = [run.settings for number, run in enumerate(runs) if number not in records]
    kinds = {_kind(settings): settings for settings in reversed(left)}
    new = {kind: timed(settings) for kind, settings in kinds.items() if kind not in expected}
    seconds = tuple((expected | new)[_kind(settings)] for settings in left)
    return Forecast(seconds, measured=len(new), recorded=len(kinds) - len(new))


def timed(settings: Settings) -> float:
    """Seconds that a run of these settings will take, by its first steps and by what comes before them."""
    found, watch = check(settings), _Watch()
    units = _units(found)
    began = time.perf_counter()
    try:
        execute(replace(settings, seed=0), callbacks=(watch,))
    except _EnoughSeenError:
        steps = [after - before for before, after in pairwise(watch.times)]
        planned = (found.epochs or 1) * units / (found.batch_size or units)
        return watch.times[0] - began + planned * median(steps)
    return time.perf_counter() - began


def _kind(settings: Settings) -> str:
    """What runs that take equally long have in common."""
    return canonical({name: value for name, value in settings.to_json().items() if name not in _FREE})


def _units(settings: Settings) -> int:
    train = load_data(settings).train
    return count_units(train, None if settings.unit == "row" else train.units)


class _EnoughSeenError(Exception):
    """Enough steps were timed."""


class _Watch:
    """Notes when steps end, and stops the run after a few."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepReport):
            self.times.append(time.perf_counter())
            if len(self.times) > TIMED_STEPS:
                raise _EnoughSeenError
