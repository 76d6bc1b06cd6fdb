"""All arms and learning rates of a cell at once, on the same batches: logistic regression by DP-SGD with momentum.

Same mathematics as `sparsedp.fit` on a linear model: Poisson batches, flat clipping, Gaussian noise, warm-up, supports,
scaled clip norm, averaged weights, denoising (the library's own `NormalMixture` and `best_size`). Noise here is torch's and
seeded, so rows of this engine are marked; `study.py` shows them equal to the library's on overlapping cells.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsedp.methods.empirical_bayes import NormalMixture, best_size
from sparsedp_experiments.wide.data import WideData

MOMENTUM, EMA, WARM_UP = 0.9, 0.98, 0.3

ARMS: Mapping[str, float | None] = {
    "dense": None,
    "random 0.2": 0.2,
    "energy 0.05": 0.05,
    "energy 0.2": 0.2,
    "energy 0.4": 0.4,
    "coherent 0.05": 0.05,
    "coherent 0.2": 0.2,
    "adaptive": None,
}
"""What each keeps after the warm-up; `adaptive` finds its own number and lets the clip norm follow."""


@dataclass(frozen=True, slots=True)
class Training:
    """The public numbers of a cell."""

    noise_multiplier: float
    steps: int
    batch_size: int
    clip_norm: float


class _Columns:
    """Weights, momentum, average and sums of releases: a column for each arm and rate."""

    def __init__(self, features: int, rates: Sequence[float]) -> None:
        self.rates = torch.tensor(rates)
        shape = (features, len(rates))
        self.weights, self.velocity, self.average = torch.zeros(shape), torch.zeros(shape), torch.zeros(shape)
        self.sums, self.squares, self.visits = torch.zeros(shape), torch.zeros(shape), torch.zeros(shape)
        self.mask: Tensor | None = None
        self.scale = torch.ones(len(rates))
        self.updates = 0

    def repeated(self, times: int) -> _Columns:
        """Each column so many times."""
        other = _Columns(0, [])
        for name in ("weights", "velocity", "average", "sums", "squares", "visits"):
            setattr(other, name, getattr(self, name).repeat_interleave(times, dim=1))
        other.rates, other.updates = self.rates.repeat_interleave(times), self.updates
        other.scale = torch.ones(len(other.rates))
        return other


def simulate(
    data: WideData, training: Training, rates: Sequence[float], seed: int, arms: Sequence[str] = tuple(ARMS)
) -> dict[tuple[str, float], tuple[Tensor, int]]:
    """Weights and the support's size, for each arm and rate; an arm with "+ shrink" is the same run denoised."""
    generator = torch.Generator().manual_seed(seed)
    features, first = data.x.shape[1], round(WARM_UP * training.steps)
    columns = _Columns(features, rates)
    norms = data.x.norm(dim=1)[:, None].expand(-1, len(rates))
    _train(columns, data, training, norms, first, generator)
    masks = [
        torch.stack([_support(arm, columns, j, training, first, generator) for arm in arms], 1)
        for j in range(len(rates))
    ]
    columns = columns.repeated(len(arms))
    columns.mask = torch.cat(masks, 1)
    columns.velocity *= columns.mask
    for place, arm in enumerate(arms * len(rates)):
        if arm == "adaptive":
            columns.scale[place] = math.sqrt(float(columns.mask[:, place].mean()))
    norms = torch.cat([part.square() @ columns.mask for part in data.x.split(1024)]).sqrt()
    _train(columns, data, training, norms, training.steps - first, generator)
    unit = (training.noise_multiplier * training.clip_norm / training.batch_size) ** 2
    found = {}
    for place, (rate, arm) in enumerate((rate, arm) for rate in rates for arm in arms):
        weights, sums = columns.average[:, place], columns.sums[:, place].double()
        noise = columns.visits[:, place].double() * unit
        factor = NormalMixture.fit(sums, noise).posterior(sums, noise)[0].float()
        kept = int(columns.mask[:, place].sum())
        found[arm, rate] = (weights, kept)
        found[f"{arm} + shrink", rate] = (weights * factor, kept)
    return found


def oracle(
    data: WideData, training: Training, rates: Sequence[float], seed: int
) -> dict[tuple[str, float], tuple[Tensor, int]]:
    """Somebody who knows the causes trains on them alone, with the clip norm of their share."""
    features, few = data.x.shape[1], data.causes
    narrow = WideData(data.x[:, few], data.y, data.test_x[:, few], data.test_y, few, data.best)
    columns = _Columns(len(few), rates)
    columns.scale.fill_(math.sqrt(len(few) / features))
    norms = narrow.x.norm(dim=1)[:, None].expand(-1, len(rates))
    _train(columns, narrow, training, norms, training.steps, torch.Generator().manual_seed(seed))
    found = {}
    for place, rate in enumerate(rates):
        weights = torch.zeros(features)
        weights[few] = columns.average[:, place]
        found["oracle", rate] = (weights, len(few))
    return found


def _train(
    columns: _Columns,
    data: WideData,
    training: Training,
    norms: Tensor,
    steps: int,
    generator: torch.Generator,
) -> None:
    share = training.batch_size / len(data.x)
    noise = training.noise_multiplier * training.clip_norm
    bounds = training.clip_norm * columns.scale
    for _ in range(steps):
        rows = (torch.rand(len(data.x), generator=generator) < share).nonzero().squeeze(1)
        x = data.x[rows]
        residual = torch.sigmoid(x @ columns.weights) - data.y[rows, None]
        residual *= (bounds / (residual.abs() * norms[rows] + 1e-12)).clamp(max=1)
        release = x.T @ (residual / columns.scale)
        release += noise * torch.randn(release.shape, generator=generator)
        if columns.mask is not None:
            release *= columns.mask
        release /= training.batch_size
        columns.sums += release
        columns.squares += release.square()
        columns.visits += 1 if columns.mask is None else columns.mask
        columns.velocity = MOMENTUM * columns.velocity + release
        columns.weights = columns.weights - columns.rates / training.clip_norm * columns.velocity
        decay = min(EMA, (1 + columns.updates) / (10 + columns.updates))
        columns.average.lerp_(columns.weights, 1 - decay)
        columns.updates += 1


def _support(
    arm: str, columns: _Columns, place: int, training: Training, first: int, generator: torch.Generator
) -> Tensor:
    """The support of an arm after the warm-up, as a mask."""
    sums, features = columns.sums[:, place].double(), len(columns.sums)
    if arm == "dense":
        return torch.ones(features)
    noise = torch.full_like(
        sums, first * (training.noise_multiplier * training.clip_norm / training.batch_size) ** 2
    )
    ratio = ARMS[arm]
    if ratio is None:
        scores = NormalMixture.fit(sums, noise).posterior(sums, noise)[1] / noise
        order = scores.sort(descending=True, stable=True).indices
        size = best_size(scores[order], (training.steps - first) / first)
    else:
        random = torch.rand(features, generator=generator)
        by = {"random": random, "energy": columns.squares[:, place], "coherent": sums.square()}[
            arm.split()[0]
        ]
        order, size = by.sort(descending=True, stable=True).indices, math.floor(ratio * features)
    mask = torch.zeros(features)
    mask[order[:size]] = 1
    return mask
