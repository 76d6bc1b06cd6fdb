"""All arms and learning rates of a cell at once, on the same batches and noise: logistic regression by DP-SGD.

Same mathematics as `sparsedp.fit` on a linear model: Poisson batches, flat clipping, Gaussian noise, warm-up,
supports, scaled clip norm, averaged weights, rounds of empirical Bayes (the library's own `NormalMixture` and
`decide`). Noise here is torch's and seeded, so rows of this engine are marked; the part `engines` of the study
holds it against the library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsedp.methods.catalog import get_method
from sparsedp.methods.empirical_bayes import NormalMixture, decide
from sparsedp_experiments.wide.data import WideData

MOMENTUM, EMA, WARM_UP = 0.9, 0.98, 0.3


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
        self.mask = torch.ones(shape)
        self.scale = torch.ones(len(rates))
        self.updates = torch.zeros(len(rates))

    def at(self, places: Sequence[int]) -> _Columns:
        """These columns, each as often as it is named."""
        other = _Columns(0, [])
        for name in ("weights", "velocity", "average", "sums", "squares", "visits", "mask"):
            setattr(other, name, getattr(self, name)[:, places])
        for name in ("rates", "scale", "updates"):
            setattr(other, name, getattr(self, name)[places])
        return other

    def keep(self, place: int, mask: Tensor) -> None:
        """A column's support from now on."""
        self.mask[:, place] = mask
        self.velocity[:, place] *= mask


def simulate(
    data: WideData, training: Training, named: Sequence[tuple[str, float]], seed: int
) -> dict[tuple[str, float], tuple[Tensor, int]]:
    """Weights and the support's size, for each arm and rate that is named."""
    generator = torch.Generator().manual_seed(seed)
    features, first = data.x.width, round(WARM_UP * training.steps)
    main, rates = training.steps - first, sorted({rate for _, rate in named})
    columns = _Columns(features, rates)
    _train(columns, data, training, first, generator)
    columns = columns.at([rates.index(rate) for _, rate in named])
    for place, (arm, _) in enumerate(named):
        score, _, ratio = arm.partition(" ")
        if ratio:
            columns.keep(place, _best(score, float(ratio), columns, place, generator))
    unit = (training.noise_multiplier * training.clip_norm / training.batch_size) ** 2
    starts = get_method("tp-adaptive").clock.starts(main, 1)
    for start, stop in zip(starts, (*starts[1:], main), strict=True):
        for place, (arm, _) in enumerate(named):
            if arm in ("adaptive", "raw"):
                _round(columns, place, unit, first + start, main - start, shrink=arm == "adaptive")
        _train(columns, data, training, stop - start, generator)
    return {
        one: (columns.average[:, place], int(columns.mask[:, place].sum())) for place, one in enumerate(named)
    }


def oracle(
    data: WideData, training: Training, named: Sequence[tuple[str, float]], seed: int
) -> dict[tuple[str, float], tuple[Tensor, int]]:
    """Somebody who knows the causes trains on them alone, with the clip norm of their share."""
    few, narrow = data.causes, replace(data, x=data.x.at(data.causes))
    clip_norm = training.clip_norm * math.sqrt(len(few) / data.x.width)
    found = simulate(narrow, replace(training, clip_norm=clip_norm), named, seed)
    whole = torch.zeros(data.x.width)
    return {one: (whole.index_copy(0, few, weights), kept) for one, (weights, kept) in found.items()}


def _train(
    columns: _Columns, data: WideData, training: Training, steps: int, generator: torch.Generator
) -> None:
    count, share = len(data.y), training.batch_size / len(data.y)
    noise = training.noise_multiplier * training.clip_norm
    bounds = training.clip_norm * columns.scale
    norms = data.x.norms(columns.mask)
    for _ in range(steps):
        rows = (torch.rand(count, generator=generator) < share).nonzero().squeeze(1)
        batch = data.x.rows(rows)
        residual = torch.sigmoid(batch.times(columns.weights)) - data.y[rows, None]
        residual *= (bounds / (residual.abs() * norms[rows] + 1e-12)).clamp(max=1)
        release = batch.transposed_times(residual / columns.scale)
        release += noise * torch.randn(len(release), 1, generator=generator)
        release *= columns.mask / training.batch_size
        columns.sums += release
        columns.squares += release.square()
        columns.visits += columns.mask
        columns.velocity = MOMENTUM * columns.velocity + release
        columns.weights = columns.weights - columns.rates / training.clip_norm * columns.velocity
        decay = ((1 + columns.updates) / (10 + columns.updates)).clamp(max=EMA)
        columns.average += (1 - decay) * (columns.weights - columns.average)
        columns.updates += 1


def _best(score: str, ratio: float, columns: _Columns, place: int, generator: torch.Generator) -> Tensor:
    """The support of a fixed ratio after the warm-up, as a mask."""
    features = len(columns.sums)
    scores = {
        "random": torch.rand(features, generator=generator),
        "energy": columns.squares[:, place],
        "coherent": columns.sums[:, place].square(),
    }[score]
    mask = torch.zeros(features)
    mask[scores.sort(descending=True, stable=True).indices[: math.floor(ratio * features)]] = 1
    return mask


def _round(columns: _Columns, place: int, unit: float, seen: int, left: int, *, shrink: bool) -> None:
    """A round of `tp-adaptive` on one column: choose, shrink, scale."""
    sums, noise = columns.sums[:, place].double(), columns.visits[:, place].double() * unit
    mixture = NormalMixture.fit(sums, noise)
    factor, energy = mixture.posterior(sums, noise)
    before = columns.mask[:, place] > 0
    scores, order = torch.where(before, energy / noise, 0.0).sort(descending=True, stable=True)
    decision = decide(mixture, scores, seen, left)
    mask = torch.zeros(len(order))
    mask[order[: decision.kept]] = 1
    if decision.kept < int(before.sum()):
        if shrink:
            columns.weights[:, place] *= torch.where(before, factor, 1.0).float()
            columns.average[:, place] = columns.weights[:, place]
            columns.updates[place] = 0
        columns.keep(place, mask)
        columns.scale[place] = math.sqrt(decision.kept / len(order))
