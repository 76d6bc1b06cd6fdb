"""Canaries: units whose clipped gradients lie in known directions of the support, put through the real mechanism."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from sparsedp.auditing.estimators import Vector
from sparsedp.batch import MicroBatch, PerSampleLoss
from sparsedp.clipping import Clip, Geometry
from sparsedp.errors import SparseDPError
from sparsedp.grad_sample import make_engine
from sparsedp.grad_sample.query import Engine, Query
from sparsedp.loading import Loading
from sparsedp.methods import Controller, Knowledge
from sparsedp.parameters import Layout, Support
from sparsedp.privacy.ledger import Charge, Ledger, MemoryLedger
from sparsedp.privacy.mechanism import GaussianMechanism, Grid, Release
from sparsedp.privacy.plan import Phase, Plan
from sparsedp.privacy.queries import GradientSum
from sparsedp.randomness import (
    PrivateRandomness,
    PublicRandomness,
    SeededRandomness,
    StepSecret,
    SystemRandomness,
)
from sparsedp.training.normalization import Normalised

Coins = npt.NDArray[np.bool_]


def fair_coins(count: int) -> Coins:
    """Independent coins from the operating system."""
    return SystemRandomness().bernoulli(0.5, count, key=())


@final
@dataclass(frozen=True, slots=True, eq=False)
class AbsentUnits(SystemRandomness):
    """The operating system's randomness, but for units that are not there: their coins never land.

    Attributes:
        present: one flag per unit.
    """

    present: Coins

    def bernoulli(self, probability: float, size: int, key: Sequence[int]) -> Coins:
        """Independent coins; an absent unit's is never true."""
        if size != len(self.present):
            raise SparseDPError(f"absent units: got {size} units, expected {len(self.present)}")
        return SystemRandomness.bernoulli(self, probability, size, key) & self.present


@final
@dataclass(frozen=True, slots=True, eq=False)
class FixedCoins:
    """Makes the real sampler draw the units it is told to, each with the same rows in whatever company.

    A unit's choice of rows is keyed by the unit: two draws that differ by one unit differ in nothing else.

    Attributes:
        chosen: one coin per unit.
        sizes: rows of each unit.
        seed: of the rows' lottery.
    """

    chosen: Coins
    sizes: npt.NDArray[np.int64]
    seed: int

    @property
    def for_release(self) -> bool:
        """Never."""
        return False

    def rounded_gaussian(self, bits: int, size: int, key: Sequence[int]) -> Tensor:
        """None: these are for drawing batches."""
        raise SparseDPError("fixed coins make no noise")

    def add_rounded_gaussian(self, bits: int, sums: Tensor, key: Sequence[int]) -> None:
        """None: these are for drawing batches."""
        raise SparseDPError("fixed coins make no noise")

    def bernoulli(self, probability: float, size: int, key: Sequence[int]) -> Coins:
        """The coins given."""
        if size != len(self.chosen):
            raise SparseDPError(f"fixed coins: got {size} units, expected {len(self.chosen)}")
        return self.chosen

    def below(self, bounds: npt.NDArray[np.int64], key: Sequence[int]) -> npt.NDArray[np.int64]:
        """One integer per chosen unit, or one per row of the chosen units, as the sampler asks."""
        units = np.flatnonzero(self.chosen)
        whole = SeededRandomness(self.seed)
        if len(bounds) == len(units):
            lots = whole.below(np.full(len(self.chosen), 2**52), key=(0,))[units]
        else:
            starts = np.cumsum(self.sizes) - self.sizes
            rows = np.concatenate([np.arange(starts[u], starts[u] + self.sizes[u]) for u in units])
            lots = whole.below(np.full(int(self.sizes.sum()), 2**52), key=(1,))[rows]
        return (lots % bounds).astype(np.int64)

    def secret(self, key: Sequence[int]) -> StepSecret:
        """The same whoever is drawn."""
        return SeededRandomness(self.seed).secret(key)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Subject:
    """Everything a run would be made of.

    Attributes:
        model: the user's; never moved.
        dataset: the user's.
        loss: one loss per row.
        plan: what is claimed.
        loading: units and how rows become batches.
        engine: the engine's name.
    """

    model: nn.Module
    dataset: Dataset[Any]
    loss: PerSampleLoss
    plan: Plan
    loading: Loading
    engine: str

    def make_engine(self) -> Engine:
        """The engine that would train the model, without the checks that come before training."""
        return make_engine(self.model, self.loss, self.engine)

    def controller(self, layout: Layout) -> Controller:
        """The method at work on this plan, with fresh public randomness."""
        known = Knowledge(lambda: layout.flatten(self.model))
        return Controller(self.plan, layout, PublicRandomness.fresh(), known)

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
class Setting:
    """What a step of some phase asks of the mechanism."""

    phase: Phase
    step: int
    support: Support
    geometry: Geometry
    per_sample_top: float | None

    @property
    def clip(self) -> Clip:
        """The phase's."""
        return self.phase.clip


def device_of(model: nn.Module) -> torch.device:
    """Where the model lives."""
    return next(model.parameters()).device


Indices = npt.NDArray[np.int64]

FAR = 1000.0
"""Norm of a canary's gradient before the clip, in clip norms: as far out as makes no difference."""


@final
@dataclass(frozen=True, slots=True)
class Directions:
    """Orthogonal unit vectors on a support: each owns some coordinates, with signs; -1 owns none."""

    owner: Indices
    signs: Vector
    count: int

    @classmethod
    def blocks(cls, size: int, most: int, public: PublicRandomness) -> Directions:
        """Dense: every coordinate belongs to one of at most `most` directions."""
        count = min(size, most)
        owner = np.empty(size, dtype=np.int64)
        owner[public.permutation(size, (0,)).numpy()] = np.arange(size) % max(1, count)
        return cls(owner, _signs(size), count)

    @classmethod
    def single(cls, size: int, most: int, public: PublicRandomness) -> Directions:
        """One coordinate each, at most `most` of them, chosen at random."""
        count = min(size, most)
        owner = np.full(size, -1, dtype=np.int64)
        owner[public.permutation(size, (0,)).numpy()[:count]] = np.arange(count)
        return cls(owner, _signs(size), count)

    def without_signs(self) -> Directions:
        """The same coordinates, all positive: for what counts or measures spreads."""
        return replace(self, signs=np.ones_like(self.signs))

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

    def __init__(self, layout: Layout, directions: Directions) -> None:
        self._layout, self._directions = layout, directions

    @property
    def layout(self) -> Layout:
        """The audited model's."""
        return self._layout

    def clipped_sum(self, batches: Iterable[MicroBatch], query: Query) -> Tensor:
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
    far = torch.tensor([FAR * clip.sensitivity], dtype=torch.float64)
    return float(far * clip.factors(far))


def release(
    plan: Plan,
    setting: Setting,
    engine: Engine,
    batches: Iterable[MicroBatch],
    randomness: PrivateRandomness,
    ledger: Ledger | None = None,
) -> Release:
    """The gradient of one real step of the mechanism; charged to a ledger of its own, if none is given."""
    phase = setting.phase
    query = Query(setting.support, setting.clip, setting.geometry, setting.per_sample_top)
    mechanism = GaussianMechanism(MemoryLedger() if ledger is None else ledger, randomness)
    return mechanism.release(
        GradientSum(engine, batches, query),
        Charge(phase.name, setting.step, phase.sampling_rate, phase.gradient_noise),
        expected_batch_size=plan.expected_batch_size(phase),
    )


def noisy_sum(plan: Plan, setting: Setting, released: Release) -> Vector:
    """What the attacker computes from a release: the noisy sum in clip norms, in the space of the clip."""
    total = setting.geometry.undo(released.mean) * plan.expected_batch_size(setting.phase)
    return np.asarray((total / setting.clip.sensitivity).numpy(), dtype=np.float64)


def added_by(
    clip: Clip,
    noise: float,
    directions: Directions,
    present: Coins,
    length: Callable[[Clip], float | Vector] = length_of,
) -> Vector:
    """What the canaries present add to the noisy sum, in clip norms: clipped and rounded as the mechanism does it."""
    grid = Grid.for_mechanism(clip.sensitivity, noise, len(directions.owner))
    part = torch.from_numpy(directions.combine(present * length(clip.tightened(grid.bound))))
    return np.asarray(
        (grid.dequantize(grid.round_and_sum([part])) / clip.sensitivity).numpy(), dtype=np.float64
    )


def one_batch(present: Coins) -> list[MicroBatch]:
    """A batch of the canaries that are present."""
    numbers = np.flatnonzero(present)
    return [MicroBatch(torch.from_numpy(numbers))] if len(numbers) else []


@final
@dataclass(frozen=True, slots=True)
class Places(Dataset[Any]):
    """A data set whose rows are their own numbers: shows whom the sampler draws."""

    count: int

    def __len__(self) -> int:
        """How many units."""
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        """The number itself."""
        return torch.tensor(index)

    def rows_at(self, indices: Tensor) -> Tensor:
        """The numbers themselves."""
        return indices


def _signs(size: int) -> Vector:
    return np.where(fair_coins(size), 1.0, -1.0)
