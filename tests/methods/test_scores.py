"""Scores, AdaDPIGU's statistics, ratio schedules and clocks, each against its definition written out."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from method_tools import release

from sparsedp._validate import exact_ratio
from sparsedp.errors import SparseDPError
from sparsedp.methods.method import Decays, Statistics
from sparsedp.methods.schedules import (
    Constant,
    EqualParts,
    EverySteps,
    GradualCooling,
    PerEpoch,
    ProgressiveUnfreezing,
    active_count,
)
from sparsedp.methods.scores import Coherent, Energy, Magnitude, NoisyGradient, Ranked, observe
from sparsedp.parameters import Support


def accumulate(score, gradients, variances):
    state = score.init(gradients.shape[1])
    for gradient, variance in zip(gradients, variances, strict=True):
        before = {name: value.clone() for name, value in state.items()}
        after = score.update(state, NoisyGradient(torch.tensor(gradient), torch.tensor(variance)))
        assert all(torch.equal(state[name], value) for name, value in before.items())
        state = after
    return score.scores(state).numpy()


@pytest.mark.parametrize(
    ("score", "written_out"),
    [
        (Energy(), lambda g, v: (g**2).mean(0) - v.mean(0)),
        (Magnitude(), lambda g, v: np.abs(g).mean(0)),
        (Ranked(), lambda g, v: np.abs(g.sum(0))),
        (Coherent(), lambda g, v: g.mean(0) ** 2 - v.mean(0) / len(g)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
@pytest.mark.parametrize("steps", [1, 2, 9])
def test_a_score_is_its_definition_even_when_the_noise_differs_by_step_and_coordinate(
    score, written_out, steps
):
    rng = np.random.default_rng(steps)
    g, v = rng.standard_normal((steps, 11)), rng.random((steps, 11))
    found = accumulate(score, g, v)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, written_out(g, v), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("score", "variance_of"),
    [
        (Energy(), lambda v, G, T: 2 * v**2 / T + 4 * v * G**2 / T),
        (Coherent(), lambda v, G, T: 2 * v**2 / T**2 + 4 * v * G**2 / T),
    ],
    ids=["energy", "coherent"],
)
def test_scores_are_unbiased_for_the_squared_gradient_with_the_predicted_variance(score, variance_of):
    """TP-TopK Lemma 5.2 and design section 3, by simulation. False alarm below 1e-6 for each of 6 z-tests."""
    repeats, steps, noise = 40_000, 8, 0.7
    truth = np.repeat([0.0, 0.5, -1.3], repeats)
    g = truth + noise * np.random.default_rng(7).standard_normal((steps, truth.size))
    values = accumulate(score, g, np.full(g.shape, noise**2)).reshape(3, repeats)
    for estimates, G in zip(values, [0.0, 0.5, -1.3], strict=True):
        expected = variance_of(noise**2, G, steps)
        z = (estimates.mean() - G**2) / math.sqrt(expected / repeats)
        assert abs(z) < 5.1
        # The fourth moment of these quadratic forms is bounded by 15 variances^2 (chi-square with one degree).
        assert abs(estimates.var() / expected - 1) < 5.1 * math.sqrt(14 / repeats)


def test_frozen_coordinates_show_fresh_noise_with_its_own_variance_or_nothing():
    released = release(Support([0, 2], 4), torch.tensor([5.0, -1.0]), torch.tensor([0.1, 0.3]))
    seen = observe(released, torch.tensor([9.0, 1.0, 9.0, -2.0]), 0.5)
    assert seen.gradient.tolist() == [5.0, 0.5, -1.0, -1.0]
    np.testing.assert_allclose(seen.noise_variance, [0.01, 0.25, 0.09, 0.25])
    np.testing.assert_allclose(observe(released).gradient, [5.0, 0.0, -1.0, 0.0])
    np.testing.assert_allclose(observe(released).noise_variance, [0.01, 0.0, 0.09, 0.0])


@pytest.mark.parametrize(
    ("indices", "alpha", "beta"),
    [([1, 2, 3], [0, 2, 0], [1, 9, 1]), (range(6), [1, 0, 2, 0, 0, 3], [4, 1, 9, 1, 1, 16]), ([], [], [])],
)
def test_coordinates_that_stay_keep_their_statistics_and_others_start(indices, alpha, beta):
    known = torch.tensor([1.0, 2.0, 3.0]).double(), torch.tensor([4.0, 9.0, 16.0]).double()
    moved = Statistics(Support([0, 2, 5], 6), *known).moved_to(Support(list(indices), 6))
    assert moved.alpha.tolist() == alpha
    assert moved.beta.tolist() == beta


def ratios(schedule, periods, target):
    return [schedule.ratio(period, periods, Fraction(repr(target))) for period in range(periods)]


@pytest.mark.parametrize(
    ("schedule", "target", "expected"),
    [
        (Constant(), 0.3, ["3/10"] * 3),
        (GradualCooling(), 0.2, ["1", "4/5", "3/5", "2/5", "1/5"]),
        (GradualCooling(), 0.2, ["1/5"]),
        (GradualCooling(), 0.7, ["1", "9/10", "4/5", "7/10"]),
        (ProgressiveUnfreezing(), 0.6, ["3/5"] * 3),
        (ProgressiveUnfreezing((0.25, 0.5)), 0.2, ["1/5", "1/4", "1/2", "1/2", "1/2"]),
        (ProgressiveUnfreezing((0.3, 0.5)), 0.4, ["2/5", "2/5", "1/2"]),
    ],
)
def test_schedule_gives_the_ratios_written_out(schedule, target, expected):
    assert ratios(schedule, len(expected), target) == [Fraction(text) for text in expected]


def test_the_active_count_does_not_lose_one_to_rounding():
    assert math.floor(0.29 * 100) == 28
    assert active_count(exact_ratio(0.29), 100) == 29
    assert all(active_count(exact_ratio(k / d), d) == k for d in (23, 30, 9_999_991) for k in (1, 7, 11, d))
    assert active_count(exact_ratio(0.3 - 1e-12), 10**6) == 299_999


def test_periods_start_where_equal_parts_do():
    assert PerEpoch().starts(steps=10, steps_per_epoch=4) == (0, 4, 8)
    assert PerEpoch(2).starts(steps=10, steps_per_epoch=5) == (0, 3, 5, 8)
    assert PerEpoch(3).starts(steps=3, steps_per_epoch=7) == (0,)
    assert EverySteps(4).starts(steps=10, steps_per_epoch=5) == (0, 4, 8)
    assert EqualParts(4).starts(steps=10, steps_per_epoch=5) == (0, 2, 5, 7)
    assert EqualParts(4).starts(steps=2, steps_per_epoch=5) == (0, 1)


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 40))
def test_every_epoch_has_exactly_the_asked_number_of_periods_of_nearly_equal_length(per_epoch, epochs, steps):
    if per_epoch > steps:
        with pytest.raises(SparseDPError, match="at most one period per step"):
            PerEpoch(per_epoch).starts(steps * epochs, steps)
        return
    starts = PerEpoch(per_epoch).starts(steps * epochs, steps)
    assert len(starts) == per_epoch * epochs
    ends = [*starts[1:], steps * epochs]
    lengths = {end - start for start, end in zip(starts, ends, strict=True)}
    assert lengths <= {steps // per_epoch, -(-steps // per_epoch)}
    assert set(range(0, steps * epochs, steps)) <= set(starts)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: exact_ratio(0), "active_ratio: got 0"),
        (lambda: exact_ratio(float("nan")), "active_ratio: got nan"),
        (lambda: exact_ratio("0.2"), "active_ratio: got '0.2'"),
        (lambda: active_count(exact_ratio(0.009), 100), "of d=100 coordinates is none"),
        (lambda: ProgressiveUnfreezing((0.5, 0.4)), "never fall"),
        (lambda: EverySteps(1.5), "whole number >= 1"),
        (lambda: Decays(centre=1.0), r"\[0, 1\)"),
        (lambda: Decays(stabilizer=0.0), "small number > 0"),
    ],
)
def test_a_setting_without_meaning_is_refused(make, message):
    with pytest.raises(SparseDPError, match=message):
        make()
