"""test_scores"""

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
    EverySteps,
    GradualCooling,
    PerEpoch,
    PiecewiseConstant,
    ProgressiveUnfreezing,
    active_count,
)
from sparsedp.methods.scores import (
    ByScore,
    Coherent,
    Energy,
    Magnitude,
    NoisyGradient,
    RandomOrder,
    Ranked,
    get_ranking,
    observe_dense,
    observe_released,
    register_ranking,
)
from sparsedp.parameters import Support

SCORES: list[ByScore] = [Energy(), Magnitude(), Ranked(), Coherent()]
by_name = pytest.mark.parametrize("score", SCORES, ids=lambda score: score.name)


def accumulate(score, gradients, variances):
    state = score.init(gradients.shape[1])
    for gradient, variance in zip(gradients, variances, strict=True):
        state = score.update(state, NoisyGradient(torch.tensor(gradient), torch.tensor(variance)))
    return score.scores(state).numpy()


def written_out(name, g, v):
    """Each score's definition in one line of NumPy."""
    return {
        "energy": lambda: (g**2).mean(0) - v.mean(0),
        "magnitude": lambda: np.abs(g).mean(0),
        "ranked": lambda: np.abs(g.sum(0)),
        "coherent": lambda: g.mean(0) ** 2 - v.mean(0) / len(g),
    }[name]()


@by_name
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 9])
def test_a_score_is_its_definition_even_when_the_noise_differs_by_step_and_coordinate(score, steps):
    rng = np.random.default_rng(steps)
    g, v = rng.standard_normal((steps, 11)), rng.random((steps, 11))
    np.testing.assert_allclose(accumulate(score, g, v), written_out(score.name, g, v), rtol=1e-12, atol=1e-14)


@by_name
def test_update_leaves_the_old_state_alone_and_counts_in_float64(score):
    state = score.init(3)
    before = {name: value.clone() for name, value in state.items()}
    seen = NoisyGradient(torch.tensor([1.0, 2.0, 3.0]).double(), torch.ones(3).double())
    after = score.update(state, seen)
    assert all(torch.equal(state[name], before[name]) for name in before)
    assert set(after) == set(state)
    assert score.scores(after).dtype == torch.float64
    assert all(value.dtype in (torch.float64, torch.int64) for value in after.values())


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
    noise_scales = np.repeat([noise, noise, noise], repeats)
    rng = np.random.default_rng(7)
    g = truth + noise_scales * rng.standard_normal((steps, truth.size))
    values = accumulate(score, g, np.broadcast_to(noise_scales**2, g.shape).copy()).reshape(3, repeats)
    for estimates, G in zip(values, [0.0, 0.5, -1.3], strict=True):
        expected = variance_of(noise**2, G, steps)
        z = (estimates.mean() - G**2) / math.sqrt(expected / repeats)
        assert abs(z) < 5.1
        # The fourth moment of these quadratic forms is bounded by 15 variances^2 (chi-square with one degree).
        assert abs(estimates.var() / expected - 1) < 5.1 * math.sqrt(14 / repeats)


def test_frozen_coordinates_show_fresh_noise_with_its_own_variance():
    support = Support([0, 2], 4)
    released = release(support, torch.tensor([5.0, -1.0]), torch.tensor([0.1, 0.3]))
    seen = observe_released(released, torch.tensor([9.0, 1.0, 9.0, -2.0]), 0.5)
    assert seen.gradient.tolist() == [5.0, 0.5, -1.0, -1.0]
    np.testing.assert_allclose(seen.noise_variance, [0.01, 0.25, 0.09, 0.25])


@pytest.mark.parametrize("scale", [torch.tensor(0.3).expand(3), torch.tensor([0.1, 0.2, 0.3])])
def test_a_dense_release_shows_the_variance_of_its_noise(scale):
    seen = observe_dense(release(Support.full(3), torch.tensor([5.0, -1.0, 0.0]), scale))
    assert torch.equal(seen.noise_variance, scale.double() ** 2)
    before = seen.gradient.clone()
    energy = Energy().update({"sum": torch.ones(3, dtype=torch.float64), "steps": torch.tensor(1)}, seen)
    assert torch.equal(energy["sum"], 1 + (before**2 - scale.double() ** 2))
    assert torch.equal(seen.gradient, before)


def test_a_sparse_release_is_not_taken_for_a_dense_one():
    sparse = release(Support([0], 2), torch.tensor([1.0]))
    with pytest.raises(SparseDPError, match="expected the full support"):
        observe_dense(sparse)
    with pytest.raises(SparseDPError, match="expected d=2"):
        observe_released(sparse, torch.zeros(3), 1.0)


def test_rankings_are_found_by_name_and_names_are_unique():
    assert get_ranking("random") == RandomOrder()
    assert get_ranking("energy") == Energy()
    with pytest.raises(SparseDPError, match="got 'enrgy', expected one of"):
        get_ranking("enrgy")
    with pytest.raises(SparseDPError, match="taken"):
        register_ranking(Magnitude(name="energy"))


def test_hand_computed_update_moves_beta_with_the_old_alpha():
    support = Support([0, 2], 3)
    decays = Decays(centre=0.9, variance=0.99, stabilizer=0.5)
    first = Statistics.fresh(support).updated(release(support, torch.tensor([2.0, -1.0])), decays)
    np.testing.assert_allclose(first.alpha, [0.2, -0.1])
    np.testing.assert_allclose(first.beta, [0.99 + 0.01 * 4, 0.99 + 0.01 * 1])
    second = first.updated(release(support, torch.tensor([1.0, 1.0])), decays)
    np.testing.assert_allclose(second.alpha, [0.9 * 0.2 + 0.1, -0.09 + 0.1])
    np.testing.assert_allclose(
        second.beta, [0.99 * 1.03 + 0.01 * (1 - 0.2) ** 2, 0.99 * 1.0 + 0.01 * (1 + 0.1) ** 2]
    )


def some_statistics() -> Statistics:
    return Statistics(
        Support([0, 2, 5], 6), torch.tensor([1.0, 2.0, 3.0]).double(), torch.tensor([4.0, 9, 16]).double()
    )


def test_the_geometry_is_centre_alpha_and_scale_root_beta_plus_mu():
    geometry = some_statistics().geometry(Decays(stabilizer=0.5))
    assert geometry.centre.tolist() == [1.0, 2.0, 3.0]
    assert geometry.scale.tolist() == [2.5, 3.5, 4.5]
    assert geometry.noise_scale(0.1, 3).tolist() == pytest.approx([0.25, 0.35, 0.45])


@pytest.mark.parametrize(
    ("indices", "alpha", "beta"),
    [
        ([2], [2], [9]),
        ([1, 2, 3], [0, 2, 0], [1, 9, 1]),
        (range(6), [1, 0, 2, 0, 0, 3], [4, 1, 9, 1, 1, 16]),
        ([], [], []),
    ],
)
def test_coordinates_that_stay_keep_their_statistics_and_others_start(indices, alpha, beta):
    moved = some_statistics().moved_to(Support(list(indices), 6))
    assert moved.alpha.tolist() == alpha
    assert moved.beta.tolist() == beta


@pytest.mark.parametrize(
    "bad",
    [{"centre": 1.0}, {"variance": -0.1}, {"stabilizer": 0.0}, {"stabilizer": float("inf")}, {"centre": 2}],
)
def test_constants_that_would_divide_by_zero_or_never_forget_are_refused(bad):
    with pytest.raises(SparseDPError, match="got"):
        Decays(**bad)


def ratios(schedule, periods, target):
    return [schedule.ratio(period, periods, Fraction(repr(target))) for period in range(periods)]


@pytest.mark.parametrize(
    ("schedule", "target", "expected"),
    [
        (Constant(), 0.3, ["3/10"] * 3),
        (GradualCooling(), 0.2, ["1", "4/5", "3/5", "2/5", "1/5"]),
        (GradualCooling(), 0.2, ["1/5"]),
        (ProgressiveUnfreezing(), 0.6, ["3/5"] * 3),
        (ProgressiveUnfreezing((0.25, 0.5)), 0.2, ["1/5", "1/4", "1/2", "1/2", "1/2"]),
        (ProgressiveUnfreezing((0.3, 0.5)), 0.4, ["2/5", "2/5", "1/2"]),
        (PiecewiseConstant((1.0, 0.1, 0.7)), 0.3, ["1", "1/10", "7/10", "7/10", "7/10"]),
    ],
)
def test_schedule_gives_the_ratios_written_out(schedule, target, expected):
    assert ratios(schedule, len(expected), target) == [Fraction(text) for text in expected]


@given(st.integers(1, 60), st.integers(1, 1000))
def test_cooling_agrees_with_the_papers_formula_and_never_rises(periods, thousandths):
    target = thousandths / 1000
    values = ratios(GradualCooling(), periods, target)
    assert values == sorted(values, reverse=True)
    assert values[-1] == Fraction(thousandths, 1000)
    for e, value in enumerate(values):
        r = (1 - target) * (e / (periods - 1) if periods > 1 else 1)
        assert float(value) == pytest.approx(1 - r, abs=1e-12)


def test_the_active_count_does_not_lose_one_to_rounding():
    assert math.floor(0.29 * 100) == 28
    assert active_count(exact_ratio(0.29), 100) == 29
    assert active_count(exact_ratio(0.3), 39_700) == 11_910
    assert active_count(Fraction(7, 23), 23) == 7
    assert active_count(exact_ratio(0.3 - 1e-12), 10**6) == 299_999


@given(st.integers(1, 10_000_000).flatmap(lambda d: st.tuples(st.integers(1, d), st.just(d))))
def test_a_ratio_computed_as_k_over_d_keeps_k(pair):
    k, d = pair
    assert active_count(exact_ratio(k / d), d) == k


def test_ratios_outside_zero_to_one_and_empty_supports_are_refused():
    for bad in (0, -0.1, 1.1, float("nan"), True, "0.2", None):
        with pytest.raises(SparseDPError, match="active_ratio: got"):
            exact_ratio(bad)
    with pytest.raises(SparseDPError, match="of d=100 coordinates is none"):
        active_count(exact_ratio(0.009), 100)
    with pytest.raises(SparseDPError, match="never fall"):
        ProgressiveUnfreezing((0.5, 0.4))
    with pytest.raises(SparseDPError, match="at least one"):
        PiecewiseConstant(())
    with pytest.raises(SparseDPError, match=r"listed schedule: got 0\.0"):
        PiecewiseConstant((0.5, 0.0))


def test_periods_per_epoch_start_where_equal_parts_of_the_epoch_do():
    assert PerEpoch().starts(steps=10, steps_per_epoch=4) == (0, 4, 8)
    assert PerEpoch(2).starts(steps=10, steps_per_epoch=5) == (0, 3, 5, 8)
    assert PerEpoch(3).starts(steps=7, steps_per_epoch=7) == (0, 3, 5)
    assert PerEpoch(3).starts(steps=3, steps_per_epoch=7) == (0,)
    assert EverySteps(4).starts(steps=10, steps_per_epoch=5) == (0, 4, 8)


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


def test_clocks_refuse_nonsense():
    for bad in (0, -1, 1.5, True):
        with pytest.raises(SparseDPError, match="whole number >= 1"):
            PerEpoch(bad)
        with pytest.raises(SparseDPError, match="whole number >= 1"):
            EverySteps(bad)
