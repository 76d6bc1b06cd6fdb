"""The mechanism audit: many canaries in one real release after another, and the noise of every coordinate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np
from scipy import stats

from sparsedp.auditing.canaries import MAX_CANARIES, AuditedRelease, Tick, fair_coins
from sparsedp.auditing.estimators import Scores, Vector, noise_multiplier_upper_bound

KEPT = 6
"""Releases kept whole, to be compared coordinate by coordinate and step by step."""
DIGITS = 9
"""Decimals, in clip norms, to which two coordinates must agree in every release kept to count as one."""


@final
class NoiseCorrelationTest:
    """Collects the noise of several releases of one step, and says what independent normals would not do."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: list[Vector] = []
        self._products = np.zeros(size // 2)
        self._energy = 0.0
        self._releases = 0

    def add(self, noise: Vector) -> None:
        """Take in the noise of one release."""
        if len(self._kept) < KEPT:
            self._kept.append(noise.copy())
        if self._releases < 8 * KEPT and self._size > 1:
            padded = np.fft.rfft(noise, 2 * self._size)
            self._products += np.fft.irfft(np.abs(padded) ** 2, 2 * self._size)[1 : self._size // 2 + 1]
            self._energy += float(noise @ noise)
            self._releases += 1

    def problems(self, significance: float) -> list[str]:
        """What was found, with a chance of `significance` on independent noise."""
        return [
            *self._equal_coordinates(),
            *self._equal_steps(significance / 2),
            *self._echoes(significance / 2),
        ]

    def _equal_coordinates(self) -> list[str]:
        """Two coordinates that agree in all of six releases: by chance less than once in 10^30 pairs."""
        if len(self._kept) < KEPT or self._size < 2:
            return []
        table = np.stack(self._kept, axis=1)
        table = np.round(table * np.where(table[:, :1] < 0, -1.0, 1.0), DIGITS)
        order = np.lexsort(table.T)
        same = (np.diff(table[order], axis=0) == 0).all(axis=1) & (table[order][1:] != 0).any(axis=1)
        if not same.any():
            return []
        first = int(np.flatnonzero(same)[0])
        pair = sorted((int(order[first]), int(order[first + 1])))
        return [
            f"active coordinates {pair[0]} and {pair[1]} get the same noise ({int(same.sum())} such pairs)"
        ]

    def _equal_steps(self, significance: float) -> list[str]:
        """Noise of one release that can be told from that of another."""
        kept = np.stack(self._kept) if self._kept else np.zeros((0, 0))
        norms = np.linalg.norm(kept, axis=1)
        if len(kept) < 2 or self._size < 30 or not norms.all():
            return []
        likeness = (kept @ kept.T) / np.outer(norms, norms)
        pairs = np.triu_indices(len(kept), 1)
        limit = stats.norm.isf(significance / (2 * len(pairs[0]))) / np.sqrt(self._size)
        return (
            ["the noise of two releases is not independent"]
            if np.abs(likeness[pairs]).max() > 1.5 * limit
            else []
        )

    def _echoes(self, significance: float) -> list[str]:
        """Noise that follows that of another coordinate at some distance, over all distances at once."""
        lags = np.arange(1, self._size // 2 + 1)
        if self._releases < 2 or self._size < 100 or self._energy == 0:
            return []
        variance = self._energy / (self._releases * self._size)
        values = self._products / (variance * np.sqrt(self._releases * (self._size - lags)))
        limit = 1.25 * stats.norm.isf(significance / (2 * len(lags)))
        worst = int(np.argmax(np.abs(values)))
        if abs(values[worst]) <= limit:
            return []
        return [f"the noise of coordinates {int(lags[worst])} apart is not independent"]


FEWEST_RELEASES, MOST_RELEASES = 48, 4000
ROUNDING_NOISE = 2.0**-40
"""Of a clip norm: what is left of a coordinate below this is rounding, and no noise."""
SHARPNESS = 0.01
"""How closely a canary's contribution is to be measured, as a share of the clip norm (one standard error)."""


@final
@dataclass(frozen=True, slots=True)
class ReleaseFinding:
    """What a release of so many active numbers was found to be, made so often with so many canaries scored.

    `noise` is an upper confidence limit on the effective noise multiplier, from canaries; `worst_noise` that of the
    coordinate with the least noise, by its index in the model's flat vector, or among the numbers released.
    """

    name: str
    active: int
    releases: int
    canaries: int
    noise: float
    worst_noise: float
    worst_coordinate: int | None
    problems: tuple[str, ...] = ()


def count_releases(noise: float, canaries: int = MAX_CANARIES, *, every_step: bool = True) -> int:
    """Releases that measure a canary's contribution sharply enough, half of them for each kind of canary.

    What is not released in every step weighs less, and is made less often.
    """
    wanted = (2 * noise / SHARPNESS) ** 2 / canaries
    most = MOST_RELEASES if every_step else max(FEWEST_RELEASES, MOST_RELEASES // 4)
    return 2 * int(min(most, max(FEWEST_RELEASES, math.ceil(wanted))))


def audit_release(target: AuditedRelease, significance: float, tick: Tick) -> ReleaseFinding:
    """Make the same release over and over, dense and single-coordinate canaries in turn, each in by a fair coin.

    A quarter of the significance goes to each kind of canary, to the noise of all coordinates, and to patterns.
    """
    size = target.support.size
    most = min(MAX_CANARIES, max(1, size))
    releases = count_releases(target.noise_multiplier, most, every_step=target.phase.trains) if size else 0
    squares, patterns = np.zeros(size), NoiseCorrelationTest(size)
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
    problems += patterns.problems(significance / 4)
    noise = min(
        (noise_multiplier_upper_bound(_joined(some), significance / 4) for some in taken.values() if some),
        default=math.inf,
    )
    worst, where = _worst(squares, releases, significance / 4)
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


def _worst(squares: Vector, count: int, significance: float) -> tuple[float, int | None]:
    if not len(squares) or not count:
        return math.inf, None
    place = int(np.argmin(squares))
    if squares[place] <= count * ROUNDING_NOISE**2:
        return 0.0, place
    return math.sqrt(squares[place] / stats.chi2.ppf(significance / len(squares), count)), place


def _joined(parts: list[Scores]) -> Scores:
    return Scores(
        np.concatenate([part.in_canary_scores for part in parts]),
        np.concatenate([part.out_canary_scores for part in parts]),
    )
