"""A callback that keeps what a run's warm-up shows about its coordinates. Post-processing of releases, so free.

The first half of the warm-up ranks, by every score in `RANKINGS`; the second estimates energies (`splits.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from sparsedp.core.errors import DataError
from sparsedp.diagnostics.criteria import SplitEnergies
from sparsedp.diagnostics.splits import (
    FILE,
    STATE,
    WarmupStatistics,
    looked_at,
    read_facts,
    read_statistics,
    steps_looked_at,
    write_facts,
    write_statistics,
)
from sparsedp.diagnostics.summary import write_summary
from sparsedp.methods.autoratio import MINIMUM_WARMUP, AutoRatio
from sparsedp.methods.observation import observe_dense
from sparsedp.methods.rankings import ByScore
from sparsedp.methods.scores import Coherent, Energy
from sparsedp.methods.timeline import noise_on_mean
from sparsedp.privacy.plan import Plan
from sparsedp.runs.history import EpochReport
from sparsedp.runs.reader import Run
from sparsedp.training.reports import StepReport

__all__ = ["FILE", "WarmupRecorder", "WarmupStatistics", "looked_at", "read_statistics", "write_statistics"]

RANKINGS: tuple[ByScore, ...] = (Energy(), Coherent())
logger = logging.getLogger("sparsedp")


@final
class WarmupRecorder:
    """A callback for a run with `out=`: writes the statistics to the run's folder when the warm-up is over.

    A run without a warm-up counts as having one for the first 30 % of its steps, if they are dense.

    **Privacy.** It is given released values only, so its files are as public as the run.
    **Edge cases.** What it has seen is saved every 1 % of the steps and by `save`, and a resumed run goes on from
    there: a step that is replayed counts once, and one that was lost is left out. Without a step of each part nothing
    is written.
    """

    def __init__(self, out: Path | str) -> None:
        self._out = Path(out)
        self._plan: Plan | None = None
        self._states: list[tuple[AutoRatio, Mapping[str, Tensor]]] = []
        self._first = self._planned = self._next = self._seen = self._saved = 0

    def __call__(self, event: StepReport | EpochReport) -> None:
        """Take in a step of the warm-up; at its last, write the file."""
        if not isinstance(event, StepReport):
            return
        if self._plan is None:
            self._plan = Run.open(self._out).plan
            self._begin(self._plan, event.released.support.dimension, event.step)
        step = event.step - self._first
        if not self._next <= step < self._planned or not self._states:
            return
        if not event.released.support.is_full:
            self._give_up()
            return
        seen = observe_dense(event.released)
        self._states = [(auto, auto.update(state, step, seen)) for auto, state in self._states]
        self._next, self._seen = step + 1, self._seen + 1
        if step == self._planned - 1:
            self._finish(self._plan)
        elif step + 1 - self._saved >= max(1, self._plan.total_steps // 100):
            self.save()

    def save(self) -> None:
        """Keep what was seen so far in the run's folder, for a run that is stopped here."""
        if not self._states or not self._seen:
            return
        self._saved = self._next
        tensors = {
            f"{auto.score.name}/{name}": value.contiguous()
            for auto, state in self._states
            for name, value in state.items()
        }
        write_facts(self._out / STATE, tensors, {"next": self._next, "seen": self._seen})

    def _begin(self, plan: Plan, dimension: int, step: int) -> None:
        self._first, self._planned = plan.first_step(looked_at(plan).name), steps_looked_at(plan)
        # A replay may start before the end of a warm-up whose statistics are there already.
        if not plan.is_private or self._planned < MINIMUM_WARMUP or (self._out / FILE).is_file():
            return
        autos = [AutoRatio(score, self._planned) for score in RANKINGS]
        self._states = [(auto, auto.init(dimension)) for auto in autos]
        if (self._out / STATE).is_file():
            self._restore(autos)
        self._saved = step - self._first

    def _restore(self, autos: list[AutoRatio]) -> None:
        try:
            tensors, facts = read_facts(self._out / STATE)
        except DataError as error:
            logger.warning("the warm-up statistics begin anew: %s", error)
            return
        self._next, self._seen = facts["next"], facts["seen"]
        self._states = [
            (auto, {name: tensors[f"{auto.score.name}/{name}"] for name in state})
            for auto, (_, state) in zip(autos, self._states, strict=True)
        ]

    def _finish(self, plan: Plan) -> None:
        if self._states[0][0].is_complete(self._states[0][1]):
            noise = noise_on_mean(plan, looked_at(plan))
            splits = {auto.score.name: _split(auto, state, noise) for auto, state in self._states}
            found = WarmupStatistics(splits, self._seen, self._planned, noise)
            write_summary(self._out, found, plan)
            write_statistics(self._out, found)
        self._give_up()

    def _give_up(self) -> None:
        """There is no more to see."""
        self._states = []
        (self._out / STATE).unlink(missing_ok=True)


def _split(auto: AutoRatio, state: Mapping[str, Tensor], noise_std: float) -> SplitEnergies:
    order = torch.sort(auto.ranking_scores(state), descending=True, stable=True).indices
    even, odd = int(state["even_steps"]), int(state["odd_steps"])
    return SplitEnergies(
        order, state["even_sum"] / even, state["odd_sum"] / odd, noise_std**2 / even, noise_std**2 / odd
    )
