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
from dp_accounting import get_epsilon_gaussian
from scipy import optimize, special, stats

from sparsedp.randomness import PublicRandomness

Vector = npt.NDArray[np.floating[Any]]

HIGHEST, XTOL = 1000.0, 1e-9
"""Where searches for epsilon end, beyond which a bound counts as infinite; and their tolerance."""


@final
@dataclass(frozen=True, slots=True)
class Scores:
    """What the attacker measured of canaries that took part, and of those that did not."""

    in_canary_scores: Vector
    out_canary_scores: Vector

    @property
    def count(self) -> int:
        """How many canaries."""
        return len(self.in_canary_scores) + len(self.out_canary_scores)


def noise_multiplier_upper_bound(scores: Scores, significance: float) -> float:
    """An upper confidence limit on noise over contribution, from Gaussian scores; infinite if they look alike.

    The spread within both groups is bounded by chi-square, the distance of their means by Student's t, half the
    significance each.
    """
    inside, outside = scores.in_canary_scores, scores.out_canary_scores
    freedom = scores.count - 2
    if min(len(inside), len(outside)) < 2:
        return math.inf
    squares = float(((inside - inside.mean()) ** 2).sum() + ((outside - outside.mean()) ** 2).sum())
    spread = math.sqrt(squares / stats.chi2.ppf(significance / 2, freedom))
    error = math.sqrt(squares / freedom * (1 / len(inside) + 1 / len(outside)))
    distance = float(inside.mean() - outside.mean()) - float(stats.t.isf(significance / 2, freedom)) * error
    return spread / distance if distance > 0 else math.inf


def clopper_pearson(hits: int, trials: int, significance: float) -> tuple[float, float]:
    """A lower and an upper confidence limit on a probability, each wrong with probability `significance`."""
    limits = stats.binomtest(hits, trials).proportion_ci(1 - 2 * significance, method="exact")
    return float(limits.low), float(limits.high)


def epsilon_from_gdp(scores: Scores, delta: float, significance: float) -> float:
    """A lower bound for scores that are Gaussian with and without the canary."""
    noise = noise_multiplier_upper_bound(scores, significance)
    if noise == 0 or math.isinf(noise):
        return math.inf if noise == 0 else 0.0
    return float(get_epsilon_gaussian(noise, delta))


def epsilon_clopper_pearson(scores: Scores, delta: float, significance: float) -> float:
    """A lower bound from the error rates of the best threshold, which half of the scores choose and half judge.

    Holds whatever the mechanism, if the canaries' scores are independent: (epsilon, delta) means that a true positive
    is at most e^epsilon times as likely as a false one, up to delta, and the same for negatives.
    """
    inside, outside = scores.in_canary_scores, scores.out_canary_scores
    choosing, judging = Scores(inside[::2], outside[::2]), Scores(inside[1::2], outside[1::2])
    if min(len(judging.in_canary_scores), len(judging.out_canary_scores)) < 1:  # it is the smaller half
        return 0.0
    values = np.concatenate([choosing.in_canary_scores, choosing.out_canary_scores])
    marks = np.quantile(values, np.linspace(0.01, 0.99, 99))
    best = max(marks, key=lambda mark: _by_rates(choosing, mark, delta, significance))
    return max(0.0, _by_rates(judging, best, delta, significance))


def _by_rates(scores: Scores, mark: float, delta: float, significance: float) -> float:
    """The better of "above the mark is in" and "below it is out"; a quarter of the significance for each rate."""
    bounds = []
    for hits, misses in (
        (scores.in_canary_scores > mark, scores.out_canary_scores > mark),
        (scores.out_canary_scores <= mark, scores.in_canary_scores <= mark),
    ):
        true = clopper_pearson(int(hits.sum()), len(hits), significance / 4)[0] - delta
        false = clopper_pearson(int(misses.sum()), len(misses), significance / 4)[1]
        bounds.append(math.log(true / false) if true > 0 else -math.inf)
    return max(bounds)


def epsilon_one_run(scores: Scores, delta: float, significance: float) -> float:
    """A lower bound from guessing coins: the highest scores were in, the lowest were out, the rest is left open.

    Needs nothing of the mechanism or the scores, only that each canary's coin was fair and its own. Several numbers
    of guesses are tried, each with its share of the significance.
    """
    values = np.concatenate([scores.in_canary_scores, scores.out_canary_scores])
    total = len(values)
    truth = np.arange(total) < len(scores.in_canary_scores)
    shuffled = PublicRandomness.fresh().permutation(total, (0,)).numpy()  # ties are guessed at random
    ranked = truth[shuffled][np.argsort(-values[shuffled], kind="stable")]
    numbers = sorted({max(1, int(total * share) // 2) for share in (0.02, 0.05, 0.1, 0.25, 0.5, 1.0)})
    bounds, share = [0.0], significance / len(numbers)
    for each in numbers:
        if 2 * each <= total:
            right = int(ranked[:each].sum() + (~ranked[total - each :]).sum())
            bounds.append(epsilon_of_guesses(total, 2 * each, right, delta, share))
    return max(bounds)


def epsilon_of_guesses(canaries: int, guesses: int, right: int, delta: float, significance: float) -> float:
    """The least epsilon at which so many right guesses have a chance above `significance`."""

    def excess(epsilon: float) -> float:
        return one_run_p_value(canaries, guesses, right, epsilon, delta) - significance

    if excess(0.0) > 0:
        return 0.0
    if excess(HIGHEST) <= 0:
        return math.inf
    return max(0.0, float(optimize.brentq(excess, 0.0, HIGHEST, xtol=XTOL)) - 2 * XTOL)  # stays a lower bound


def one_run_p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
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
