"""The mechanism audit: many canaries in one real release after another, and the noise of every coordinate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import numpy as np
from scipy import stats

from sparsedp.auditing.canaries import MAX_CANARIES, AuditedRelease, fair_coins, with_bar
from sparsedp.auditing.estimators import Scores, Vector, noise_multiplier_upper_bound
from sparsedp.auditing.sensitivity import SensitivityFinding
from sparsedp.runs.verify import Check

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
        half = significance / 2
        found = (self._equal_coordinates(), self._equal_steps(half), self._echoes(half))
        return [problem for problem in found if problem is not None]

    def _equal_coordinates(self) -> str | None:
        """Two coordinates that agree in all of six releases: by chance less than once in 10^30 pairs."""
        if len(self._kept) < KEPT or self._size < 2:
            return None
        table = np.stack(self._kept, axis=1)
        table = np.round(table * np.where(table[:, :1] < 0, -1.0, 1.0), DIGITS)
        order = np.lexsort(table.T)
        same = (np.diff(table[order], axis=0) == 0).all(axis=1) & (table[order][1:] != 0).any(axis=1)
        if not same.any():
            return None
        first = int(np.flatnonzero(same)[0])
        one, other = sorted((int(order[first]), int(order[first + 1])))
        return f"active coordinates {one} and {other} get the same noise ({int(same.sum())} such pairs)"

    def _equal_steps(self, significance: float) -> str | None:
        """Noise of one release that can be told from that of another."""
        kept = np.stack(self._kept) if self._kept else np.zeros((0, 0))
        norms = np.linalg.norm(kept, axis=1)
        if len(kept) < 2 or self._size < 30 or not norms.all():
            return None
        likeness = (kept @ kept.T) / np.outer(norms, norms)
        pairs = np.triu_indices(len(kept), 1)
        limit = stats.norm.isf(significance / (2 * len(pairs[0]))) / np.sqrt(self._size)
        found = np.abs(likeness[pairs]).max() > 1.5 * limit
        return "the noise of two releases is not independent" if found else None

    def _echoes(self, significance: float) -> str | None:
        """Noise that follows that of another coordinate at some distance, over all distances at once."""
        lags = np.arange(1, self._size // 2 + 1)
        if self._releases < 2 or self._size < 100 or self._energy == 0:
            return None
        variance = self._energy / (self._releases * self._size)
        values = self._products / (variance * np.sqrt(self._releases * (self._size - lags)))
        worst = int(np.argmax(np.abs(values)))
        found = abs(values[worst]) > 1.25 * stats.norm.isf(significance / (2 * len(lags)))
        return f"the noise of coordinates {int(lags[worst])} apart is not independent" if found else None


FEWEST_RELEASES, MOST_RELEASES = 48, 4000
ROUNDING_NOISE = 2.0**-40
"""Of a clip norm: what is left of a coordinate below this is rounding, and no noise."""
SHARPNESS = 0.01
"""How closely a canary's contribution is to be measured, as a share of the clip norm (one standard error)."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReleaseFinding:
    """What a release was found to be; both noises are upper confidence limits on the effective multiplier."""

    target: AuditedRelease
    releases: int
    canaries: int
    noise: float
    worst_noise: float
    worst_coordinate: int | None
    problems: tuple[str, ...]
    moved: SensitivityFinding | None

    @property
    def effective_noise(self) -> float:
        """The least noise that is beyond doubt, over the farthest a unit moves the sum."""
        farthest = 1.0 if self.moved is None or self.moved.within else self.moved.ratio
        return min(self.noise, self.worst_noise) / farthest

    @property
    def words(self) -> str:
        """What was done to it."""
        target = self.target
        if not self.releases:
            return f"{target.name} has no {target.number}s, so there is nothing to attack"
        size = target.query.support.size
        return f"{target.name} ({size:,} {target.number}s, released {self.releases:,} times)"

    def checks(self) -> Iterator[Check]:
        """Whether every number gets its noise, and no noise tells of another."""
        target, problem = self.target, None
        if self.worst_noise < target.noise_multiplier:
            place = f"{target.number} {self.worst_coordinate}"
            problem = f"{place} has noise of at most {self.worst_noise:.3g} clip norms"
        elif self.noise < target.noise_multiplier:
            problem = f"a canary meets noise of at most {self.noise:.3g} times what it adds"
        size = target.query.support.size
        yield Check(f"{target.name}: all {size:,} {target.number}s get their noise", problem)
        yield Check(f"{target.name}: the noise has no pattern", "; ".join(self.problems) or None)


def audit_release(
    target: AuditedRelease, significance: float, moved: SensitivityFinding | None, *, progress: bool
) -> ReleaseFinding:
    """Make the same release over and over, dense and single-coordinate canaries in turn, each in by a fair coin.

    A quarter of the significance goes to each kind of canary, to the noise of all coordinates, and to patterns.
    """
    support = target.query.support
    size = support.size
    most = min(MAX_CANARIES, max(1, size))
    releases = _count_releases(target, most) if size else 0
    squares, patterns = np.zeros(size), NoiseCorrelationTest(size)
    taken: dict[bool, list[tuple[Vector, Vector]]] = {False: [], True: []}
    problems, sizes, canaries = list[str](), set[float](), 0
    for number in with_bar(range(releases), f"attacking {target.name}", progress):
        single = number % 2 == 1
        directions = target.directions(most, single=single)
        present = fair_coins(directions.count)
        released = target.make(directions, present)
        if released.support != support:
            problems.append("a release lies on other coordinates than its support")
            break
        total = target.noisy_sum(released)
        scores = directions.scores(total)
        taken[single].append((scores[present], scores[~present]))
        canaries += directions.count
        residual = total - target.added(directions, present)
        squares += residual**2
        patterns.add(residual)
        sizes.add(float(released.noise_scale.max()))
    if len(sizes) > 1:
        problems.append("the stated noise differs between releases of one step")
    joined = [Scores(*map(np.concatenate, zip(*some, strict=True))) for some in taken.values() if some]
    limits = [noise_multiplier_upper_bound(scores, significance / 4) for scores in joined]
    worst, where = _worst(squares, releases, significance / 4)
    return ReleaseFinding(
        target=target,
        releases=releases,
        canaries=canaries,
        noise=min(limits, default=math.inf),
        worst_noise=worst,
        worst_coordinate=None if where is None else int(support.indices[where]),
        problems=(*problems, *patterns.problems(significance / 4)),
        moved=moved,
    )


def _count_releases(target: AuditedRelease, canaries: int) -> int:
    """Releases that measure a contribution sharply enough; fewer of what is not released in every step."""
    wanted = (2 * target.noise_multiplier / SHARPNESS) ** 2 / canaries
    most = MOST_RELEASES if target.phase.trains else max(FEWEST_RELEASES, MOST_RELEASES // 4)
    return 2 * int(min(most, max(FEWEST_RELEASES, math.ceil(wanted))))


def _worst(squares: Vector, count: int, significance: float) -> tuple[float, int | None]:
    if not len(squares) or not count:
        return math.inf, None
    place = int(np.argmin(squares))
    if squares[place] <= count * ROUNDING_NOISE**2:
        return 0.0, place
    return math.sqrt(squares[place] / stats.chi2.ppf(significance / len(squares), count)), place
