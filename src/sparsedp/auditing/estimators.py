"""From what an attacker scored to a lower bound on epsilon, at a stated confidence.

From the tightest to the one that assumes least. *GDP*: scores are Gaussian, so the distance of their means over their
spread bounds epsilon (Andrew et al. 2023, arXiv 2302.03098); exact for a release of its own, and below the truth for
sums of evidence from sampled steps, whose tails are heavier (tests compare the two on a grid of plans).
*Thresholds*: error rates of a test, by Clopper-Pearson (Nasr et al. 2023, arXiv 2302.07956). *Guesses*: how many of
many coins were guessed in one run (Steinke, Nasr and Jagielski 2023, arXiv 2305.08846, Theorem 5.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt
from scipy import optimize, special, stats

from sparsedp.randomness import PublicRandomness

Vector = npt.NDArray[np.floating[Any]]

HIGHEST = 1000.0
"""Where searches for epsilon end; beyond it a bound counts as infinite."""


@final
@dataclass(frozen=True, slots=True)
class Scores:
    """What the attacker measured of canaries that took part, and of those that did not."""

    inside: Vector
    outside: Vector

    @property
    def count(self) -> int:
        """How many canaries."""
        return len(self.inside) + len(self.outside)

    def halves(self) -> tuple[Scores, Scores]:
        """Every other score: one half to choose a threshold by, one to judge it by."""
        return Scores(self.inside[::2], self.outside[::2]), Scores(self.inside[1::2], self.outside[1::2])


def noise_at_most(scores: Scores, risk: float) -> float:
    """An upper confidence limit on noise over contribution, from Gaussian scores; wrong with probability `risk`.

    The spread within both groups is bounded by chi-square, the distance of their means by Student's t, half the risk
    each. **Edge cases.** Infinite where the two groups cannot be told apart.
    """
    inside, outside = scores.inside, scores.outside
    freedom = scores.count - 2
    if min(len(inside), len(outside)) < 2:
        return math.inf
    squares = float(((inside - inside.mean()) ** 2).sum() + ((outside - outside.mean()) ** 2).sum())
    spread = math.sqrt(squares / stats.chi2.ppf(risk / 2, freedom))
    error = math.sqrt(squares / freedom * (1 / len(inside) + 1 / len(outside)))
    distance = float(inside.mean() - outside.mean()) - float(stats.t.isf(risk / 2, freedom)) * error
    return spread / distance if distance > 0 else math.inf


def deviation_at_most(squares: Vector, count: int, risk: float) -> Vector:
    """Upper confidence limits on standard deviations, from sums of `count` squares of centred normals each."""
    return np.asarray(np.sqrt(np.maximum(squares, 0.0) / stats.chi2.ppf(risk, count)))


def rate_at_least(hits: int, trials: int, risk: float) -> float:
    """Clopper and Pearson's lower confidence limit on a probability."""
    return float(stats.beta.ppf(risk, hits, trials - hits + 1)) if hits else 0.0


def rate_at_most(hits: int, trials: int, risk: float) -> float:
    """Clopper and Pearson's upper confidence limit on a probability."""
    return float(stats.beta.isf(risk, hits + 1, trials - hits)) if hits < trials else 1.0


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Delta of mu-GDP at epsilon (Balle and Wang 2018, Theorem 8)."""
    first = special.ndtr(mu / 2 - epsilon / mu)
    return float(first - math.exp(epsilon + float(special.log_ndtr(-mu / 2 - epsilon / mu))))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Epsilon of mu-GDP at delta."""
    if mu <= 0 or gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    if not math.isfinite(mu) or gaussian_delta(mu, HIGHEST) > delta:
        return math.inf
    return float(optimize.brentq(lambda epsilon: gaussian_delta(mu, epsilon) - delta, 0.0, HIGHEST))


def epsilons_of(scores: Scores, delta: float, risk: float) -> dict[str, float]:
    """Lower bounds from the canaries of a whole plan, each with a third of the risk."""
    return {
        "gdp": epsilon_by_shape(scores, delta, risk / 3),
        "threshold": epsilon_by_threshold(scores, delta, risk / 3),
        "guesses": epsilon_by_guesses(scores, delta, risk / 3),
    }


def epsilon_by_shape(scores: Scores, delta: float, risk: float) -> float:
    """A lower bound for scores that are Gaussian with and without the canary."""
    noise = noise_at_most(scores, risk)
    return gaussian_epsilon(1 / noise, delta) if noise > 0 else math.inf


def epsilon_by_threshold(scores: Scores, delta: float, risk: float) -> float:
    """A lower bound from the error rates of the best threshold, which half of the scores choose and half judge.

    Holds whatever the mechanism, if the canaries' scores are independent: (epsilon, delta) means that a true positive
    is at most e^epsilon times as likely as a false one, up to delta, and the same for negatives.
    """
    choosing, judging = scores.halves()
    if min(len(choosing.inside), len(choosing.outside), len(judging.inside), len(judging.outside)) < 1:
        return 0.0
    marks = np.quantile(np.concatenate([choosing.inside, choosing.outside]), np.linspace(0.01, 0.99, 99))
    best = max(marks, key=lambda mark: _by_rates(choosing, mark, delta, risk))
    return max(0.0, _by_rates(judging, best, delta, risk))


def _by_rates(scores: Scores, mark: float, delta: float, risk: float) -> float:
    """The better of "above the mark is in" and "below the mark is out"; a quarter of the risk for each rate."""
    bounds = []
    for hits, misses in (
        (scores.inside > mark, scores.outside > mark),
        (scores.outside <= mark, scores.inside <= mark),
    ):
        true = rate_at_least(int(hits.sum()), len(hits), risk / 4) - delta
        false = rate_at_most(int(misses.sum()), len(misses), risk / 4)
        bounds.append(math.log(true / false) if true > 0 else -math.inf)
    return max(bounds)


def epsilon_by_guesses(scores: Scores, delta: float, risk: float) -> float:
    """A lower bound from guessing coins: the highest scores were in, the lowest were out, the rest is left open.

    Needs nothing of the mechanism or the scores, only that each canary's coin was fair and its own. Several numbers
    of guesses are tried, each with its share of the risk.
    """
    values = np.concatenate([scores.inside, scores.outside])
    truth = np.concatenate([np.ones(len(scores.inside), bool), np.zeros(len(scores.outside), bool)])
    total = len(truth)
    shuffled = PublicRandomness.fresh().permutation(total, (0,)).numpy()  # ties are guessed at random
    ranked = truth[shuffled][np.argsort(-values[shuffled], kind="stable")]
    numbers = sorted({max(1, int(total * share) // 2) for share in (0.02, 0.05, 0.1, 0.25, 0.5, 1.0)})
    return max(
        epsilon_of_guesses(
            total,
            2 * each,
            int(ranked[:each].sum() + (~ranked[total - each :]).sum()),
            delta,
            risk / len(numbers),
        )
        if 2 * each <= total
        else 0.0
        for each in numbers
    )


def epsilon_of_guesses(canaries: int, guesses: int, right: int, delta: float, risk: float) -> float:
    """The least epsilon at which so many right guesses have a chance above `risk`."""
    if guess_chance(canaries, guesses, right, 0.0, delta) > risk:
        return 0.0
    if guess_chance(canaries, guesses, right, HIGHEST, delta) <= risk:
        return math.inf
    low, high = 0.0, HIGHEST
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if guess_chance(canaries, guesses, right, middle, delta) <= risk else (low, middle)
        )
    return low


def guess_chance(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """The most that "at least `right` of `guesses` coins guessed" can be worth under (epsilon, delta)-DP.

    W is binomial with e^epsilon / (1 + e^epsilon); the chance is P[W >= v] + 2 m delta max_i P[v - i <= W < v] / i.
    """
    if right <= 0:
        return 1.0
    accuracy = float(special.expit(epsilon))
    tail = float(stats.binom.sf(right - 1, guesses, accuracy))
    below = np.cumsum(stats.binom.pmf(np.arange(right - 1, -1, -1), guesses, accuracy))
    slope = float((below / np.arange(1, right + 1)).max())
    return min(1.0, tail + 2 * canaries * delta * slope)
