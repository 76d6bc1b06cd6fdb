"""The whole plan in one go, with many canaries in it, each in the data by a fair coin."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np

from sparsedp.auditing.canaries import CanaryEngine, Directions, Indices, noisy_sum, one_batch, release
from sparsedp.auditing.coins import Coins, fair_coins
from sparsedp.auditing.draws import Draws
from sparsedp.auditing.estimators import Scores, Vector
from sparsedp.auditing.explicit_targets import RowCount, preliminary_target
from sparsedp.auditing.subject import Setting, Subject
from sparsedp.auditing.target import MOST_CANARIES, GradientTarget, Target
from sparsedp.methods.stages import SELECT
from sparsedp.parameters import Layout
from sparsedp.privacy.ledger import Ledger
from sparsedp.privacy.plan import Phase
from sparsedp.randomness import SystemRandomness


@final
@dataclass(frozen=True, slots=True)
class WholePlan:
    """One run of the plan with canaries, in a batch by the sampler's coins.

    Attributes:
        scores: the evidence for each canary.
        targets: by name, the releases that were made; of those made in every step, the last.
        settings: the last step of each phase that trains.
        steps: how many were taken.
        draws: by phase, whom the sampler drew.
    """

    scores: Scores
    targets: dict[str, Target]
    settings: dict[str, Setting]
    steps: int
    draws: dict[str, Draws]


def run_plan(subject: Subject, layout: Layout, most_steps: int, tick: Callable[[int], None]) -> WholePlan:
    """Make releases of the plan with canaries alone, and score each by the likelihood of all that it was in.

    A support with fewer coordinates than canaries has directions for some of them only; scored are those that had one
    in every step. Counts and statistics, which have few numbers, add to the evidence of those that have one there.
    """
    plan = subject.plan
    steps = subject.some_steps(most_steps)
    many = min(MOST_CANARIES, layout.dimension, plan.units)
    running = _Run(subject, layout, fair_coins(many))
    for step in steps:
        phase = plan.phase_at(step)
        if phase.trains:
            running.train(phase, step)
        else:
            running.release_beforehand(phase, step)
        tick(1)
    evidence, truth = running.evidence[: running.seen], running.truth[: running.seen]
    scores = Scores(evidence[truth], evidence[~truth])
    return WholePlan(scores, running.targets, running.settings, len(steps), running.draws)


@final
class _Run:
    """The plan at work, and what an attacker who sees its releases knows by now."""

    def __init__(self, subject: Subject, layout: Layout, truth: Coins) -> None:
        plan = subject.plan
        self._plan, self._layout = plan, layout
        self._controller = subject.controller(layout)
        self._channels = subject.channels
        self.truth, self.evidence, self.seen = truth, np.zeros(len(truth)), len(truth)
        self.draws = {phase.name: Draws(phase, plan.units) for phase in plan.phases}
        self.targets: dict[str, Target] = {}
        self.settings: dict[str, Setting] = {}

    def release_beforehand(self, phase: Phase, step: int) -> None:
        """A step of a phase that does not train."""
        target = preliminary_target(self._plan, phase, step, self._controller.tables, self._channels)
        directions, present = self._canaries(target), self._members(phase, step)
        released = target.release(directions, present)
        self._learn(target, directions.scores(target.noisy_sum(released)))
        if phase.name == SELECT.name:
            self._controller.observe_selection(released)

    def train(self, phase: Phase, step: int) -> None:
        """A step: the count of its rows, if it makes one, then its gradient."""
        present = self._members(phase, step)
        ledger = self._count(phase, step, present)
        asked = self._controller.setting(step)
        setting = Setting(phase, step, asked.support, asked.geometry, asked.per_sample_top)
        target = GradientTarget(self._plan, setting, self._layout)
        directions = self._canaries(target)
        engine = CanaryEngine(self._layout, directions)
        released = release(self._plan, setting, engine, one_batch(present), SystemRandomness(), ledger)
        scores = directions.scores(noisy_sum(self._plan, setting, released))
        self.seen = min(self.seen, len(scores))
        self._learn(target, scores)
        self.settings[phase.name] = setting
        self._controller.observe(released)

    def _count(self, phase: Phase, step: int, present: Coins) -> Ledger | None:
        """Gives the ledger that the gradient of the same step is charged to; None for a step that counts nothing."""
        tables = self._controller.tables
        if not phase.count_share or tables is None or not tables.total:
            return None
        target = RowCount(self._plan, phase, step, tables)
        directions = self._canaries(target)
        released, paid = target.paid(directions, present)
        self._learn(target, directions.scores(target.noisy_sum(released)))
        self._controller.observe_counts(released)
        return paid

    def _canaries(self, target: Target) -> Directions:
        return target.directions(len(self.truth), single=False)

    def _members(self, phase: Phase, step: int) -> Coins:
        """The canaries among the units drawn whose coin put them into the data."""
        drawn: Indices = self.draws[phase.name].draw(step)
        present = np.zeros(len(self.truth), dtype=bool)
        present[drawn[drawn < len(present)]] = True
        return present & self.truth

    def _learn(self, target: Target, scores: Vector) -> None:
        self.evidence[: len(scores)] += _evidence(scores, target.phase.sampling_rate, target.noise)
        self.targets[target.name] = target


def _evidence(scores: Vector, rate: float, noise: float) -> Vector:
    """Log likelihood ratio of a score: sampled at the rate and moved by one clip norm, or not there at all."""
    moved = math.log(rate) + (2 * scores - 1) / (2 * noise**2)
    return np.logaddexp(math.log1p(-rate), moved) if rate < 1 else moved
