import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsedp.core.errors import SparseDPError
from sparsedp.methods.autoratio import AutoRatio, best_count
from sparsedp.methods.observation import Observation
from sparsedp.methods.scores import Coherent, Energy


def accumulate(auto, gradients, variance):
    state = auto.init(gradients.shape[1])
    for step, gradient in enumerate(gradients):
        seen = Observation(torch.tensor(gradient), torch.full((gradients.shape[1],), variance).double())
        state = auto.update(state, step, seen)
    return state


def test_the_first_half_ranks_and_the_second_half_estimates():
    rng = np.random.default_rng(0)
    g = rng.standard_normal((7, 5))
    auto = AutoRatio(Energy(), steps=7)
    state = accumulate(auto, g, 0.25)
    np.testing.assert_allclose(auto.ranking_scores(state), (g[:3] ** 2).mean(0) - 0.25)
    np.testing.assert_allclose(auto.energies(state), g[[4, 6]].mean(0) * g[[3, 5]].mean(0))


def test_hand_computed_choice():
    order = torch.tensor([2, 0, 3, 1])
    energies = torch.tensor([3.0, -0.5, 5.0, 1.0]).double()
    # Errors for k = 1..4 with noise 1.5: (3+1-.5)+1.5, (1-.5)+3, -.5+4.5, 0+6.
    assert best_count(order, energies, 1.5) == 2
    assert best_count(order, energies, 0.5) == 3
    assert best_count(order, energies, 100.0) == 1
    assert best_count(order, energies, 0.0) == 3
    # Energy equal to its noise is a tie, and goes to the smaller support.
    assert best_count(order, energies, 1.0) == 2


@given(st.integers(1, 30), st.integers(0, 10**6), st.floats(0, 2))
def test_the_choice_minimises_the_error_of_proposition_5_1(dimension, seed, variance):
    rng = np.random.default_rng(seed)
    energies, order = rng.standard_normal(dimension), rng.permutation(dimension)
    errors = [energies[order[k:]].sum() + k * variance for k in range(1, dimension + 1)]
    chosen = best_count(torch.from_numpy(order), torch.from_numpy(energies), variance)
    assert errors[chosen - 1] == pytest.approx(min(errors), abs=1e-9)


def test_energy_estimates_are_unbiased_and_free_of_the_noise_floor():
    """z-tests at three true gradients, false-alarm rate below 1e-6 in all."""
    repeats, steps, noise = 30_000, 12, 0.8
    truth = np.repeat([0.0, 0.4, -1.0], repeats)
    g = truth + noise * np.random.default_rng(3).standard_normal((steps, truth.size))
    auto = AutoRatio(Energy(), steps)
    estimates = auto.energies(accumulate(auto, g, noise**2)).numpy().reshape(3, repeats)
    for values, G in zip(estimates, [0.0, 0.4, -1.0], strict=True):
        each = noise**2 / 3  # variance of a mean over three of the six steps
        spread = math.sqrt((2 * each * G**2 + each**2) / repeats)
        assert abs(values.mean() - G**2) < 5.2 * spread
    assert (estimates[0] < 0).mean() == pytest.approx(0.5, abs=5.2 * 0.5 / math.sqrt(repeats))


def test_it_finds_about_the_coordinates_worth_their_noise():
    """100 of 2,000 coordinates carry energy far above the noise variance, the rest none: k is near 100."""
    d, strong, noise, steps = 2000, 100, 0.1, 40
    truth = np.zeros(d)
    truth[:strong] = 0.5
    rng = np.random.default_rng(11)
    g = truth + noise * rng.standard_normal((steps, d))
    for score in (Energy(), Coherent()):
        auto = AutoRatio(score, steps)
        state = accumulate(auto, g, noise**2)
        order = torch.sort(auto.ranking_scores(state), descending=True).indices
        assert 100 <= best_count(order, auto.energies(state), noise**2) <= 120


def test_a_warm_up_too_short_is_refused_and_lost_parts_are_noticed():
    with pytest.raises(SparseDPError, match="got a warm-up of 2 steps"):
        AutoRatio(Energy(), steps=2)
    auto = AutoRatio(Energy(), steps=3)
    assert auto.is_complete(accumulate(auto, np.ones((3, 2)), 0.0))
    assert not auto.is_complete(accumulate(auto, np.ones((2, 2)), 0.0))
