"""Empirical Bayes: how much of each coordinate's summed release is signal, learned from all of them together.

The sum of a coordinate's releases is its signal plus Gaussian noise whose variance is public. Over the
coordinates, signals are taken to come from a scale mixture of normals with a part at zero, whose shares EM finds
from the sums themselves (adaptive shrinkage: Stephens 2017). Each round of `tp-adaptive` takes two things from
the posterior:

* which coordinates to train on (`EmpiricalBayes`, a ranking): those whose expected signal is worth the noise;
* what becomes of the weights (`Shrinkage`): each movement is replaced by its posterior mean, as denoising of a
  Gaussian mechanism does (Balle and Wang 2018, Sec. 4), so that the noise learned so far is forgotten.

Formal guarantees: Everything here is a function of `Release` values and of public numbers: post-processing.
It costs nothing, moves no sensitivity, and no step's noise depends on it but through the public support and scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self, final

import torch
from torch import Tensor

from sparsedp.methods.ranking import Order
from sparsedp.methods.scores import Coherent, NoisyGradient, RankingContext, RankingState, register_ranking
from sparsedp.parameters import ParameterLayout

SMALLEST = 0.25
"""The smallest standard deviation of a signal that is told from none, over that of the noise."""
ITERATIONS = 300
"""Of EM at most; it stops when no share moves by 1e-6."""
CHUNK = 2**18
"""Coordinates whose posterior is computed at a time."""
NOISE_COST = 2.0
"""What noise counts against signal where the size is chosen (1 to 3 were level)."""
MOST_SPREAD = 0.2
"""The effective share of coordinates with signal up to which selection gained; spread signals had 0.3 and more."""
SIZES = 64
"""How many sizes are compared, evenly on a logarithmic scale."""


@final
@dataclass(frozen=True, slots=True)
class NormalMixture:
    """Signals' distribution: `shares[j]` of them are normal with variance `variances[j]` (0 first)."""

    variances: tuple[float, ...]
    shares: tuple[float, ...]

    @classmethod
    def fit(cls, values: Tensor, noise_variance: Tensor) -> Self:
        """The shares that make these sums likeliest, their noise known; by EM on a fixed grid of variances.

        Coordinates that look alike are counted together first, so the cost hardly grows with their number.

        Edge cases: Without noise there is nothing to learn: `posterior` leaves such sums as they are.
        """
        noisy = noise_variance > 0
        if not bool(noisy.any()):
            return cls((0.0,), (1.0,))
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

    def posterior(self, values: Tensor, noise_variance: Tensor) -> tuple[Tensor, Tensor]:
        """For each coordinate `E[signal | sum] / sum`, in [0, 1], and `E[signal^2 | sum]`."""
        factors, energies = torch.ones_like(values), values.square()
        for start in range(0, len(values), CHUNK):
            part = slice(start, start + CHUNK)
            factors[part], energies[part] = self._posterior(values[part], noise_variance[part])
        return factors, energies

    def _posterior(self, values: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
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


@final
@dataclass(frozen=True, slots=True)
class Decision:
    """What a round decided, and from what: all of it post-processing of releases.

    Attributes:
        mixture: the distribution of signals that was fitted.
        spread: the effective share of coordinates that carry the signal's energy e: `(sum e)^2 / (d sum e^2)`.
        kept: how many coordinates of `of` are trained from now on.
        of: how many there are.
    """

    mixture: NormalMixture
    spread: float
    kept: int
    of: int

    @property
    def reason(self) -> str:
        """Why so many were kept, in one line."""
        spread = f"the signal is spread over {self.spread:.2g} of them"
        if self.spread > MOST_SPREAD:
            return f"all {self.of:,} coordinates: {spread}, more than {MOST_SPREAD:g}"
        if self.kept == self.of:
            return f"all {self.of:,} coordinates: the signal is strong enough in all of them"
        return (
            f"{self.kept:,} of {self.of:,} coordinates: {spread} (a share of {self.mixture.shares[0]:.2f} has none), "
            "and the others are not worth their noise"
        )

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        parts = zip(self.mixture.variances, self.mixture.shares, strict=True)
        return {
            "share_at_zero": self.mixture.shares[0],
            "mixture": [{"variance": v, "share": share} for v, share in parts if share > 1e-4],
            "spread": self.spread,
            "kept": self.kept,
            "of": self.of,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class EmpiricalBayes(Coherent):
    """`E[signal^2 | sum] / noise`, and of it as many as are worth their noise: the size is found, not set.

    The sums go on over all rounds. A signal that is spread over more than `MOST_SPREAD` of the coordinates is
    left to dense training; else see `best_size`. A coordinate that has left does not come back. An `active_ratio`
    below 1 is an upper bound on the share that is kept. At least one is kept.
    """

    name: str = "empirical-bayes"

    def init(self, dimension: int) -> RankingState:
        return {**Coherent.init(self, dimension), "active": torch.ones(dimension).bool()}

    def update(self, state: RankingState, seen: NoisyGradient) -> RankingState:
        return {**Coherent.update(self, state, seen), "active": seen.noise_variance > 0}

    def scores(self, state: RankingState) -> Tensor:
        energy = _fitted(state).posterior(state["sum"], state["variance"])[1]
        ratio = energy / torch.where(state["variance"] > 0, state["variance"], 1.0)
        return torch.where(state["active"], ratio, 0.0) if bool(state["active"].any()) else ratio

    def order(self, state: RankingState, place: RankingContext) -> Order:
        order = place.by_score(self.scores(state)).items
        return Order(order[: self.decision(state, place).kept])

    def decision(self, state: RankingState, place: RankingContext) -> Decision:
        """How many are kept, and why."""
        scores = self.scores(state)
        falling = scores[place.by_score(scores).items]
        return decide(_fitted(state), falling, int(state["steps"]), place.steps_left)

    def factors(self, state: RankingState) -> Tensor:
        """`E[signal | sum] / sum` of each coordinate that is active; 1 for the others."""
        factors = _fitted(state).posterior(state["sum"], state["variance"])[0]
        return torch.where(state["active"], factors, 1.0)


def _fitted(state: RankingState) -> NormalMixture:
    return NormalMixture.fit(state["sum"], state["variance"])


def decide(mixture: NormalMixture, scores: Tensor, seen: int, left: int) -> Decision:
    """What to keep of some coordinates, by their falling scores, after `seen` steps and with `left` to come."""
    count, squares = len(scores), float(scores.square().sum())
    spread = float(scores.sum()) ** 2 / (count * squares) if squares > 0 else 0.0
    kept = count if spread > MOST_SPREAD else best_size(scores, seen / max(1, left))
    return Decision(mixture, spread, kept, count)


def best_size(scores: Tensor, looked: float) -> int:
    """How many of some coordinates to keep, by their falling scores e; `looked` is T1/T2, steps seen over steps left.

    With the clip norm following the support (`GeometryRule.SCALED`), noise falls with the k that are kept: what
    T2 steps still tell of a coordinate is `e^2 / (e + NOISE_COST (T1/T2) k/d)`, and the k best are kept that
    maximise its sum.
    """
    d = len(scores)
    if not d:
        return 0
    sizes = torch.logspace(0, math.log2(d), SIZES, base=2, dtype=torch.float64)
    sizes = sizes.round().long().clamp(1, d).unique()
    worth = [
        float((scores[:k].square() / (scores[:k] + NOISE_COST * looked * k / d + 1e-300)).sum())
        for k in sizes.tolist()
    ]
    return int(sizes[int(torch.tensor(worth).argmax())])


@final
@dataclass(frozen=True, slots=True, eq=False)
class Shrinkage:
    """Weights `start + factor * (weights - start)`: the posterior mean of every coordinate's movement."""

    start: Tensor
    factor: Tensor

    def apply(self, layout: ParameterLayout, model: Any) -> None:
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
        sums = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, place, numbers)
        averages: Tensor = sums / counts
        return averages

    return mean(values.square()).sqrt(), mean(noise), counts.double()


register_ranking(EmpiricalBayes())
