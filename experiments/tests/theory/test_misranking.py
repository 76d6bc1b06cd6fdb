import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from sparsedp.errors import SparseDPError
from sparsedp_experiments.theory.misranking import (
    Pair,
    coherent_variance,
    misranking_bernstein,
    misranking_chebyshev,
    misranking_chernoff,
    misranking_coherent,
    misranking_energy,
    score_variance,
)

PAIRS = [
    Pair(1.0, 0.0, 1.0, 1),
    Pair(1.0, 0.5, 1.0, 10),
    Pair(0.3, 0.1, 1.0, 50),
    Pair(0.2, 0.0, 1.0, 200),
    Pair(2.0, 1.8, 0.5, 7),
    Pair(1e-3, 9e-4, 2e-3, 100),
]


def mixture(pair):
    """An independent computation: chi-squares whose degrees of freedom are Poisson, compared by a beta integral."""
    p, q = (pair.steps * (g / pair.noise_std) ** 2 / 2 for g in (pair.larger, pair.smaller))
    i, j = np.arange(int(p + 12 * math.sqrt(p) + 40)), np.arange(int(q + 12 * math.sqrt(q) + 40))
    swapped = special.betainc(pair.steps / 2 + i[:, None], pair.steps / 2 + j, 0.5)
    return float(stats.poisson.pmf(i, p) @ swapped @ stats.poisson.pmf(j, q))


@pytest.mark.parametrize("pair", PAIRS)
def test_the_exact_probability_agrees_with_the_poisson_mixture(pair):
    assert misranking_energy(pair) == pytest.approx(mixture(pair), rel=1e-8)


@pytest.mark.parametrize("pair", PAIRS)
def test_the_exact_probabilities_agree_with_monte_carlo(pair):
    """Two z-tests for each of six pairs; false-alarm rate below 1e-5 in all."""
    rng, draws = np.random.default_rng(5), 40_000

    def released(g):
        return g + pair.noise_std * rng.standard_normal((draws, pair.steps))

    p, q = released(pair.larger), released(pair.smaller)
    energy = ((p**2).mean(1) < (q**2).mean(1)).mean()
    coherent = (p.mean(1) ** 2 < q.mean(1) ** 2).mean()
    for seen, exact in [(energy, misranking_energy(pair)), (coherent, misranking_coherent(pair))]:
        assert abs(seen - exact) < 5.2 * math.sqrt(exact * (1 - exact) / draws) + 1e-9


def test_with_one_step_the_two_scores_are_the_same():
    for pair in [Pair(1.0, 0.2, 0.7, 1), Pair(3.0, 2.0, 1.0, 1), Pair(0.1, 0.0, 1.0, 1)]:
        assert misranking_energy(pair) == pytest.approx(misranking_coherent(pair), rel=1e-10)


pairs = st.builds(
    lambda larger, share, noise, steps: Pair(larger, share * larger, noise, steps),
    st.floats(0.05, 2),
    st.floats(0, 0.97),
    st.floats(0.4, 4),
    st.integers(1, 100),
)


@given(pairs)
def test_no_bound_is_ever_below_the_exact_probability(pair):
    exact = misranking_energy(pair)
    assert 0 <= exact <= 0.5 + 1e-9
    chernoff = misranking_chernoff(pair)
    assert exact <= chernoff * (1 + 1e-9) + 1e-14
    assert chernoff <= misranking_bernstein(pair) * (1 + 1e-9)
    assert exact <= misranking_chebyshev(pair)


@given(pairs)
def test_the_exact_probability_falls_with_more_steps(pair):
    longer = Pair(pair.larger, pair.smaller, pair.noise_std, pair.steps + 20)
    assert misranking_energy(longer) <= misranking_energy(pair) + 1e-12
    assert misranking_coherent(longer) <= misranking_coherent(pair) + 1e-12


def test_how_loose_the_bounds_are_on_a_typical_pair():
    pair = Pair(0.3, 0.1, 1.0, 700)  # a signal well under the noise, a warm-up of 700 steps
    exact = misranking_energy(pair)
    assert exact == pytest.approx(0.16, abs=0.01)
    assert misranking_chebyshev(pair) == pytest.approx(0.98, abs=0.01)
    assert 2 < misranking_chernoff(pair) / exact < 5
    assert misranking_chernoff(pair) < misranking_bernstein(pair) < 0.75


def test_hand_computed_bounds():
    pair = Pair(2.0, 1.0, 1.0, 10)  # gap 3, spread 1 + 5
    assert misranking_chebyshev(pair) == pytest.approx(4 * 6 / 90)
    assert misranking_bernstein(pair) == pytest.approx(math.exp(-3 / 32 * 10 * 9 / 6))


def test_the_coherent_score_swaps_less_under_the_papers_own_model():
    pair = Pair(0.3, 0.1, 1.0, 100)
    assert misranking_coherent(pair) < 0.25 * misranking_energy(pair)


def test_both_scores_are_unbiased_with_the_stated_variances():
    """Lemma 5.2 and both variance formulas; z-tests on mean and variance, false-alarm rate below 1e-5 in all."""
    rng, draws = np.random.default_rng(6), 60_000
    for gradient, noise, steps in [(0.0, 0.8, 9), (0.5, 1.0, 12), (2.0, 0.3, 5)]:
        g = gradient + noise * rng.standard_normal((draws, steps))
        energy = (g**2).mean(1) - noise**2
        coherent = g.mean(1) ** 2 - noise**2 / steps
        for scores, variance in [
            (energy, score_variance(gradient, noise, steps)),
            (coherent, coherent_variance(gradient, noise, steps)),
        ]:
            assert abs(scores.mean() - gradient**2) < 5.2 * math.sqrt(variance / draws)
            squares = (scores - gradient**2) ** 2
            assert abs(squares.mean() - variance) < 5.2 * squares.std() / math.sqrt(draws)


def test_a_pair_in_the_wrong_order_is_refused():
    with pytest.raises(SparseDPError, match="expected 0 <= "):
        Pair(1.0, 1.0, 1.0, 5)
    with pytest.raises(SparseDPError, match="noise_std"):
        Pair(1.0, 0.5, 0.0, 5)
