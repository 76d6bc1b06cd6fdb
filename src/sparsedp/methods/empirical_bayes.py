"""Empirical Bayes: how much of each coordinate's summed release is signal, learned from all of them together.

The sum of a coordinate's releases is its signal plus Gaussian noise whose variance is public. Over the coordinates, signals
are taken to come from a scale mixture of normals with a part at zero, whose shares EM finds from the sums themselves
(adaptive shrinkage: Stephens 2017). From the posterior follow two things:

* which coordinates to train on (`EmpiricalBayes`, a ranking): those whose expected signal is worth the noise;
* what to hand out (`SignalSums.shrinkage`): the posterior mean of each coordinate instead of its noisy value, as
  denoising of a Gaussian mechanism does (Balle and Wang 2018, Sec. 4).

**Formal guarantees.** Everything here is a function of `Released` values and of public numbers: post-processing. It costs
nothing, moves no sensitivity, and no step's noise depends on it but through the public support and scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

import torch
from torch import Tensor

from sparsedp.methods.ranking import Order
from sparsedp.methods.scores import ByScore, Observation, Place, RankingState, register_ranking
from sparsedp.parameters import Layout
from sparsedp.privacy.mechanism import Released

SMALLEST = 0.25
"""The smallest standard deviation of a signal that is told from none, over that of the noise."""
ITERATIONS = 300
"""Of EM at most; it stops when no share moves by 1e-6."""
CHUNK = 2**18
"""Coordinates whose posterior is computed at a time."""
NOISE_WEIGHT = 0.5
"""What a kept coordinate's noise counts against a left one's signal: shrinking takes back about half of it (measured)."""


@final
@dataclass(frozen=True, slots=True)
class NormalMixture:
    """Signals' distribution: `shares[j]` of the coordinates have normal signals of variance `variances[j]` (0 first)."""

    variances: tuple[float, ...]
    shares: tuple[float, ...]

    @classmethod
    def fit(cls, values: Tensor, noise_variance: Tensor) -> Self:
        """The shares that make these sums likeliest, their noise known; by EM on a fixed grid of variances.

        Coordinates that look alike are counted together first, so the cost hardly grows with their number.

        **Edge cases.** Without coordinates, or without noise, nothing is known to be noise and all share is wide.
        """
        noisy = noise_variance > 0
        if not bool(noisy.any()):
            return cls((0.0, math.inf), (0.0, 1.0))
        values, noise, counts = _alike(values[noisy], noise_variance[noisy])
        unit = float((noise * counts).sum() / counts.sum())
        largest = math.sqrt(float((values.square() / unit).max()))
        wider = max(1, math.ceil(2 * math.log2(max(largest / SMALLEST, 1.0))) + 1)
        grid = [0.0, *(unit * SMALLEST**2 * 2.0**step for step in range(wider))]
        variances = torch.tensor(grid, dtype=torch.float64)
        likelihood = _likelihood(values, noise, variances)
        shares = torch.full_like(variances, 1 / len(grid))
        for _ in range(ITERATIONS):
            responsibility = likelihood * shares
            responsibility /= responsibility.sum(1, keepdim=True).clamp(min=1e-300)
            before, shares = shares, counts @ responsibility / counts.sum()
            if float((shares - before).abs().max()) < 1e-6:
                break
        return cls(tuple(grid), tuple(shares.tolist()))

    @property
    def share_at_zero(self) -> float:
        """The share of coordinates without signal."""
        return self.shares[0]

    def posterior(self, values: Tensor, noise_variance: Tensor) -> tuple[Tensor, Tensor]:
        """For each coordinate `E[signal | sum] / sum`, in [0, 1], and `E[signal^2 | sum]`."""
        factors, energies = torch.ones_like(values), values.square()
        for start in range(0, len(values), CHUNK):
            part = slice(start, start + CHUNK)
            factors[part], energies[part] = self._posterior(values[part], noise_variance[part])
        return factors, energies

    def _posterior(self, values: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        if math.isinf(self.variances[-1]):
            return torch.ones_like(values), values.square()
        variances = torch.tensor(self.variances, dtype=torch.float64)
        shares = torch.tensor(self.shares, dtype=torch.float64)
        responsibility = _likelihood(values, noise, variances) * shares
        responsibility /= responsibility.sum(1, keepdim=True).clamp(min=1e-300)
        total = (variances + noise[:, None]).clamp(min=1e-300)
        shrink = variances / total
        spread = (responsibility * shrink).sum(1)
        energy = noise * spread + values.square() * (responsibility * shrink.square()).sum(1)
        silent = noise == 0
        return torch.where(silent, 1.0, spread), torch.where(silent, values.square(), energy)


@dataclass(frozen=True, slots=True)
class EmpiricalBayes(ByScore):
    """`E[signal^2 | sum] / noise`, and of it as many as are worth their noise: the size is found, not set.

    Of d coordinates that a warm-up of T1 steps has looked at and T2 steps are left, the k best are kept that minimise
    `(T2/T1) sum_left score + NOISE_WEIGHT k^2/d`: what those left would still have to say, against the noise on those kept,
    which falls with k too because the clip norm follows the support (`GeometryRule.SCALED`). This is TP-TopK's
    Prop. 5.1, coordinate by coordinate. An `active_ratio` below 1 is an upper bound on k/d. At least one is kept.
    """

    name: str = "empirical-bayes"

    def init(self, dimension: int) -> RankingState:
        """Zeros."""
        zeros = torch.zeros(dimension, dtype=torch.float64)
        return {"sum": zeros, "variance": zeros.clone(), "steps": torch.zeros((), dtype=torch.int64)}

    def update(self, state: RankingState, seen: Observation) -> RankingState:
        """Add `g` and `v`."""
        return {
            "sum": state["sum"] + seen.gradient,
            "variance": state["variance"] + seen.noise_variance,
            "steps": state["steps"] + 1,
        }

    def scores(self, state: RankingState) -> Tensor:
        """The expected squared signal over the noise variance; over one, without noise."""
        mixture = NormalMixture.fit(state["sum"], state["variance"])
        energy = mixture.posterior(state["sum"], state["variance"])[1]
        return energy / torch.where(state["variance"] > 0, state["variance"], 1.0)

    def order(self, state: RankingState, place: Place) -> Order:
        """By falling score, and only those that are kept."""
        scores = self.scores(state)
        order = place.by_score(scores).items
        left = place.steps_left / max(1, int(state["steps"]))
        return Order(order[: best_size(scores[order], left)])


def best_size(scores: Tensor, left: float) -> int:
    """How many of some coordinates to keep, by their falling scores; `left` is T2/T1."""
    if not len(scores):
        return 0
    sizes = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    outside = scores.sum() - scores.cumsum(0)
    return int((left * outside + NOISE_WEIGHT * sizes.square() / len(scores)).argmin()) + 1


@final
class SignalSums:
    """The sum of every coordinate's releases with the variance of its noise, and where the weights began.

    **Formal guarantees.** Fed by `Released` values alone; the start is the initial weights, which are public.
    """

    def __init__(self, start: Tensor) -> None:
        self._start = start.detach().to("cpu").clone()
        self._sum = torch.zeros(len(start), dtype=torch.float64)
        self._variance = torch.zeros(len(start), dtype=torch.float64)

    def observe(self, released: Released) -> None:
        """Add a release on its support."""
        at = released.support.indices
        self._sum[at] += released.mean.to("cpu", torch.float64)
        self._variance[at] += released.noise_variance.to("cpu", torch.float64)

    def mixture(self) -> NormalMixture:
        """What the sums say about the signals' distribution."""
        return NormalMixture.fit(self._sum, self._variance)

    def shrinkage(self) -> Shrinkage:
        """The start, and the share of each coordinate's movement that is signal."""
        return Shrinkage(self._start, self.mixture().posterior(self._sum, self._variance)[0])

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps."""
        return {"start": self._start, "sum": self._sum.clone(), "variance": self._variance.clone()}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Go on from a state."""
        sums = cls(tensors["start"])
        sums._sum, sums._variance = tensors["sum"].clone(), tensors["variance"].clone()
        return sums


@final
@dataclass(frozen=True, slots=True, eq=False)
class Shrinkage:
    """Weights `start + factor * (weights - start)`: the posterior mean of every coordinate's movement."""

    start: Tensor
    factor: Tensor

    def apply(self, layout: Layout, model: Any) -> None:
        """Shrink a model's weights in place."""
        weights = layout.flatten(model)
        start, factor = self.start.to(weights), self.factor.to(weights)
        layout.write(model, start + factor * (weights - start))


def _likelihood(values: Tensor, noise: Tensor, variances: Tensor) -> Tensor:
    """Of each sum under each component, up to a factor of the sum's own that leaves the likeliest at 1."""
    total = (variances + noise[:, None]).clamp(min=1e-300)
    logarithm = -0.5 * (values.square()[:, None] / total + total.log())
    return (logarithm - logarithm.max(1, keepdim=True).values).exp()


def _alike(values: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sums that hardly differ as one: their root mean square, their mean noise variance and how many they are."""
    size = torch.asinh(values.abs() / noise.sqrt())
    code = (size * 128).round().long() * 2**20 + (noise.log() * 64).round().long()
    place, counts = torch.unique(code, return_inverse=True, return_counts=True)[1:]

    def mean(numbers: Tensor) -> Tensor:
        return torch.zeros(len(counts), dtype=torch.float64).index_add_(0, place, numbers) / counts

    return mean(values.square()).sqrt(), mean(noise), counts.double()


register_ranking(EmpiricalBayes())
