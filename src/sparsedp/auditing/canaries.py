"""Canaries, whose clipped contributions lie in known directions, and the releases that they are sent through."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar, final

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.utils.data import Dataset

from sparsedp.auditing.estimators import Vector
from sparsedp.batch import LossFunction, MicroBatch
from sparsedp.clipping import Clip, FlatClip, LayerClip
from sparsedp.grad_sample import make_engine
from sparsedp.grad_sample.query import ClippedSumEngine, ClippedSumQuery
from sparsedp.loading import DataConfig
from sparsedp.methods import Knowledge, SupportScheduler
from sparsedp.methods.ranking import TableRows
from sparsedp.parameters import ParameterLayout, Support
from sparsedp.privacy.charge import Charge, ChargeLog
from sparsedp.privacy.mechanism import GaussianMechanism, Grid, Release
from sparsedp.privacy.normalization import NORMALISE
from sparsedp.privacy.plan import Phase, Plan
from sparsedp.privacy.queries import GradientSum
from sparsedp.randomness import PublicRandomness, SystemRandomness
from sparsedp.sampling import LogicalBatch
from sparsedp.training.normalization import Normalised, release_statistics
from sparsedp.training.step import release_counts, release_selection

Coins = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]
T = TypeVar("T")

MAX_CANARIES = 2048
"""In one release."""
FAR = 1000.0
"""Norm of a canary's gradient before the clip, in clip norms: as far out as makes no difference."""
HUGE = 2.0**50
"""Size of a canary's inputs, in clip norms: beside it no centre makes a difference."""
ROWS_OF_A_CANARY = 4
"""Rows of tables a canary touches at least, so that a unit which is not bounded as a whole shows."""
MEANS, SPREADS = f"{NORMALISE}, means", f"{NORMALISE}, spreads"
"""The releases of a normalisation."""


def fair_coins(count: int) -> Coins:
    """Throw independent coins by the operating system."""
    return SystemRandomness().bernoulli(0.5, count, key=())


def with_bar(items: Sequence[T], words: str, shown: bool) -> Iterable[T]:
    """The items, with a progress bar where there is a terminal."""
    console = Console(stderr=True)
    hidden = not (shown and console.is_terminal)
    return track(items, words, console=console, transient=True, disable=hidden)


@final
@dataclass(frozen=True, slots=True, eq=False)
class AuditTarget:
    """What is audited: everything a run would be made of. The model is never moved."""

    model: nn.Module
    dataset: Dataset[Any]
    loss: LossFunction
    plan: Plan
    loading: DataConfig
    engine: str

    def make_engine(self) -> ClippedSumEngine:
        """The engine that would train the model, without the checks that come before training."""
        return make_engine(self.model, self.loss, self.engine)

    def controller(self, layout: ParameterLayout) -> SupportScheduler:
        """The method at work on this plan, with fresh public randomness."""
        known = Knowledge(lambda: layout.flatten(self.model))
        return SupportScheduler(self.plan, layout, PublicRandomness.fresh(), known)

    @property
    def channels(self) -> int:
        """Of the inputs, where the plan measures them; else none."""
        return self.model.centre.numel() if isinstance(self.model, Normalised) else 0


def device_of(model: nn.Module) -> torch.device:
    """Where the model lives."""
    return next(model.parameters()).device


@final
@dataclass(frozen=True, slots=True)
class Directions:
    """Orthogonal unit vectors on a support: each owns some coordinates, with weights; -1 owns none."""

    owner: Indices
    weights: Vector
    sizes: Indices

    @classmethod
    def random(cls, size: int, most: int, *, single: bool, signed: bool = True) -> Directions:
        """Draw at most `most` directions: of one coordinate each, or of all coordinates shared out."""
        count, order = min(size, most, MAX_CANARIES), PublicRandomness.fresh().permutation(size, (0,)).numpy()
        owner = np.full(size, -1, dtype=np.int64)
        chosen = order[:count] if single else order
        owner[chosen] = np.arange(len(chosen)) % max(1, count)
        sizes = np.bincount(owner[chosen], minlength=count)
        signs = np.where(fair_coins(size), 1.0, -1.0) if signed else np.ones(size)
        return cls(owner, np.where(owner >= 0, signs / np.sqrt(sizes)[owner], 0.0), sizes)

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.sizes)

    def combine(self, lengths: Vector) -> Vector:
        """The sum of the directions, each times its length."""
        return lengths[self.owner] * self.weights

    def scores(self, vector: Vector) -> Vector:
        """The vector's component along each direction."""
        mine = self.owner >= 0
        return np.bincount(self.owner[mine], (vector * self.weights)[mine], self.count).astype(float)


@final
class CanaryEngine:
    """Sums canaries in place of rows: a batch holds their numbers, and each adds its direction, clipped."""

    def __init__(self, layout: ParameterLayout, directions: Directions) -> None:
        self.layout, self._directions = layout, directions

    def clipped_sum(self, batches: Iterable[MicroBatch], query: ClippedSumQuery) -> Tensor:
        """What the canaries of the batches add up to; numbers beyond the directions add nothing."""
        count = self._directions.count
        present = np.zeros(count)
        for batch in batches:
            numbers = np.asarray(batch.rows)
            present += np.bincount(numbers[numbers < count], minlength=count)
        return torch.from_numpy(self._directions.combine(present * _length(query.clip)))


def _length(clip: Clip) -> float:
    """What a canary adds after the clip."""
    shape = (len(clip.norms), 1) if isinstance(clip, LayerClip) else (1,)
    far = torch.full(shape, FAR * clip.sensitivity, dtype=torch.float64)
    return float(torch.linalg.vector_norm(far * clip.factors(far)))


@final
@dataclass(frozen=True, slots=True, eq=False)
class AuditedRelease:
    """One release of a plan, as it is attacked: how it is made with canaries, and what the attacker knows of it.

    `number` says in words what each of its numbers belongs to. Where it `counts`, a canary adds one for each of its
    numbers, bounded as a whole, and not its whole length.
    """

    plan: Plan
    phase: Phase
    name: str
    number: str
    noise_multiplier: float
    query: ClippedSumQuery
    make: Callable[[Directions, Coins], Release]
    counts: bool = False

    def directions(self, most: int, *, single: bool) -> Directions:
        """Draw directions of at most so many canaries; only a gradient's may be negative."""
        size = self.query.support.size
        if self.counts and not single:
            most = min(most, max(1, size // ROWS_OF_A_CANARY))
        return Directions.random(size, most, single=single, signed=self.phase.trains and not self.counts)

    def noisy_sum(self, released: Release) -> Vector:
        """Compute what the attacker knows: the noisy sum in clip norms, in the space of the clip."""
        total = self.query.geometry.undo(released.mean) * self.plan.expected_batch_size(self.phase)
        return np.asarray((total / self.query.clip.sensitivity).numpy(), dtype=np.float64)

    def added(self, directions: Directions, present: Coins) -> Vector:
        """Compute what the canaries present add to that, clipped and rounded as the mechanism does it."""
        sensitivity = self.query.clip.sensitivity
        grid = Grid.for_mechanism(sensitivity, self.noise_multiplier, len(directions.owner))
        clip = self.query.clip.tightened(grid.bound)
        length: float | Vector = _length(clip)
        if self.counts:
            norms = torch.from_numpy(np.sqrt(directions.sizes))
            length = (norms * clip.factors(norms)).numpy()
        part = torch.from_numpy(directions.combine(present * length))
        total = grid.dequantize(grid.round_and_sum([part])) / sensitivity
        return np.asarray(total.numpy(), dtype=np.float64)


def gradient_release(
    plan: Plan, phase: Phase, step: int, query: ClippedSumQuery, layout: ParameterLayout
) -> AuditedRelease:
    """The gradient of a step: made by the mechanism, from an engine that sums canaries."""

    def make(directions: Directions, present: Coins) -> Release:
        return GaussianMechanism(ChargeLog(), SystemRandomness()).release(
            GradientSum(CanaryEngine(layout, directions), _one_batch(present), query),
            Charge(phase.name, step, phase.sampling_rate, phase.gradient_noise),
            expected_batch_size=plan.expected_batch_size(phase),
        )

    return AuditedRelease(plan, phase, phase.name, "coordinate", phase.gradient_noise, query, make)


def row_count_release(plan: Plan, phase: Phase, step: int, tables: TableRows) -> AuditedRelease:
    """A count of the rows that units touch: a phase of its own, or the first release of a step."""

    def make(directions: Directions, present: Coins) -> Release:
        def touched(batch: MicroBatch) -> tuple[Tensor, Tensor]:
            """In place of what looks at the model: a canary touches the rows of its direction."""
            owner = torch.from_numpy(directions.owner)
            there = torch.zeros(directions.count + 1, dtype=torch.bool)  # the last is for rows of nobody: -1
            there[batch.rows[batch.rows < directions.count]] = True
            found = torch.nonzero(there[owner]).flatten()
            return owner[found], found

        heard: list[Release] = []
        listener: Any = SimpleNamespace(tables=tables, observe_counts=heard.append)
        counter: Any = touched
        batch, noise = _logical_batch(step, _one_batch(present)), SystemRandomness()
        if phase.trains:
            release_counts(counter, batch, plan, step, listener, ledger=ChargeLog(), randomness=noise)
        else:
            release_selection(counter, batch, plan, phase, listener, ledger=ChargeLog(), randomness=noise)
        return heard[0]

    name, noise_multiplier, clip = phase.name, phase.noise_multiplier, phase.clip
    if phase.trains:
        name, noise_multiplier, clip = f"{phase.name}, count", phase.count_noise, FlatClip(1.0)
    query = ClippedSumQuery(Support.full(tables.total), clip)
    return AuditedRelease(plan, phase, name, "row", noise_multiplier, query, make, counts=True)


def statistic_release(plan: Plan, phase: Phase, channels: int, number: int) -> AuditedRelease:
    """The means of the inputs' channels, or their spreads: release `number` of a normalisation."""
    columns = torch.tensor(phase.support.get("columns", range(channels)), dtype=torch.int64)

    def inputs(directions: Directions, present: Coins) -> list[MicroBatch]:
        """An example for every canary that is there and has a direction: far out along it."""
        numbers = np.flatnonzero(present[: directions.count])
        if not len(numbers):
            return []
        rows = torch.zeros(len(numbers), channels, dtype=torch.float64)
        mine = directions.owner == numbers[:, None]
        rows[:, columns] = torch.from_numpy(mine * HUGE * phase.clip.sensitivity)
        return [MicroBatch(rows)]

    def make(directions: Directions, present: Coins) -> Release:
        """By what training calls; the phase's other release has nobody in it."""
        first, heard = plan.first_step(phase.name), list[Release | None]()
        batches = (
            _logical_batch(first + one, inputs(directions, present) if one == number else [])
            for one in range(phase.steps)
        )
        listener: Any = SimpleNamespace(
            centre=torch.zeros(channels), set_constants=lambda *found: heard.extend(found[:2])
        )
        release_statistics(listener, batches, plan, phase, ledger=ChargeLog(), randomness=SystemRandomness())
        return [one for one in heard if one is not None][number]

    name = MEANS if number < phase.steps - 1 else SPREADS
    query = ClippedSumQuery(Support.full(len(columns)), phase.clip)
    return AuditedRelease(plan, phase, name, "channel", phase.noise_multiplier, query, make)


def _one_batch(present: Coins) -> list[MicroBatch]:
    numbers = np.flatnonzero(present)
    return [MicroBatch(torch.from_numpy(numbers))] if len(numbers) else []


def _logical_batch(step: int, parts: list[MicroBatch]) -> LogicalBatch:
    return LogicalBatch(step, SystemRandomness().secret(key=(step,)), iter(parts))
