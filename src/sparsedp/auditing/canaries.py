"""Canaries: units whose clipped gradients lie in known directions of the support, put through the real mechanism."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from sparsedp.auditing.coins import Coins, fair_coins
from sparsedp.auditing.estimators import Vector
from sparsedp.auditing.subject import Setting
from sparsedp.batch import MicroBatch
from sparsedp.core.clip import Clip
from sparsedp.grad_sample.query import Engine, Query
from sparsedp.parameters import Layout
from sparsedp.privacy.grid import Grid
from sparsedp.privacy.ledger import Charge, Ledger, MemoryLedger
from sparsedp.privacy.mechanism import privatize
from sparsedp.privacy.plan import Plan
from sparsedp.privacy.released import Released
from sparsedp.randomness import PrivateRandomness, PublicRandomness

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
) -> Released:
    """The gradient of one real step of the mechanism; charged to a ledger of its own, if none is given."""
    phase = setting.phase
    return privatize(
        engine,
        batches,
        Query(setting.support, setting.clip, setting.geometry, setting.per_sample_top),
        expected_batch_size=plan.expected_batch_size(phase),
        charge=Charge(phase.name, setting.step, phase.sampling_rate, phase.gradient_noise),
        ledger=MemoryLedger() if ledger is None else ledger,
        randomness=randomness,
    )


def noisy_sum(plan: Plan, setting: Setting, released: Released) -> Vector:
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
    grid = Grid.of(clip.sensitivity, noise, len(directions.owner))
    part = torch.from_numpy(directions.combine(present * length(clip.tightened(grid.bound))))
    return np.asarray((grid.values(grid.add_up([part])) / clip.sensitivity).numpy(), dtype=np.float64)


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
