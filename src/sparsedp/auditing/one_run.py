"""The whole plan in one go, with many canaries in it, each in the data by a fair coin."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import final

import numpy as np

from sparsedp.auditing.canaries import (
    MAX_CANARIES,
    AuditedRelease,
    AuditTarget,
    Coins,
    fair_coins,
    gradient_release,
    row_count_release,
    statistic_release,
    with_bar,
)
from sparsedp.auditing.estimators import Scores, Vector
from sparsedp.auditing.mechanism import ReleaseFinding
from sparsedp.auditing.sampling import SamplerTest
from sparsedp.errors import PrivacyError
from sparsedp.grad_sample.query import ClippedSumQuery
from sparsedp.methods.method import SELECT
from sparsedp.parameters import ParameterLayout
from sparsedp.privacy.accounting import ACCOUNTANTS, ROUNDING, accountant
from sparsedp.privacy.mechanism import Release
from sparsedp.privacy.normalization import NORMALISE
from sparsedp.privacy.plan import Phase, Plan, SampledGaussian


@final
class OneRunAudit:
    """Releases of the plan with canaries alone, each scored by the likelihood of all that it was in.

    A support with fewer coordinates than canaries has directions for some of them only; scored are those that had one
    in every step. Counts and statistics, which have few numbers, add to the evidence of those that have one there.

    Attributes:
        targets: the releases that were made, by name; of those made in every step, the last.
        draws: whom the sampler drew, by phase.
    """

    def __init__(self, subject: AuditTarget, layout: ParameterLayout) -> None:
        plan = subject.plan
        self._subject, self._plan, self._layout = subject, plan, layout
        self._controller = subject.controller(layout)
        self._truth = fair_coins(min(MAX_CANARIES, layout.dimension, plan.units))
        self._evidence, self._seen = np.zeros(len(self._truth)), len(self._truth)
        self.targets: dict[str, AuditedRelease] = {}
        self.draws = {phase.name: SamplerTest(phase, plan.units) for phase in plan.phases}
        self.steps = 0

    def run(self, most_steps: int, *, progress: bool) -> Scores:
        """Take about so many steps, and give the evidence for each canary."""
        steps = _some_steps(self._plan, most_steps)
        for step in with_bar(steps, f"{self._plan.method}: the plan with canaries", progress):
            phase = self._plan.phase_at(step)
            present = self._members(phase, step)
            if phase.trains:
                self._train(phase, step, present)
            else:
                self._release_beforehand(phase, step, present)
        self.steps = len(steps)
        evidence, truth = self._evidence[: self._seen], self._truth[: self._seen]
        return Scores(evidence[truth], evidence[~truth])

    def _release_beforehand(self, phase: Phase, step: int, present: Coins) -> None:
        plan, tables = self._plan, self._controller.tables
        if phase.name == SELECT.name and tables is not None:
            released = self._attack(row_count_release(plan, phase, step, tables), present)
            self._controller.observe_counts(released)
        elif phase.name == NORMALISE:
            number = step - plan.first_step(phase.name)
            self._attack(statistic_release(plan, phase, self._subject.channels, number), present)
        else:
            raise PrivacyError(
                f"audit: the phase {phase.name!r} releases something that is not known, so it cannot be attacked; "
                "make the plan with build_plan"
            )

    def _train(self, phase: Phase, step: int, present: Coins) -> None:
        """The count of the step's rows, if it makes one, then its gradient."""
        tables = self._controller.tables
        if phase.count_share and tables is not None and tables.total:
            target = row_count_release(self._plan, phase, step, tables)
            self._controller.observe_counts(self._attack(target, present))
        asked = self._controller.begin_step(step)
        query = ClippedSumQuery(asked.support, phase.clip, asked.geometry, asked.per_sample_top)
        target = gradient_release(self._plan, phase, step, query, self._layout)
        self._controller.update(self._attack(target, present))

    def _attack(self, target: AuditedRelease, present: Coins) -> Release:
        """Make the release, and learn from it."""
        directions = target.directions(len(self._truth), single=False)
        released = target.make(directions, present)
        scores = directions.scores(target.noisy_sum(released))
        self._evidence[: len(scores)] += _log_likelihood(scores, target.phase, target.noise_multiplier)
        if target.phase.trains and not target.counts:
            self._seen = min(self._seen, len(scores))
        self.targets[target.name] = target
        return released

    def _members(self, phase: Phase, step: int) -> Coins:
        """The canaries among the units drawn whose coin put them into the data."""
        drawn = self.draws[phase.name].draw(step)
        present = np.zeros(len(self._truth), dtype=bool)
        present[drawn[drawn < len(present)]] = True
        return present & self._truth


def _log_likelihood(scores: Vector, phase: Phase, noise: float) -> Vector:
    """Log ratio for each score: sampled at the rate and moved by one clip norm, or not there at all."""
    rate = phase.sampling_rate
    moved = math.log(rate) + (2 * scores - 1) / (2 * noise**2)
    return np.logaddexp(math.log1p(-rate), moved) if rate < 1 else moved


def _some_steps(plan: Plan, most: int) -> list[int]:
    """About so many steps that train, spread evenly, the first and last of each phase among them; all others."""
    chosen: set[int] = set()
    for phase in plan.phases:
        first = plan.first_step(phase.name)
        share = max(2, most * phase.steps // plan.training_steps) if phase.trains else phase.steps
        chosen |= set(np.linspace(first, first + phase.steps - 1, share).round().astype(int).tolist())
    return sorted(chosen)


LEAST_NOISE = 0.25
"""Noise below this counts as that much: still a lower bound, and quick."""


def yardstick(plan: Plan) -> str:
    """The accountant of measured steps: `pld`, the tightest, where it reaches the plan's delta, else the plan's."""
    reach = 0.99 * (plan.delta or 0.0) / (4 * ROUNDING)
    if plan.accountant is None or plan.total_steps <= reach:
        return "pld"
    return plan.accountant if plan.accountant in ACCOUNTANTS else "rdp"


def recompose(
    plan: Plan, found: Iterable[ReleaseFinding], rates: Mapping[str, float]
) -> tuple[float, dict[str, float]]:
    """Epsilon of the plan's steps as they were measured; claim and bound of the single step that leaks most.

    Releases of the same units add up in precision, noise^-2. What could not be measured counts as never released.
    """
    epsilon, delta = accountant(yardstick(plan)).epsilon, plan.delta or 0.0
    steps: dict[str, tuple[Phase, list[float]]] = {}
    for one in found:
        phase = one.target.phase
        steps.setdefault(phase.name if phase.trains else one.target.name, (phase, []))[1].append(
            one.effective_noise
        )
    whole, singles = [], []
    for phase, noises in steps.values():
        rate, noise = rates[phase.name], _together(noises)
        measured = SampledGaussian(rate, noise, phase.steps if phase.trains else 1)
        claim = epsilon([SampledGaussian(phase.sampling_rate, phase.noise_multiplier, 1)], delta)
        shown = 0.0
        if math.isfinite(noise) and rate > 0:
            whole.append(measured)
            shown = epsilon([measured._replace(steps=1)], delta)
        singles.append((claim, shown))
    claim, bound = max(singles)
    return epsilon(whole, delta), {"claimed_epsilon": claim, "lower_bound": bound}


def _together(noises: list[float]) -> float:
    if min(noises) == 0:
        return 0.0
    precision = sum(noise**-2 for noise in noises)
    return max(LEAST_NOISE, precision**-0.5) if precision else math.inf
