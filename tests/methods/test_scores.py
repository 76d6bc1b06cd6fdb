import math

import numpy as np
import pytest
import torch
from method_tools import release

from sparsedp.errors import SparseDPError
from sparsedp.methods.scores import (
    ByScore,
    Coherent,
    Energy,
    Magnitude,
    Observation,
    RandomOrder,
    Ranked,
    get_ranking,
    observe_dense,
    observe_released,
    ranking_names,
    register_ranking,
)
from sparsedp.parameters import Support

SCORES: list[ByScore] = [Energy(), Magnitude(), Ranked(), Coherent()]
by_name = pytest.mark.parametrize("score", SCORES, ids=lambda score: score.name)


def accumulate(score, gradients, variances):
    state = score.init(gradients.shape[1])
    for gradient, variance in zip(gradients, variances, strict=True):
        state = score.update(state, Observation(torch.tensor(gradient), torch.tensor(variance)))
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


def test_hand_computed_scores_of_two_steps():
    g, v = np.array([[3.0, -1.0], [1.0, 1.0]]), np.array([[1.0, 0.5], [2.0, 0.5]])
    assert accumulate(Energy(), g, v).tolist() == [(9 + 1 - 3) / 2, (1 + 1 - 1) / 2]
    assert accumulate(Magnitude(), g, v).tolist() == [2.0, 1.0]
    assert accumulate(Ranked(), g, v).tolist() == [4.0, 0.0]
    assert accumulate(Coherent(), g, v).tolist() == [4 - 3 / 4, 0 - 1 / 4]


@by_name
def test_update_leaves_the_old_state_alone_and_counts_in_float64(score):
    state = score.init(3)
    before = {name: value.clone() for name, value in state.items()}
    seen = Observation(torch.tensor([1.0, 2.0, 3.0]).double(), torch.ones(3).double())
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


def test_the_energy_score_without_its_noise_floor_would_be_biased():
    """The simulation above can tell: forgetting the floor moves the mean by many standard errors."""
    rng = np.random.default_rng(7)
    g = 0.7 * rng.standard_normal((8, 40_000))
    raw = accumulate(Energy(), g, np.zeros_like(g))
    assert raw.mean() / (raw.std() / math.sqrt(raw.size)) > 100


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
    assert {"coherent", "energy", "magnitude", "random", "ranked"} <= set(ranking_names())
    assert get_ranking("random") == RandomOrder()
    with pytest.raises(SparseDPError, match="got 'enrgy', expected one of"):
        get_ranking("enrgy")
    with pytest.raises(SparseDPError, match="taken"):
        register_ranking(Magnitude(name="energy"))
