"""When a support pays, and how often two coordinates are ranked in the wrong order."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from sparsedp.diagnostics import (
    SplitEnergies,
    proxy_concentration,
    pure_noise,
    split_concentration,
)
from sparsedp.parameters import Support
from sparsedp_experiments.theory.criteria import (
    one_step,
    random_signal_loss,
    split_of,
)
from sparsedp_experiments.theory.misranking import (
    Pair,
    misranking_bernstein,
    misranking_chebyshev,
    misranking_chernoff,
    misranking_coherent,
    misranking_energy,
)


def test_hand_computed_criterion():
    step = one_step(torch.tensor([3.0, 1.0, 0.5, 0.0]), Support([0, 1], 4), noise_std=0.5)
    assert (step.signal_loss, step.noise_saved, step.noise_kept) == (0.25, 0.5, 0.5)
    assert step.error == 0.75
    assert step.full_error == 1.0
    assert step.signal_loss < step.noise_saved
    worse = one_step(torch.tensor([3.0, 1.0, 0.5, 0.0]), Support([1, 2], 4), 0.5)
    assert worse.signal_loss > worse.noise_saved
    assert random_signal_loss(torch.tensor([3.0, 1.0, 0.0, 0.0]), 1) == pytest.approx(7.5)


def test_the_criterion_is_the_expected_error_of_a_noisy_restricted_step():
    """z-test of E||update - G||^2 against Prop. 5.1; false-alarm rate below 1e-6."""
    rng = np.random.default_rng(0)
    gradient, noise, support = rng.standard_normal(12), 0.4, Support([0, 3, 4, 9], 12)
    mask = support.mask().numpy()
    updates = mask * (gradient + noise * rng.standard_normal((40_000, 12)))
    errors = ((updates - gradient) ** 2).sum(1)
    expected = one_step(torch.from_numpy(gradient), support, noise).error
    assert abs(errors.mean() - expected) < 5 * errors.std() / math.sqrt(errors.size)


def splits(gradient, noise, repeats, seed, steps=8):
    """Many warm-ups over a fixed gradient: steps to rank by, then steps to measure with."""
    rng = np.random.default_rng(seed)
    for _ in range(repeats):
        released = gradient + noise * rng.standard_normal((2 * steps, gradient.size))
        order = np.argsort(-(released[:steps] ** 2).mean(0), kind="stable")
        yield split_of(torch.from_numpy(order), torch.from_numpy(released[steps:]), noise)


def test_a_random_ranking_has_split_concentration_k_over_d():
    """z-test over 400 warm-ups with signal under the noise; false-alarm rate below 1e-6."""
    rng = np.random.default_rng(5)
    gradient, shares = 0.5 * rng.standard_normal(400), []
    for split in splits(gradient, 1.0, 400, seed=6):
        shuffled = SplitEnergies(
            torch.from_numpy(rng.permutation(400)),
            split.first,
            split.second,
            split.first_variance,
            split.second_variance,
        )
        found = split_concentration(shuffled, 80)
        assert found.active_ratio == 0.2
        shares.append(found.share.value)
    assert abs(np.mean(shares) - 0.2) < 5 * np.std(shares) / 20 + 1e-3


def test_pure_noise_has_no_split_concentration_to_speak_of():
    """A total above three deviations has probability 0.0013 each; more than 5 of 300 below 1e-4."""
    found = [split_concentration(split, 40).share for split in splits(np.zeros(200), 1.0, 300, seed=7)]
    assert sum(share is not None for share in found) <= 5


@pytest.mark.parametrize("steps", [10, 20, 100, 700, 10_000])
def test_the_energy_scores_null_at_a_fifth_is_between_seven_and_eight_tenths(steps):
    assert 0.7 < pure_noise(200, 1000, steps).mean < 0.8


def test_the_coherent_scores_null_is_higher_still_and_a_long_warm_up_is_normal():
    assert pure_noise(200, 1000, 1).mean == pytest.approx(0.93, abs=0.001)
    assert pure_noise(200, 1000, 10**8).mean == pytest.approx(math.exp(-(0.8416212**2) / 2), abs=1e-3)


@pytest.mark.parametrize(("squares", "ratio"), [(1, 0.1), (5, 0.2), (50, 0.2), (50, 0.4), (5, 0.6)])
def test_the_pure_noise_null_agrees_with_simulation(squares, ratio):
    """z-test on the mean, F-like test on the deviation, 300 draws each; false-alarm rate below 1e-4 in all."""
    d, draws = 2000, 300
    k = int(ratio * d)
    rng = np.random.default_rng(8)
    null = pure_noise(k, d, squares)
    seen = []
    for _ in range(draws):
        scores = torch.from_numpy(rng.chisquare(squares, d) / squares - 1)
        seen.append(proxy_concentration(scores, Support(scores.argsort(descending=True)[:k], len(scores))))
    # The ratio of two sums is biased by the order of its variance.
    assert abs(np.mean(seen) - null.mean) < 5 * null.std / math.sqrt(draws) + 10 * null.std**2 + 1e-12
    if null.std:
        assert 0.8 < np.std(seen) / null.std < 1.25
        assert null.surprise(null.mean + 2 * null.std) == pytest.approx(2.0)


def test_proxy_concentration_by_hand():
    scores = torch.tensor([3.0, -1.0, 1.0, 0.0])
    assert proxy_concentration(scores, Support([0, 1], 4)) == 0.75
    assert proxy_concentration(-scores.abs(), Support([0], 4)) == 0.0
    assert pure_noise(10, 10, 3).mean == 1.0


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


def test_hand_computed_bounds():
    pair = Pair(2.0, 1.0, 1.0, 10)  # gap 3, spread 1 + 5
    assert misranking_chebyshev(pair) == pytest.approx(4 * 6 / 90)
    assert misranking_bernstein(pair) == pytest.approx(math.exp(-3 / 32 * 10 * 9 / 6))
