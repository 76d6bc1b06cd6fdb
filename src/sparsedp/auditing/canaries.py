"""Canaries, whose clipped contributions lie in known directions, and the releases that they are sent through."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from sparsedp.auditing.estimators import Vector
from sparsedp.batch import LossFunction, MicroBatch
from sparsedp.clipping import Clip, FlatClip, Geometry, Identity, LayerClip
from sparsedp.errors import PrivacyError
from sparsedp.grad_sample import make_engine
from sparsedp.grad_sample.query import ClippedSumEngine, ClippedSumQuery
from sparsedp.loading import DataConfig
from sparsedp.methods import Knowledge, SupportScheduler
from sparsedp.methods.method import SELECT
from sparsedp.methods.ranking import TableRows
from sparsedp.parameters import ParameterLayout, Support
from sparsedp.privacy.charge import Charge, Chargeable, ChargeLog
from sparsedp.privacy.mechanism import GaussianMechanism, Grid, Release
from sparsedp.privacy.normalization import NORMALISE
from sparsedp.privacy.plan import Phase, Plan
from sparsedp.privacy.queries import GradientSum
from sparsedp.randomness import PublicRandomness, SystemRandomness
from sparsedp.sampling import LogicalBatch
from sparsedp.training.normalization import Normalised, release_statistics
from sparsedp.training.step import StepCounts, release_selection

Coins = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]
Tick = Callable[[int], None]
"""Moves a progress bar on."""

MAX_CANARIES = 2048
"""In one release."""
FAR = 1000.0
"""Norm of a canary's gradient before the clip, in clip norms: as far out as makes no difference."""
HUGE = 2.0**50
"""Size of a canary's inputs, in clip norms: beside it no centre makes a difference."""
ROWS_OF_A_CANARY = 4
"""Rows of tables a canary touches at least, so that a unit which is not bounded as a whole shows."""


def fair_coins(count: int) -> Coins:
    """Throw independent coins by the operating system."""
    return SystemRandomness().bernoulli(0.5, count, key=())


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
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
    def phases(self) -> tuple[Phase, ...]:
        """The phases that train."""
        return self.plan.training

    @property
    def channels(self) -> int:
        """Of the inputs, where the plan measures them; else none."""
        return self.model.centre.numel() if isinstance(self.model, Normalised) else 0

    @property
    def rows(self) -> int:
        """Of the data set."""
        return len(self.dataset)  # type: ignore[arg-type]

    def some_steps(self, most: int) -> list[int]:
        """About so many steps that train, spread evenly, the first and last of each phase among them; all others."""
        chosen: set[int] = set()
        for phase in self.plan.phases:
            first = self.plan.first_step(phase.name)
            share = max(2, most * phase.steps // self.plan.training_steps) if phase.trains else phase.steps
            chosen |= set(
                np.unique(np.linspace(first, first + phase.steps - 1, share).round()).astype(int).tolist()
            )
        return sorted(chosen)


@final
@dataclass(frozen=True, slots=True, eq=False)
class StepQuery:
    """What a training step asks of the mechanism."""

    phase: Phase
    step: int
    support: Support
    geometry: Geometry
    per_sample_top: float | None

    @property
    def clip(self) -> Clip:
        """The phase's."""
        return self.phase.clip

    @property
    def query(self) -> ClippedSumQuery:
        """As the engine is asked."""
        return ClippedSumQuery(self.support, self.clip, self.geometry, self.per_sample_top)

    def release(
        self,
        plan: Plan,
        engine: ClippedSumEngine,
        batches: Iterable[MicroBatch],
        ledger: Chargeable | None = None,
    ) -> Release:
        """Release one real gradient; charged to a ledger of its own if none is given."""
        ledger = ChargeLog() if ledger is None else ledger
        return GaussianMechanism(ledger, SystemRandomness()).release(
            GradientSum(engine, batches, self.query),
            Charge(self.phase.name, self.step, self.phase.sampling_rate, self.phase.gradient_noise),
            expected_batch_size=plan.expected_batch_size(self.phase),
        )


def device_of(model: nn.Module) -> torch.device:
    """Where the model lives."""
    return next(model.parameters()).device


@final
@dataclass(frozen=True, slots=True)
class Directions:
    """Orthogonal unit vectors on a support: each owns some coordinates, with signs; -1 owns none."""

    owner: Indices
    signs: Vector
    count: int

    @classmethod
    def random(cls, size: int, most: int, *, single: bool, signed: bool = True) -> Directions:
        """Draw at most `most` directions: of one coordinate each, or of all coordinates shared out."""
        count, order = min(size, most, MAX_CANARIES), PublicRandomness.fresh().permutation(size, (0,)).numpy()
        owner = np.full(size, -1, dtype=np.int64)
        if single:
            owner[order[:count]] = np.arange(count)
        else:
            owner[order] = np.arange(size) % max(1, count)
        return cls(owner, np.where(fair_coins(size), 1.0, -1.0) if signed else np.ones(size), count)

    @property
    def sizes(self) -> Indices:
        """How many coordinates each owns."""
        return np.bincount(self.owner[self.owner >= 0], minlength=self.count)

    @property
    def _weights(self) -> Vector:
        if not self.count:
            return np.zeros(len(self.owner))
        return np.where(self.owner >= 0, self.signs / np.sqrt(np.maximum(1, self.sizes))[self.owner], 0.0)

    def combine(self, lengths: Vector) -> Vector:
        """The sum of the directions, each times its length."""
        return np.where(self.owner >= 0, lengths[self.owner] * self._weights, 0.0)

    def scores(self, vector: Vector) -> Vector:
        """The vector's component along each direction."""
        mine = self.owner >= 0
        return np.bincount(self.owner[mine], (vector * self._weights)[mine], minlength=self.count).astype(
            float
        )


@final
class CanaryEngine:
    """Sums canaries in place of rows: a batch holds their numbers, and each adds its direction, clipped."""

    def __init__(self, layout: ParameterLayout, directions: Directions) -> None:
        self._layout, self._directions = layout, directions

    @property
    def layout(self) -> ParameterLayout:
        """The audited model's."""
        return self._layout

    def clipped_sum(self, batches: Iterable[MicroBatch], query: ClippedSumQuery) -> Tensor:
        """What the canaries of the batches add up to; numbers beyond the directions add nothing."""
        present = np.zeros(self._directions.count)
        for batch in batches:
            numbers = np.asarray(batch.rows)
            present += np.bincount(
                numbers[numbers < self._directions.count], minlength=self._directions.count
            )
        return torch.from_numpy(self._directions.combine(present * length_of(query.clip)))


def length_of(clip: Clip) -> float:
    """What a canary adds after the clip."""
    shape = (len(clip.norms), 1) if isinstance(clip, LayerClip) else (1,)
    far = torch.full(shape, FAR * clip.sensitivity, dtype=torch.float64)
    return float(torch.linalg.vector_norm(far * clip.factors(far)))


def one_batch(present: Coins) -> list[MicroBatch]:
    """Make a batch of the canaries that are present."""
    numbers = np.flatnonzero(present)
    return [MicroBatch(torch.from_numpy(numbers))] if len(numbers) else []


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AuditedRelease:
    """One release of a plan, as it is attacked: how it is made with canaries, and what the attacker knows of it.

    Attributes:
        plan: what is audited.
        phase: the release's.
        name: unique in the plan.
        each: what one of its numbers belongs to, in words.
        numbers: all of its numbers, in words.
        noise_multiplier: the noise it is to have.
        clip: the bound on a unit's contribution.
        support: where it lies.
        make: makes it with the canaries present, charged to a ledger if one is given; says which ledger paid.
        signed: whether canaries may be negative.
        most: of canaries with several numbers each.
        geometry: what the attacker undoes first.
        touching: whether a canary adds one for each of its numbers, bounded as a whole, and not its whole length.
    """

    plan: Plan
    phase: Phase
    name: str
    each: str
    numbers: str
    noise_multiplier: float
    clip: Clip
    support: Support
    make: Callable[[Directions, Coins, Chargeable | None], tuple[Release, Chargeable]]
    signed: bool = False
    most: int = MAX_CANARIES
    geometry: Geometry = Identity()  # noqa: RUF009
    touching: bool = False

    def directions(self, most: int, *, single: bool) -> Directions:
        """Draw directions of at most so many canaries."""
        fewer = most if single else min(most, self.most)
        return Directions.random(self.support.size, fewer, single=single, signed=self.signed)

    def release(self, directions: Directions, present: Coins) -> Release:
        """Make it, with the canaries that are present."""
        return self.make(directions, present, None)[0]

    def noisy_sum(self, released: Release) -> Vector:
        """Compute what the attacker knows: the noisy sum in clip norms, in the space of the clip."""
        total = self.geometry.undo(released.mean) * self.plan.expected_batch_size(self.phase)
        return np.asarray((total / self.clip.sensitivity).numpy(), dtype=np.float64)

    def added(self, directions: Directions, present: Coins) -> Vector:
        """Compute what the canaries present add to that, clipped and rounded as the mechanism does it."""
        grid = Grid.for_mechanism(self.clip.sensitivity, self.noise_multiplier, len(directions.owner))
        clip = self.clip.tightened(grid.bound)
        length: float | Vector = length_of(clip)
        if self.touching:
            norms = torch.from_numpy(np.sqrt(np.maximum(1, directions.sizes)))
            length = (norms * clip.factors(norms)).numpy()
        part = torch.from_numpy(directions.combine(present * length))
        total = grid.dequantize(grid.round_and_sum([part])) / self.clip.sensitivity
        return np.asarray(total.numpy(), dtype=np.float64)


def gradient_release(plan: Plan, step: StepQuery, layout: ParameterLayout) -> AuditedRelease:
    """The gradient of a step: made by the mechanism, from an engine that sums canaries."""

    def make(directions: Directions, present: Coins, ledger: Chargeable | None) -> tuple[Release, Chargeable]:
        ledger = ChargeLog() if ledger is None else ledger
        return step.release(plan, CanaryEngine(layout, directions), one_batch(present), ledger), ledger

    return AuditedRelease(
        plan=plan,
        phase=step.phase,
        name=step.phase.name,
        each="coordinate",
        numbers="active coordinates",
        noise_multiplier=step.phase.gradient_noise,
        clip=step.clip,
        support=step.support,
        make=make,
        signed=True,
        geometry=step.geometry,
    )


def row_count_release(plan: Plan, phase: Phase, step: int, tables: TableRows) -> AuditedRelease:
    """A count of the rows that units touch: a phase of its own, or the first release of a step."""
    clip = FlatClip(1.0) if phase.trains else phase.clip

    def make(directions: Directions, present: Coins, ledger: Chargeable | None) -> tuple[Release, Chargeable]:
        touched: Any = _TouchesItsOwn(directions)
        controller: Any = (listener := _Listener(tables))
        batch, ledger = _batch(step, one_batch(present)), ChargeLog() if ledger is None else ledger
        if phase.trains:
            counts = StepCounts(touched, plan, controller, SystemRandomness())
            paid = counts.release(step, phase, batch, ledger)
            return listener.heard, paid
        release_selection(
            touched, batch, plan, phase, controller,
            ledger=ledger, randomness=SystemRandomness(),
        )  # fmt: skip
        return listener.heard, ledger

    return AuditedRelease(
        plan=plan,
        phase=phase,
        name=f"{phase.name}, count" if phase.trains else phase.name,
        each="row",
        numbers="counts of rows",
        noise_multiplier=phase.count_noise if phase.trains else phase.noise_multiplier,
        clip=clip,
        support=Support.full(tables.total),
        make=make,
        most=max(1, tables.total // ROWS_OF_A_CANARY),
        touching=True,
    )


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

    def make(directions: Directions, present: Coins, ledger: Chargeable | None) -> tuple[Release, Chargeable]:
        """By what training calls; the phase's other release has nobody in it."""
        first, ledger = plan.first_step(phase.name), ChargeLog() if ledger is None else ledger
        batches = (
            _batch(first + one, inputs(directions, present) if one == number else [])
            for one in range(phase.steps)
        )
        model: Any = (listener := _Constants(torch.zeros(channels)))
        release_statistics(model, batches, plan, phase, ledger=ledger, randomness=SystemRandomness())
        return listener.heard[number], ledger

    return AuditedRelease(
        plan=plan,
        phase=phase,
        name=f"{phase.name}, {'means' if number < phase.steps - 1 else 'spreads'}",
        each="channel",
        numbers="statistics of channels",
        noise_multiplier=phase.noise_multiplier,
        clip=phase.clip,
        support=Support.full(len(columns)),
        make=make,
    )


def preliminary_release(
    plan: Plan, phase: Phase, step: int, tables: TableRows | None, channels: int
) -> AuditedRelease:
    """The release of a step of a phase that does not train.

    Raises:
        PrivacyError: the audit does not know what it is, so it cannot be attacked.
    """
    if phase.name == NORMALISE:
        return statistic_release(plan, phase, channels, step - plan.first_step(phase.name))
    if phase.name != SELECT.name or tables is None:
        raise PrivacyError(
            f"audit: the phase {phase.name!r} releases something that is not known, so it cannot be attacked; make "
            "the plan with build_plan"
        )
    return row_count_release(plan, phase, step, tables)


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
