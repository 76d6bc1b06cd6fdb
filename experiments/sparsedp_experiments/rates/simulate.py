"""Private logistic regression in NumPy, for many rates, clip norms and ratios at once.

Written apart from the library, which it takes the plan's noise and number of steps from: the same sampling of units,
clip, noise and momentum, with NumPy's own random numbers. All settings share the batches, so a step costs about as
much as one of the library's for a single setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import sparse
from scipy.stats import rankdata

from sparsedp.privacy.plan import Plan
from sparsedp_experiments.data.bundle import DataBundle, Sparse, Split

MOMENTUM = 0.9
WARM_UP = 0.3

Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Setting:
    """A rate times the clip norm, the clip norm, and for tp-coherent the share of coordinates that stay."""

    step: float
    clip_norm: float
    ratio: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class People:
    """Rows, targets, and the rows of each unit."""

    rows: sparse.csr_matrix
    targets: Array
    owner: npt.NDArray[np.int64]

    @property
    def units(self) -> int:
        """How many there are."""
        return int(self.owner.max()) + 1


def people(split: Split) -> People:
    """A side of a data set."""
    features = split.features
    assert isinstance(features, Sparse)
    parts = (features.weights.numpy(), features.columns.numpy(), features.starts.numpy())
    owner = np.arange(len(split)) if split.units is None else np.unique(split.units, return_inverse=True)[1]
    rows = sparse.csr_matrix(parts, shape=(len(split), features.width))
    return People(rows, split.targets.numpy().astype(np.float32), owner)


def simulate(
    train: People, plan: Plan, settings: Sequence[Setting], seed: int, paired: bool = False
) -> Array:
    """The weights of every setting after the plan's steps: [features + 1, settings], the intercept last.

    `paired` gives all settings the same noise in units of its scale, as runs of the library with one seed have.
    """
    phase = plan.phases[-1]
    steps, rng = sum(one.steps for one in plan.phases), np.random.default_rng(seed)
    clip = np.array([one.clip_norm for one in settings], np.float32)
    rate = np.array([one.step / one.clip_norm for one in settings], np.float32)
    weights = np.zeros((train.rows.shape[1] + 1, len(settings)), np.float32)
    speed, seen, active = np.zeros_like(weights), np.zeros_like(weights), np.ones_like(weights)
    sparse_ones = any(one.ratio is not None for one in settings)
    draw = _Sampler(train, phase.sampling_rate, rng)
    expected = phase.sampling_rate * train.units
    for step in range(steps):
        chosen = draw()
        rows, targets = train.rows[chosen], train.targets[chosen]
        total = _clipped_sum(rows, targets, weights, active, clip, sparse_ones)
        noise = rng.standard_normal((len(weights), 1 if paired else len(settings)), dtype=np.float32)
        total += noise * (phase.noise_multiplier * clip)
        released = total / np.float32(expected) * active
        if sparse_ones and step < WARM_UP * steps:
            seen += released
            if step + 1 >= WARM_UP * steps:
                active = _supports(seen, settings)
                speed *= active
        speed = np.float32(MOMENTUM) * speed + released
        weights -= rate * speed * active
    return weights


def auc(held_out: People, weights: Array) -> list[float]:
    """Of every setting, by ranks."""
    scores = held_out.rows @ weights[:-1] + weights[-1]
    positive = held_out.targets == 1
    count = int(positive.sum())
    ranks = np.stack([rankdata(scores[:, one]) for one in range(scores.shape[1])], axis=1)
    above = ranks[positive].sum(axis=0) - count * (count + 1) / 2
    return [float(one) for one in above / (count * (len(positive) - count))]


def bundle_for(bundle: DataBundle, validation: float | None, most: int) -> tuple[People, People]:
    """Both sides; with `validation` that share of the training units is held out instead. At most so many rows."""
    used = bundle if validation is None else bundle.validated(validation, 0)
    train = people(used.train)
    if len(train.targets) > most and train.units == len(train.targets):
        kept = np.random.default_rng(5).permutation(len(train.targets))[:most]
        train = People(train.rows[kept], train.targets[kept], np.arange(most))
    return train, people(used.test)


class _Sampler:
    """Each unit by its own coin, then one of its rows."""

    def __init__(self, train: People, share: float, rng: np.random.Generator) -> None:
        self.units, self.share, self.rng = train.units, share, rng
        self.order = np.argsort(train.owner, kind="stable")
        self.counts = np.bincount(train.owner)
        self.first = np.concatenate([[0], np.cumsum(self.counts)[:-1]])

    def __call__(self) -> npt.NDArray[np.int64]:
        units = np.flatnonzero(self.rng.random(self.units) < self.share)
        if self.units == len(self.order):
            return units
        inside = (self.rng.random(len(units)) * self.counts[units]).astype(np.int64)
        return self.order[self.first[units] + inside]


def _clipped_sum(
    rows: sparse.csr_matrix, targets: Array, weights: Array, active: Array, clip: Array, sparse_ones: bool
) -> Array:
    """The sum of the clipped gradients of every setting."""
    squares = rows.multiply(rows)
    norms = np.sqrt(squares @ active[:-1] + active[-1]) if sparse_ones else _lengths(squares)
    logits = np.clip(rows @ weights[:-1] + weights[-1], -30, 30)
    residual = 1 / (1 + np.exp(-logits)) - targets[:, None]
    residual *= np.minimum(1, clip / (np.abs(residual) * norms + 1e-12))
    return np.concatenate([rows.T @ residual, residual.sum(axis=0, keepdims=True)]).astype(np.float32)


def _lengths(squares: sparse.csr_matrix) -> Array:
    found: Array = np.sqrt(np.asarray(squares.sum(axis=1)) + 1).astype(np.float32)
    return found


def _supports(seen: Array, settings: Sequence[Setting]) -> Array:
    """Ones where a setting goes on: the coordinates with the largest summed release (the coherent score)."""
    found = np.ones_like(seen)
    for one, setting in enumerate(settings):
        if setting.ratio is not None:
            kept = round(setting.ratio * len(seen))
            found[np.argsort(-np.abs(seen[:, one]), kind="stable")[kept:], one] = 0
    return found
