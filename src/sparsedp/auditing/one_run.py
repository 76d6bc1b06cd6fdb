"""The whole plan in one go, with many canaries in it, each in the data by a fair coin."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import final

import numpy as np

from sparsedp.auditing.canaries import (
    MAX_CANARIES,
    AuditedRelease,
    AuditTarget,
    Coins,
    Directions,
    Indices,
    StepQuery,
    fair_coins,
    gradient_release,
    preliminary_release,
    row_count_release,
)
from sparsedp.auditing.estimators import Scores, Vector
from sparsedp.auditing.sampling import SamplerTest
from sparsedp.methods.method import SELECT
from sparsedp.parameters import ParameterLayout
from sparsedp.privacy.accounting import ACCOUNTANTS, ROUNDING, Accountant, accountant
from sparsedp.privacy.charge import Chargeable
from sparsedp.privacy.plan import Phase, Plan, SampledGaussian


@final
@dataclass(frozen=True, slots=True)
class OneRunAudit:
    """One run of the plan with canaries: the evidence for each, and whom the sampler drew, by phase.

    `targets` are the releases that were made, by name; of those made in every step, the last, as in `settings`.
    """

    scores: Scores
    targets: dict[str, AuditedRelease]
    settings: dict[str, StepQuery]
    steps: int
    draws: dict[str, SamplerTest]


def audit_one_run(
    subject: AuditTarget, layout: ParameterLayout, most_steps: int, tick: Callable[[int], None]
) -> OneRunAudit:
    """Make releases of the plan with canaries alone, and score each by the likelihood of all that it was in.

    A support with fewer coordinates than canaries has directions for some of them only; scored are those that had one
    in every step. Counts and statistics, which have few numbers, add to the evidence of those that have one there.
    """
    plan = subject.plan
    steps = subject.some_steps(most_steps)
    many = min(MAX_CANARIES, layout.dimension, plan.units)
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
    return OneRunAudit(scores, running.targets, running.settings, len(steps), running.draws)


@final
class _Run:
    """The plan at work, and what an attacker who sees its releases knows by now."""

    def __init__(self, subject: AuditTarget, layout: ParameterLayout, truth: Coins) -> None:
        plan = subject.plan
        self._plan, self._layout = plan, layout
        self._controller = subject.controller(layout)
        self._channels = subject.channels
        self.truth, self.evidence, self.seen = truth, np.zeros(len(truth)), len(truth)
        self.draws = {phase.name: SamplerTest(phase, plan.units) for phase in plan.phases}
        self.targets: dict[str, AuditedRelease] = {}
        self.settings: dict[str, StepQuery] = {}

    def release_beforehand(self, phase: Phase, step: int) -> None:
        """A step of a phase that does not train."""
        target = preliminary_release(self._plan, phase, step, self._controller.tables, self._channels)
        directions, present = self._canaries(target), self._members(phase, step)
        released = target.release(directions, present)
        self._learn(target, directions.scores(target.noisy_sum(released)))
        if phase.name == SELECT.name:
            self._controller.observe_selection(released)

    def train(self, phase: Phase, step: int) -> None:
        """A step: the count of its rows, if it makes one, then its gradient."""
        present = self._members(phase, step)
        ledger = self._count(phase, step, present)
        asked = self._controller.begin_step(step)
        query = StepQuery(phase, step, asked.support, asked.geometry, asked.per_sample_top)
        target = gradient_release(self._plan, query, self._layout)
        directions = self._canaries(target)
        released, _ = target.make(directions, present, ledger)
        scores = directions.scores(target.noisy_sum(released))
        self.seen = min(self.seen, len(scores))
        self._learn(target, scores)
        self.settings[phase.name] = query
        self._controller.update(released)

    def _count(self, phase: Phase, step: int, present: Coins) -> Chargeable | None:
        """Gives the ledger that the gradient of the same step is charged to; None for a step that counts nothing."""
        tables = self._controller.tables
        if not phase.count_share or tables is None or not tables.total:
            return None
        target = row_count_release(self._plan, phase, step, tables)
        directions = self._canaries(target)
        released, paid = target.make(directions, present, None)
        self._learn(target, directions.scores(target.noisy_sum(released)))
        self._controller.observe_counts(released)
        return paid

    def _canaries(self, target: AuditedRelease) -> Directions:
        return target.directions(len(self.truth), single=False)

    def _members(self, phase: Phase, step: int) -> Coins:
        """The canaries among the units drawn whose coin put them into the data."""
        drawn: Indices = self.draws[phase.name].draw(step)
        present = np.zeros(len(self.truth), dtype=bool)
        present[drawn[drawn < len(present)]] = True
        return present & self.truth

    def _learn(self, target: AuditedRelease, scores: Vector) -> None:
        self.evidence[: len(scores)] += _evidence(scores, target.phase.sampling_rate, target.noise_multiplier)
        self.targets[target.name] = target


def _evidence(scores: Vector, rate: float, noise: float) -> Vector:
    """Log likelihood ratio of a score: sampled at the rate and moved by one clip norm, or not there at all."""
    moved = math.log(rate) + (2 * scores - 1) / (2 * noise**2)
    return np.logaddexp(math.log1p(-rate), moved) if rate < 1 else moved


LEAST_NOISE = 0.25
TIGHTEST = "pld"


@final
@dataclass(frozen=True, slots=True)
class JointRelease:
    """Releases of the same units, made so many times: all of a step, or one that is made before training."""

    phase: Phase
    names: tuple[str, ...]
    times: int

    def noise(self, found: Mapping[str, float]) -> float:
        """What they amount to: Gaussian releases of the same units add up in precision, noise^-2."""
        each = [found[name] for name in self.names]
        if min(each) == 0:
            return 0.0
        precision = sum(noise**-2 for noise in each)
        return precision**-0.5 if precision else math.inf


def group_by_step(targets: Iterable[AuditedRelease]) -> list[JointRelease]:
    """The targets, those of one step together."""
    parts: dict[str, list[AuditedRelease]] = {}
    for target in targets:
        parts.setdefault(target.phase.name if target.phase.trains else target.name, []).append(target)
    return [
        JointRelease(
            some[0].phase,
            tuple(target.name for target in some),
            some[0].phase.steps if some[0].phase.trains else 1,
        )
        for some in parts.values()
    ]


@final
class Composition:
    """Puts releases together, at the plan's delta.

    By privacy loss distributions, which come close to the truth, wherever they reach the plan's delta; else by the
    plan's own accountant, so that what was measured is compared with what is claimed by the same yardstick.
    """

    def __init__(self, plan: Plan) -> None:
        self._delta = plan.delta or 0.0
        self._reach = int(0.99 * self._delta / (4 * ROUNDING))
        """Steps that the tightest accountant can put together at this delta."""
        own = plan.accountant or TIGHTEST
        slack = own if own in ACCOUNTANTS else "rdp"
        self._accountant: Accountant = accountant(TIGHTEST if plan.total_steps <= self._reach else slack)

    @property
    def accountant(self) -> str:
        """Who counts."""
        return self._accountant.name

    def claim(self, phase: Phase) -> float:
        """Epsilon of a single step as it is planned."""
        return self._epsilon([SampledGaussian(phase.sampling_rate, phase.noise_multiplier, 1)])

    def epsilon(self, releases: Iterable[tuple[float, float, int]]) -> float:
        """Epsilon of releases with the rates and noise found; what could not be measured counts as never released.

        Noise below `LEAST_NOISE` counts as that much: still a lower bound, and quick.
        """
        return self._epsilon(
            [
                SampledGaussian(rate, max(noise, LEAST_NOISE) if noise else 0.0, times)
                for rate, noise, times in releases
                if math.isfinite(noise) and rate > 0
            ]
        )

    def _epsilon(self, events: list[SampledGaussian]) -> float:
        if self.accountant == TIGHTEST:
            events = _first(sorted(events, key=lambda event: event.noise_multiplier), self._reach)
        return self._accountant.epsilon(events, self._delta) if events else 0.0


def one_step(
    composition: Composition,
    releases: Iterable[JointRelease],
    rates: Mapping[str, float],
    noise: Mapping[str, float],
) -> dict[str, float]:
    """Claim and lower bound of the single step that leaks most."""
    pairs = [
        (composition.claim(each.phase), composition.epsilon([(rates[each.phase.name], each.noise(noise), 1)]))
        for each in releases
    ]
    claim, bound = max(pairs, key=lambda pair: pair[0])
    return {"claimed_epsilon": claim, "lower_bound": bound}


def _first(events: list[SampledGaussian], steps: int) -> list[SampledGaussian]:
    """As many of the releases as that: fewer never cost more."""
    kept = []
    for event in events:
        some = min(event.steps, steps)
        kept += [event._replace(steps=some)] if some else []
        steps -= some
    return kept
