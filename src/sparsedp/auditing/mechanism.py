"""The mechanism audit: many canaries in real releases, and the noise of every coordinate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np

from sparsedp.auditing.canaries import (
    CanaryEngine,
    Directions,
    Indices,
    added_by,
    noisy_sum,
    one_batch,
    release,
)
from sparsedp.auditing.coins import Coins, fair_coins
from sparsedp.auditing.draws import Draws
from sparsedp.auditing.estimators import Scores, Vector, deviation_at_most, noise_at_most
from sparsedp.auditing.patterns import NoisePatterns
from sparsedp.auditing.subject import Setting, Subject
from sparsedp.core.layout import Layout
from sparsedp.core.randomness import PublicRandomness, SystemRandomness
from sparsedp.privacy.plan import Phase

MOST_CANARIES = 2048
"""In one release."""
FEWEST_RELEASES, MOST_RELEASES = 48, 4000
ROUNDING = 2.0**-40
"""Of a clip norm: what is left of a coordinate below this is rounding, and no noise."""
SHARPNESS = 0.01
"""How closely a canary's contribution is to be measured, as a share of the clip norm (one standard error)."""

Tick = Callable[[int], None]


@final
@dataclass(frozen=True, slots=True)
class PhaseFinding:
    """What one step of a phase was found to be.

    Attributes:
        name: the phase.
        active: coordinates in the support.
        canaries: scores taken.
        noise: upper confidence limit on the effective noise multiplier, from canaries.
        worst_noise: the same for the single coordinate with the least noise.
        worst_coordinate: its index in the model's flat vector.
        problems: what should not be.
    """

    name: str
    active: int
    canaries: int
    noise: float
    worst_noise: float
    worst_coordinate: int | None
    problems: tuple[str, ...] = ()


def count_releases(phase: Phase, canaries: int = MOST_CANARIES) -> int:
    """Releases that measure a canary's contribution sharply enough, half of them for each kind of canary."""
    wanted = (2 * phase.noise_multiplier / SHARPNESS) ** 2 / canaries
    return 2 * int(min(MOST_RELEASES, max(FEWEST_RELEASES, math.ceil(wanted))))


def audit_phase(subject: Subject, setting: Setting, layout: Layout, risk: float, tick: Tick) -> PhaseFinding:
    """Release the same step over and over, dense and single-coordinate canaries in turn, each in by a fair coin.

    A quarter of the risk goes to each kind of canary, to the noise of all coordinates together, and to patterns.
    """
    plan, phase, size = subject.plan, setting.phase, setting.support.size
    most = min(MOST_CANARIES, max(1, size))
    releases = count_releases(phase, most) if size else 0
    squares, patterns = np.zeros(size), NoisePatterns(size)
    taken: dict[str, list[Scores]] = {"dense": [], "single": []}
    problems: list[str] = []
    sizes = set()
    for number in range(releases):
        kind = "dense" if number % 2 == 0 else "single"
        make = Directions.blocks if kind == "dense" else Directions.single
        directions = make(size, most, PublicRandomness.fresh())
        present = fair_coins(directions.count)
        released = release(
            plan, setting, CanaryEngine(layout, directions), one_batch(present), SystemRandomness()
        )
        if released.support != setting.support:
            problems.append("a release lies on other coordinates than its support")
            break
        total = noisy_sum(plan, setting, released)
        scores = directions.scores(total)
        taken[kind].append(Scores(scores[present], scores[~present]))
        residual = total - added_by(setting, directions, present)
        squares += residual**2
        patterns.add(residual)
        sizes.add(float(released.noise_scale.max()) if size else 0.0)
        tick(1)
    if len(sizes) > 1:
        problems.append("the stated noise differs between releases of one step")
    problems += patterns.problems(risk / 4)
    noise = min((noise_at_most(_joined(some), risk / 4) for some in taken.values() if some), default=math.inf)
    worst, where = _worst(squares, releases, risk / 4)
    return PhaseFinding(
        name=phase.name,
        active=size,
        canaries=sum(scores.count for some in taken.values() for scores in some),
        noise=noise,
        worst_noise=worst,
        worst_coordinate=None if where is None else int(setting.support.indices[where]),
        problems=tuple(dict.fromkeys(problems)),
    )


def _worst(squares: Vector, count: int, risk: float) -> tuple[float, int | None]:
    if not len(squares) or not count:
        return math.inf, None
    place = int(np.argmin(squares))
    if squares[place] <= count * ROUNDING**2:
        return 0.0, place
    return float(deviation_at_most(squares[place : place + 1], count, risk / len(squares))[0]), place


def _joined(parts: list[Scores]) -> Scores:
    return Scores(
        np.concatenate([part.inside for part in parts]), np.concatenate([part.outside for part in parts])
    )


@final
@dataclass(frozen=True, slots=True)
class WholePlan:
    """One run of the plan with many canaries, each in the data by a fair coin and in a batch by the sampler's.

    Attributes:
        scores: the evidence for each canary.
        settings: the last step of each phase.
        steps: how many were taken.
        draws: by phase, whom the sampler drew.
    """

    scores: Scores
    settings: dict[str, Setting]
    steps: int
    draws: dict[str, Draws]


def run_plan(subject: Subject, layout: Layout, most_steps: int, tick: Tick) -> WholePlan:
    """Take steps of the plan with canaries alone, and score each by the likelihood of all releases it saw.

    A support with fewer coordinates than canaries has directions for some of them only; scored are those that had one
    in every step.
    """
    plan = subject.plan
    steps = subject.some_steps(most_steps)
    controller = subject.controller(layout)
    many = min(MOST_CANARIES, layout.dimension, plan.units)
    truth = fair_coins(many)
    evidence, seen = np.zeros(many), many
    draws = {phase.name: Draws(phase, plan.units) for phase in subject.phases}
    settings: dict[str, Setting] = {}
    for step in steps:
        phase = plan.phase_at(step)
        asked = controller.setting(step)
        setting = Setting(phase, step, asked.support, asked.geometry, asked.per_sample_top)
        directions = Directions.blocks(setting.support.size, many, PublicRandomness.fresh())
        drawn = draws[phase.name].draw(step)
        released = release(
            plan,
            setting,
            CanaryEngine(layout, directions),
            one_batch(_members(drawn, truth)),
            SystemRandomness(),
        )
        scores = directions.scores(noisy_sum(plan, setting, released))
        seen = min(seen, len(scores))
        evidence[: len(scores)] += _evidence(scores, phase.sampling_rate, phase.noise_multiplier)
        settings[phase.name] = setting
        controller.observe(released)
        tick(1)
    evidence, truth = evidence[:seen], truth[:seen]
    return WholePlan(Scores(evidence[truth], evidence[~truth]), settings, len(steps), draws)


def _members(drawn: Indices, truth: Coins) -> Coins:
    """The canaries among the units drawn whose coin put them into the data."""
    present = np.zeros(len(truth), dtype=bool)
    present[drawn[drawn < len(truth)]] = True
    return present & truth


def _evidence(scores: Vector, rate: float, noise: float) -> Vector:
    """Log likelihood ratio of a score: sampled at the rate and moved by one clip norm, or not there at all."""
    moved = math.log(rate) + (2 * scores - 1) / (2 * noise**2)
    return np.logaddexp(math.log1p(-rate), moved) if rate < 1 else moved
