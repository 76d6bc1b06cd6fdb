"""Estimators against closed forms, exhaustive sums and simulations: they bound from below, and come close."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian
from scipy import stats

from sparsedp.auditing.estimators import (
    Scores,
    epsilon_clopper_pearson,
    epsilon_from_gdp,
    epsilon_one_run,
    noise_multiplier_upper_bound,
    one_run_p_value,
)
from sparsedp.privacy.accounting import accountant
from sparsedp.privacy.plan import SampledGaussian


def gaussian_scores(noise: float, count: int, seed: int) -> Scores:
    draws = np.random.default_rng(seed).standard_normal((2, count)) * noise
    return Scores(draws[0] + 1, draws[1])


def test_the_noise_limit_covers_the_truth_as_often_as_it_says():
    """2,000 audits at a risk of 0.1: more than 274 below the truth happens less than once in 10^6 runs."""
    missed = sum(
        noise_multiplier_upper_bound(gaussian_scores(2.0, 60, seed), 0.1) < 2.0 for seed in range(2000)
    )
    assert missed <= 274


def test_the_chance_of_guesses_is_the_theorems_sum():
    """Theorem 5.2 of Steinke et al., term by term."""
    m, r, v, epsilon, delta = 30, 20, 15, 0.7, 1e-3
    p = math.exp(epsilon) / (1 + math.exp(epsilon))
    mass = [math.comb(r, i) * p**i * (1 - p) ** (r - i) for i in range(r + 1)]
    slope = max(sum(mass[v - i : v]) / i for i in range(1, v + 1))
    assert one_run_p_value(m, r, v, epsilon, delta) == pytest.approx(sum(mass[v:]) + 2 * m * delta * slope)


def test_randomised_response_is_never_found_to_leak_more_than_it_does():
    """Each coin told truthfully with e/(1+e): exactly epsilon 1; a bound above it happens with at most 1e-7."""
    truth = np.random.default_rng(3).random(4000) < 0.5
    told = truth ^ (np.random.default_rng(4).random(4000) > math.e / (1 + math.e))
    scores = Scores(told[truth].astype(float), told[~truth].astype(float))
    assert 0.7 < epsilon_one_run(scores, 0.0, 1e-7) <= 1.0


def test_thresholds_bound_a_gaussian_from_below():
    truth = get_epsilon_gaussian(1.0, 1e-3)
    found = epsilon_clopper_pearson(gaussian_scores(1.0, 20_000, 5), 1e-3, 1e-7)
    assert 0.4 * truth < found <= truth


@pytest.mark.parametrize("rate", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("noise", [0.6, 1.0, 4.0])
@pytest.mark.parametrize("steps", [20, 200])
def test_the_distance_of_summed_evidence_never_promises_more_than_the_plan_leaks(rate, noise, steps):
    """Means and variances of the evidence by integration, as if there were infinitely many canaries."""
    x = np.linspace(-40, 41, 200_001) * noise
    evidence = (2 * x - 1) / (2 * noise**2)
    if rate < 1:
        evidence = np.logaddexp(math.log1p(-rate), math.log(rate) + evidence)
    outside = stats.norm.pdf(x, 0, noise)
    inside = (1 - rate) * outside + rate * stats.norm.pdf(x, 1, noise)
    means = [np.trapezoid(density * evidence, x) for density in (inside, outside)]
    squares = [np.trapezoid(density * evidence**2, x) for density in (inside, outside)]
    variance = sum(s - m**2 for s, m in zip(squares, means, strict=True)) / 2
    shown = get_epsilon_gaussian(math.sqrt(variance / steps) / (means[0] - means[1]), 1e-5)
    claimed = accountant("pld").epsilon([SampledGaussian(rate, noise, steps)], 1e-5)
    assert shown <= claimed * 1.0001
    assert rate < 1 or shown > 0.999 * claimed


def test_the_shape_of_many_scores_comes_close():
    truth = get_epsilon_gaussian(2.0, 1e-5)
    assert 0.9 * truth < epsilon_from_gdp(gaussian_scores(2.0, 40_000, 6), 1e-5, 1e-6) <= truth
    assert epsilon_from_gdp(Scores(np.ones(9), np.zeros(9)), 1e-5, 0.05) == math.inf
    assert epsilon_from_gdp(Scores(np.zeros(9), np.ones(9)), 1e-5, 0.05) == 0.0
