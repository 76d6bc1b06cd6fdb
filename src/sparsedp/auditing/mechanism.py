"""The mechanism audit: many canaries in one real release after another, and the noise of every coordinate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np

from sparsedp.auditing.coins import fair_coins
from sparsedp.auditing.estimators import Scores, Vector, deviation_at_most, noise_at_most
from sparsedp.auditing.patterns import NoisePatterns
from sparsedp.auditing.target import MOST_CANARIES, Target

FEWEST_RELEASES, MOST_RELEASES = 48, 4000
ROUNDING = 2.0**-40
"""Of a clip norm: what is left of a coordinate below this is rounding, and no noise."""
SHARPNESS = 0.01
"""How closely a canary's contribution is to be measured, as a share of the clip norm (one standard error)."""

Tick = Callable[[int], None]


@final
@dataclass(frozen=True, slots=True)
class ReleaseFinding:
    """What one release was found to be.

    Attributes:
        name: the release.
        active: how many numbers it has.
        releases: how often it was made.
        canaries: scores taken.
        noise: upper confidence limit on the effective noise multiplier, from canaries.
        worst_noise: the same for the single coordinate with the least noise.
        worst_coordinate: its index in the model's flat vector, or among the numbers released.
        problems: what should not be.
    """

    name: str
    active: int
    releases: int
    canaries: int
    noise: float
    worst_noise: float
    worst_coordinate: int | None
    problems: tuple[str, ...] = ()


def count_releases(noise: float, canaries: int = MOST_CANARIES, *, every_step: bool = True) -> int:
    """Releases that measure a canary's contribution sharply enough, half of them for each kind of canary.

    What is not released in every step weighs less, and is made less often.
    """
    wanted = (2 * noise / SHARPNESS) ** 2 / canaries
    most = MOST_RELEASES if every_step else max(FEWEST_RELEASES, MOST_RELEASES // 4)
    return 2 * int(min(most, max(FEWEST_RELEASES, math.ceil(wanted))))


def audit_release(target: Target, risk: float, tick: Tick) -> ReleaseFinding:
    """Make the same release over and over, dense and single-coordinate canaries in turn, each in by a fair coin.

    A quarter of the risk goes to each kind of canary, to the noise of all coordinates together, and to patterns.
    """
    size = target.support.size
    most = min(MOST_CANARIES, max(1, size))
    releases = count_releases(target.noise, most, every_step=target.phase.trains) if size else 0
    squares, patterns = np.zeros(size), NoisePatterns(size)
    taken: dict[bool, list[Scores]] = {False: [], True: []}
    problems: list[str] = []
    sizes = set()
    for number in range(releases):
        single = number % 2 == 1
        directions = target.directions(most, single=single)
        present = fair_coins(directions.count)
        released = target.release(directions, present)
        if released.support != target.support:
            problems.append("a release lies on other coordinates than its support")
            break
        total = target.noisy_sum(released)
        scores = directions.scores(total)
        taken[single].append(Scores(scores[present], scores[~present]))
        residual = total - target.added(directions, present)
        squares += residual**2
        patterns.add(residual)
        sizes.add(float(released.noise_scale.max()) if size else 0.0)
        tick(1)
    if len(sizes) > 1:
        problems.append("the stated noise differs between releases of one step")
    problems += patterns.problems(risk / 4)
    noise = min((noise_at_most(_joined(some), risk / 4) for some in taken.values() if some), default=math.inf)
    worst, where = _worst(squares, releases, risk / 4)
    return ReleaseFinding(
        name=target.name,
        active=size,
        releases=releases,
        canaries=sum(scores.count for some in taken.values() for scores in some),
        noise=noise,
        worst_noise=worst,
        worst_coordinate=None if where is None else int(target.support.indices[where]),
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
