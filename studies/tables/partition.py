"""RS's Table 3: what sampling by partition costs when no amplification is claimed for it. Needs no training."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy.optimize import brentq
from scipy.special import log_ndtr

from studies.tables import words
from studies.tables.noise import Training, noise_multiplier

DELTA = 1e-5
UNITS, BATCH_SIZE, EPOCHS = 50_000, 1000, 48
"""CIFAR-10 with the batch and the epochs of RS's published command."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The noise Poisson sampling needs, and what partitions cost with that noise."""

    epsilon: float
    accountant: str
    noise_multiplier: float
    partition_epsilon: float


def gaussian_epsilon(noise_multiplier: float, compositions: int, delta: float = DELTA) -> float:
    """Epsilon of so many Gaussian mechanisms of sensitivity one (Balle and Wang 2018, Theorem 8).

    With zero-out neighbours a record is in one batch of every epoch, so `compositions` is the number of epochs.
    """
    mu = math.sqrt(compositions) / noise_multiplier

    def excess(epsilon: float) -> float:
        first = math.exp(log_ndtr(mu / 2 - epsilon / mu))
        second = math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu))
        return first - second - delta

    return 0.0 if excess(0.0) <= 0 else float(brentq(excess, 0.0, mu * mu / 2 + mu * 40, xtol=1e-10))


def costs() -> tuple[Cost, ...]:
    """At RS's two epsilons, with the accountant it used and with PLD."""
    training = Training(UNITS, BATCH_SIZE, EPOCHS)
    found = []
    for epsilon in (3.0, 1.0):
        for accountant in ("rdp", "pld"):
            noise = noise_multiplier(training, epsilon, accountant)
            found.append(Cost(epsilon, accountant, noise, gaussian_epsilon(noise, EPOCHS)))
    return tuple(found)


def partition_table() -> list[str]:
    """The table."""
    rows = [
        [
            f"{one.epsilon:g}",
            one.accountant.upper(),
            f"{one.noise_multiplier:.2f}",
            f"{one.partition_epsilon:.1f}",
        ]
        for one in costs()
    ]
    headings = ["epsilon, Poisson", "accountant", "noise multiplier", "epsilon of partitions with that noise"]
    return words.markdown_table(headings, rows)
