"""Whom the sampler draws: is it every unit by a coin of its own, at the planned rate?"""

from __future__ import annotations

import math
from typing import final

import numpy as np
import torch
from scipy import stats
from torch.utils.data import TensorDataset

from sparsedp.auditing.canaries import Indices
from sparsedp.auditing.estimators import clopper_pearson
from sparsedp.privacy.plan import Phase
from sparsedp.randomness import SystemRandomness
from sparsedp.sampling import PoissonSampler

HITS = 40_000
"""Units drawn, all steps together, for the rate to be known to half a percent."""
MOST_COINS = 20_000_000


@final
class SamplerTest:
    """Batches of the real sampler of a phase, over units that are their own numbers."""

    def __init__(self, phase: Phase, units: int) -> None:
        self._phase, self._units = phase, units
        self._sampler = PoissonSampler(
            TensorDataset(torch.arange(units)),
            sampling_rate=phase.sampling_rate,
            randomness=SystemRandomness(),
        )
        self._sizes: list[int] = []
        self._counts = np.zeros(units, dtype=np.int64)
        self._history = np.zeros(units, dtype=np.int64)

    def draw(self, step: int) -> Indices:
        """The units of one more batch."""
        (batch,) = self._sampler.batches(step, step + 1)
        parts = [np.asarray(part.rows[0]) for part in batch]
        drawn = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
        self._sizes.append(len(drawn))
        np.add.at(self._counts, drawn, 1)
        self._history[drawn] ^= SystemRandomness().below(np.array([2**62]), key=())[0]
        return drawn

    def draw_enough(self, significance: float) -> None:
        """Draw on until the rate is known well and shared coins would show, or it becomes too much."""
        rate = self._phase.sampling_rate
        wanted = HITS / (rate * self._units)
        if rate < 1:
            untold = math.log(significance / self._units**2) / math.log(rate**2 + (1 - rate) ** 2)
            wanted = max(wanted, untold)
        for step in range(len(self._sizes), min(math.ceil(wanted), MOST_COINS // self._units)):
            self.draw(step)

    def rate(self, significance: float) -> float:
        """A lower confidence limit on the sampling rate; of full batches, which throw no coins, it is 1."""
        if self._phase.sampling_rate == 1:
            return 1.0
        return clopper_pearson(int(self._counts.sum()), len(self._sizes) * self._units, significance)[0]

    def problems(self, significance: float) -> list[str]:
        """What independent coins of the planned rate would not do."""
        name, rate, draws = self._phase.name, self._phase.sampling_rate, len(self._sizes)
        if rate == 1:
            return [f"{name}: a unit was left out of a full batch"] if self._counts.min() < draws else []
        share, found = significance / 8, []
        most, least = int(self._counts.max()), int(self._counts.min())
        if self._units * stats.binom.sf(most - 1, draws, rate) < share:
            found.append(f"{name}: one unit was drawn {most} times in {draws} steps")
        if self._units * stats.binom.cdf(least, draws, rate) < share:
            found.append(f"{name}: one unit was drawn {least} times in {draws} steps")
        if self.rate(share) > rate:
            found.append(f"{name}: units are sampled more often than planned")
        return [*found, *self._shared_coins(share), *self._spread_of_sizes(share)]

    def _shared_coins(self, significance: float) -> list[str]:
        """Two units drawn in exactly the same steps, where independent coins would hardly ever do that."""
        rate = self._phase.sampling_rate
        if self._units**2 * (rate**2 + (1 - rate) ** 2) ** len(self._sizes) > significance:
            return []
        shared = self._units - len(np.unique(self._history))
        who = f"{shared} units were drawn in exactly the steps of another"
        return [f"{self._phase.name}: {who}; they share a coin"] if shared else []

    def _spread_of_sizes(self, significance: float) -> list[str]:
        """Binomial batch sizes are neither all alike nor far too different; 1.2 as they are not quite normal."""
        rate, sizes = self._phase.sampling_rate, np.asarray(self._sizes)
        variance = self._units * rate * (1 - rate)
        if len(sizes) < 8 or variance < 4:
            return []
        statistic = float(((sizes - self._units * rate) ** 2).sum() / variance)
        low, high = stats.chi2.ppf([significance, 1 - significance], len(sizes))
        if low / 1.2 <= statistic <= 1.2 * high:
            return []
        how = "less than independent coins allow"
        if statistic > high:
            how = "more than independent coins allow; units share coins"
        return [f"{self._phase.name}: batch sizes vary {how}"]
