"""The mechanism audit: many canaries in one real release after another, and the noise of every coordinate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from sparsedp.auditing.canaries import (
    CanaryEngine,
    Coins,
    Directions,
    Setting,
    added_by,
    fair_coins,
    length_of,
    noisy_sum,
    one_batch,
    release,
)
from sparsedp.auditing.estimators import Scores, Vector, deviation_at_most, noise_at_most
from sparsedp.batch import MicroBatch
from sparsedp.clipping import Clip, FlatClip
from sparsedp.errors import PrivacyError
from sparsedp.methods.method import SELECT
from sparsedp.methods.ranking import TableRows
from sparsedp.parameters import Layout, Support
from sparsedp.privacy.ledger import Ledger, MemoryLedger
from sparsedp.privacy.mechanism import ONE_PROCESS, Release
from sparsedp.privacy.normalization import NORMALISE
from sparsedp.privacy.plan import Phase, Plan
from sparsedp.randomness import PublicRandomness, SystemRandomness
from sparsedp.sampling import LogicalBatch
from sparsedp.training.normalization import release_statistics
from sparsedp.training.step import StepCounts, release_selection

KEPT = 6
"""Releases kept whole, to be compared coordinate by coordinate and step by step."""
DIGITS = 9
"""Decimals, in clip norms, to which two coordinates must agree in every release kept to count as one."""


@final
class NoisePatterns:
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

    def problems(self, risk: float) -> list[str]:
        """What was found, with a chance of `risk` on independent noise."""
        return [*self._equal_coordinates(), *self._equal_steps(risk / 2), *self._echoes(risk / 2)]

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

    def _equal_steps(self, risk: float) -> list[str]:
        """Noise of one release that can be told from that of another."""
        kept = np.stack(self._kept) if self._kept else np.zeros((0, 0))
        norms = np.linalg.norm(kept, axis=1)
        if len(kept) < 2 or self._size < 30 or not norms.all():
            return []
        likeness = (kept @ kept.T) / np.outer(norms, norms)
        pairs = np.triu_indices(len(kept), 1)
        limit = stats.norm.isf(risk / (2 * len(pairs[0]))) / np.sqrt(self._size)
        return (
            ["the noise of two releases is not independent"]
            if np.abs(likeness[pairs]).max() > 1.5 * limit
            else []
        )

    def _echoes(self, risk: float) -> list[str]:
        """Noise that follows that of another coordinate at some distance, over all distances at once."""
        lags = np.arange(1, self._size // 2 + 1)
        if self._releases < 2 or self._size < 100 or self._energy == 0:
            return []
        variance = self._energy / (self._releases * self._size)
        values = self._products / (variance * np.sqrt(self._releases * (self._size - lags)))
        limit = 1.25 * stats.norm.isf(risk / (2 * len(lags)))
        worst = int(np.argmax(np.abs(values)))
        if abs(values[worst]) <= limit:
            return []
        return [f"the noise of coordinates {int(lags[worst])} apart is not independent"]


MOST_CANARIES = 2048
"""In one release."""


class Target(Protocol):
    """One release of a step, and what an attacker knows of it."""

    @property
    def name(self) -> str:
        """Unique in the plan."""
        ...

    @property
    def each(self) -> str:
        """What one of its numbers belongs to, in words."""
        ...

    @property
    def numbers(self) -> str:
        """All of its numbers, in words."""
        ...

    @property
    def phase(self) -> Phase:
        """The phase it belongs to."""
        ...

    @property
    def noise(self) -> float:
        """The noise multiplier it is to have."""
        ...

    @property
    def support(self) -> Support:
        """Where it lies."""
        ...

    def directions(self, most: int, *, single: bool) -> Directions:
        """Directions of at most so many canaries: of one number each, or of all numbers shared out."""
        ...

    def release(self, directions: Directions, present: Coins) -> Release:
        """Make it, with the canaries that are present."""
        ...

    def noisy_sum(self, released: Release) -> Vector:
        """What the attacker makes of it, in clip norms."""
        ...

    def added(self, directions: Directions, present: Coins) -> Vector:
        """What the canaries present add to that, if all is as it should be."""
        ...


@final
@dataclass(frozen=True, slots=True, eq=False)
class GradientTarget:
    """The gradient that a step releases."""

    plan: Plan
    setting: Setting
    layout: Layout

    @property
    def name(self) -> str:
        """The phase's."""
        return self.phase.name

    @property
    def each(self) -> str:
        """Of the model."""
        return "coordinate"

    @property
    def numbers(self) -> str:
        """Of the support."""
        return "active coordinates"

    @property
    def phase(self) -> Phase:
        """The step's."""
        return self.setting.phase

    @property
    def noise(self) -> float:
        """The gradient's own."""
        return self.phase.gradient_noise

    @property
    def support(self) -> Support:
        """The step's."""
        return self.setting.support

    def directions(self, most: int, *, single: bool) -> Directions:
        """With random signs."""
        return spread_out(self.support.size, most, single=single)

    def release(self, directions: Directions, present: Coins) -> Release:
        """By the mechanism, from an engine that sums canaries."""
        engine = CanaryEngine(self.layout, directions)
        return release(self.plan, self.setting, engine, one_batch(present), SystemRandomness())

    def noisy_sum(self, released: Release) -> Vector:
        """In the space of the clip."""
        return noisy_sum(self.plan, self.setting, released)

    def added(self, directions: Directions, present: Coins) -> Vector:
        """Each canary as long as the clip lets it be."""
        return added_by(self.setting.clip, self.noise, directions, present)


def spread_out(size: int, most: int, *, single: bool) -> Directions:
    """Random directions for at most so many canaries."""
    make = Directions.single if single else Directions.blocks
    return make(size, min(most, MOST_CANARIES), PublicRandomness.fresh())


FEWEST_RELEASES, MOST_RELEASES = 48, 4000
ROUNDING_NOISE = 2.0**-40
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
    if squares[place] <= count * ROUNDING_NOISE**2:
        return 0.0, place
    return float(deviation_at_most(squares[place : place + 1], count, risk / len(squares))[0]), place


def _joined(parts: list[Scores]) -> Scores:
    return Scores(
        np.concatenate([part.inside for part in parts]), np.concatenate([part.outside for part in parts])
    )


ROWS_OF_A_CANARY = 4
"""That a canary touches at least, so that a unit which is not bounded as a whole shows."""
HUGE = 2.0**50
"""Size of a canary's inputs, in clip norms: beside it no centre makes a difference."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class RowCount:
    """A count of the rows that units touch or vote for: a phase of its own, or the first release of a step.

    Attributes:
        plan: what is audited.
        phase: the one that counts.
        step: any of the phase.
        tables: whose rows are counted.
    """

    plan: Plan
    phase: Phase
    step: int
    tables: TableRows

    @property
    def name(self) -> str:
        """The phase's, or what tells it from the gradient of the same step."""
        return f"{self.phase.name}, count" if self.phase.trains else self.phase.name

    @property
    def each(self) -> str:
        """Of a table, or a group of coordinates."""
        return "row"

    @property
    def numbers(self) -> str:
        """One for each row."""
        return "counts of rows"

    @property
    def noise(self) -> float:
        """The count's own."""
        return self.phase.count_noise if self.phase.trains else self.phase.noise_multiplier

    @property
    def support(self) -> Support:
        """All rows."""
        return Support.full(self.tables.total)

    @property
    def clip(self) -> Clip:
        """The bound on a unit's vector."""
        return FlatClip(1.0) if self.phase.trains else self.phase.clip

    def directions(self, most: int, *, single: bool) -> Directions:
        """Several rows each, or one."""
        fewer = most if single else min(most, max(1, self.tables.total // ROWS_OF_A_CANARY))
        return spread_out(self.tables.total, fewer, single=single).without_signs()

    def paid(self, directions: Directions, present: Coins) -> tuple[Release, Ledger]:
        """Make it; gives also the ledger that the gradient of the same step is to be charged to."""
        look: Any = _TouchesItsOwn(directions)
        controller: Any = (listener := _Listener(self.tables))
        batch, ledger = _batch(self.step, one_batch(present)), MemoryLedger()
        if self.phase.trains:
            counts = StepCounts(look, self.plan, controller, SystemRandomness(), ONE_PROCESS)
            paid = counts.release(self.step, self.phase, batch, ledger)
            return listener.heard, paid
        release_selection(
            look, batch, self.plan, self.phase, controller,
            ledger=ledger, randomness=SystemRandomness(), group=ONE_PROCESS,
        )  # fmt: skip
        return listener.heard, ledger

    def release(self, directions: Directions, present: Coins) -> Release:
        """By what training calls, with canaries that touch their rows."""
        return self.paid(directions, present)[0]

    def noisy_sum(self, released: Release) -> Vector:
        """The counts."""
        return _noisy_sum(self.plan, self.phase, self.clip, released)

    def added(self, directions: Directions, present: Coins) -> Vector:
        """One for each row of a canary, scaled down as a whole."""
        norms = torch.from_numpy(np.sqrt(np.maximum(1, directions.sizes)))
        return added_by(
            self.clip, self.noise, directions, present, lambda clip: (norms * clip.factors(norms)).numpy()
        )


@final
@dataclass(frozen=True, slots=True, eq=False)
class ChannelStatistic:
    """The means of the inputs' channels, or their spreads: one release of a normalisation.

    Attributes:
        plan: what is audited.
        phase: the normalisation.
        channels: of the inputs.
        number: which of the phase's releases.
    """

    plan: Plan
    phase: Phase
    channels: int
    number: int

    @property
    def name(self) -> str:
        """The phase's and the statistic's."""
        return f"{self.phase.name}, {'means' if self.number < self.phase.steps - 1 else 'spreads'}"

    @property
    def each(self) -> str:
        """Of the inputs; counted among those that are measured."""
        return "channel"

    @property
    def numbers(self) -> str:
        """One for each channel."""
        return "statistics of channels"

    @property
    def noise(self) -> float:
        """The phase's."""
        return self.phase.noise_multiplier

    @property
    def support(self) -> Support:
        """All channels that are measured."""
        return Support.full(len(self._columns))

    def directions(self, most: int, *, single: bool) -> Directions:
        """Positive, as spreads are."""
        return spread_out(len(self._columns), most, single=single).without_signs()

    def release(self, directions: Directions, present: Coins) -> Release:
        """By what training calls; the phase's other release has nobody in it."""
        first = self.plan.first_step(self.phase.name)
        batches = (
            _batch(first + number, self._inputs(directions, present) if number == self.number else [])
            for number in range(self.phase.steps)
        )
        heard = _Constants(torch.zeros(self.channels))
        model: Any = heard
        release_statistics(
            model, batches, self.plan, self.phase,
            ledger=MemoryLedger(), randomness=SystemRandomness(), group=ONE_PROCESS,
        )  # fmt: skip
        return heard.heard[self.number]

    def noisy_sum(self, released: Release) -> Vector:
        """The statistics, added up."""
        return _noisy_sum(self.plan, self.phase, self.phase.clip, released)

    def added(self, directions: Directions, present: Coins) -> Vector:
        """Each canary as long as the clip lets it be."""
        return added_by(self.phase.clip, self.noise, directions, present, length_of)

    @property
    def _columns(self) -> Tensor:
        return torch.tensor(self.phase.support.get("columns", range(self.channels)), dtype=torch.int64)

    def _inputs(self, directions: Directions, present: Coins) -> list[MicroBatch]:
        """A row for every canary that is there and has a direction: far out along it."""
        numbers = np.flatnonzero(present[: directions.count])
        if not len(numbers):
            return []
        mine = directions.owner == numbers[:, None]
        rows = torch.zeros(len(numbers), self.channels, dtype=torch.float64)
        rows[:, self._columns] = torch.from_numpy(mine * HUGE * self.phase.clip.sensitivity)
        return [MicroBatch(rows)]


def preliminary_target(
    plan: Plan, phase: Phase, step: int, tables: TableRows | None, channels: int
) -> RowCount | ChannelStatistic:
    """The release of a step of a phase that does not train.

    Raises:
        PrivacyError: nobody knows what it is, so it cannot be attacked.
    """
    if phase.name == NORMALISE:
        return ChannelStatistic(plan, phase, channels, step - plan.first_step(phase.name))
    if phase.name != SELECT.name or tables is None:
        raise PrivacyError(
            f"audit: the phase {phase.name!r} releases something that is not known, so it cannot be attacked; make "
            "the plan with build_plan"
        )
    return RowCount(plan, phase, step, tables)


@final
@dataclass(frozen=True, slots=True, eq=False)
class _TouchesItsOwn:
    """In place of what looks at the model: a canary touches the rows of its direction."""

    directions: Directions

    def __call__(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        owner = torch.from_numpy(self.directions.owner)
        there = torch.zeros(self.directions.count + 1, dtype=torch.bool)  # the last is for rows of nobody: -1
        there[batch.rows[batch.rows < self.directions.count]] = True
        touched = torch.nonzero(there[owner]).flatten()
        return owner[touched], touched


@final
class _Listener:
    """In place of the controller: keeps what it is told."""

    heard: Release

    def __init__(self, tables: TableRows) -> None:
        self.tables = tables

    def observe_selection(self, released: Release) -> None:
        self.heard = released

    observe_counts = observe_selection


@final
class _Constants:
    """In place of a normalised model: keeps what its constants are to be made from."""

    heard: tuple[Release, ...]

    def __init__(self, centre: Tensor) -> None:
        self.centre = centre

    def set_constants(self, means: Release | None, spreads: Release, _columns: Tensor | None) -> None:
        self.heard = (spreads,) if means is None else (means, spreads)


def _batch(step: int, parts: list[MicroBatch]) -> LogicalBatch:
    loaded: Iterator[MicroBatch] = iter(parts)
    return LogicalBatch(step, SystemRandomness().secret(key=(step,)), loaded)


def _noisy_sum(plan: Plan, phase: Phase, clip: Clip, released: Release) -> Vector:
    total = released.mean * (plan.expected_batch_size(phase) / clip.sensitivity)
    return np.asarray(total.numpy(), dtype=np.float64)
