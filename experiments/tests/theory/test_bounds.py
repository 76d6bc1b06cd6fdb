"""Bounds by hand, and against simulated descents on a quadratic whose every constant is known.

The simulated average is compared with the bound; a violation would have to exceed five standard errors of the
average, so the false-alarm rate of a true bound is below 1e-6 for each test.
"""

import math

import numpy as np
import pytest
import torch

from sparsedp.errors import SparseDPError
from sparsedp.parameters import Support
from sparsedp.randomness import PublicRandomness
from sparsedp_experiments.theory.bounds import (
    Descent,
    alignment_bound,
    budget_bound,
    clipping_bias_bound,
    kappa,
    noisy_bound,
    private_alignment_bound,
    progress_measure,
    projected_bound,
    retained_energy,
    retention_bound,
)

D, SMOOTH = 8, 2.0
CURVATURE = np.linspace(0.2, SMOOTH, D)
START = np.full(D, 1.5)
LOSS_GAP = float((CURVATURE * START**2).sum() / 2)
REPEATS = 400


def deviations(scale, count=20):
    """Symmetric deviations of known length: every one with its negative, so that the mean gradient is exact."""
    directions = np.random.default_rng(9).standard_normal((count // 2, D))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    return scale * np.concatenate([directions, -directions])


def clip(g, norm):
    return g * np.minimum(1, norm / np.maximum(np.linalg.norm(g, axis=-1, keepdims=True), 1e-300))


def sample_gradients(w, xi):
    """[repeats, samples, d]: the gradient of every sample at every repeat's weights."""
    return (CURVATURE * w)[:, None] + xi


def batch(rng, gradients, size):
    """The mean of a batch drawn with replacement, per repeat."""
    picks = rng.integers(0, gradients.shape[1], (gradients.shape[0], size))
    return np.take_along_axis(gradients, picks[..., None], axis=1).mean(1)


def below(average, bound):
    """Whether the mean over repeats respects the bound; and how loose it is."""
    error = average.std() / math.sqrt(average.size)
    assert average.mean() <= bound + 5 * error
    return bound / average.mean()


def random_masks(rng, rate):
    kept = round((1 - rate) * D)
    return (np.argsort(rng.random((REPEATS, D)), axis=1) < kept).astype(float)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_theorem_3_2_holds_for_noisy_descent_with_random_masks(rate):
    rng, T, B, noise, xi = np.random.default_rng(1), 60, 4, 2.0, deviations(1.0)
    w, total = np.tile(START, (REPEATS, 1)), np.zeros(REPEATS)
    for _ in range(T):
        total += ((CURVATURE * w) ** 2).sum(1)
        step = batch(rng, sample_gradients(w, xi), B) + noise / B * rng.standard_normal(w.shape)
        w = w - random_masks(rng, rate) * step / (SMOOTH * math.sqrt(T))
    bound = noisy_bound(
        loss_gap=LOSS_GAP, smoothness=SMOOTH, deviation_bound=1.0, noise_std=noise,
        dimension=D, batch_size=B, steps=T, rate=rate,
    )  # fmt: skip
    assert 1 < below(total / T, bound) < 20


@pytest.mark.parametrize(("rate", "noise_multiplier"), [(0.0, 0.0), (0.5, 0.0), (0.0, 1.0), (0.5, 1.0)])
def test_theorems_3_4_and_3_5_hold_for_clipped_descent(rate, noise_multiplier):
    rng, T, B, C, gamma, xi = np.random.default_rng(2), 50, 4, 1.0, 0.2, deviations(0.5)
    w, total = np.tile(START, (REPEATS, 1)), np.zeros(REPEATS)
    for _ in range(T):
        norms = np.linalg.norm(CURVATURE * w, axis=1)
        measure = np.minimum(norms, C / 4) * norms  # every deviation is shorter than 3C/4
        assert measure[0] == pytest.approx(
            progress_measure(torch.from_numpy(CURVATURE * w[0]), torch.from_numpy(xi), C)
        )
        total += measure
        masks = random_masks(rng, rate)
        clipped = clip(masks[:, None] * sample_gradients(w, xi), C)
        noise = noise_multiplier * C / B * rng.standard_normal(w.shape)
        w = w - gamma * (batch(rng, clipped, B) + masks * noise)
    run = Descent(
        loss_gap=LOSS_GAP, smoothness=SMOOTH, learning_rate=gamma, clip_norm=C,
        noise_multiplier=noise_multiplier, dimension=D, batch_size=B, steps=T,
    )  # fmt: skip
    least = 1 - rate  # Lemma 3.3: kappa is never below
    bound = run.private_bound(rate, least) if noise_multiplier else run.clipped_bound(least)
    assert 1 < below(total / T, bound) < 30


@pytest.mark.parametrize("C", [0.3, 1.0, 10.0])
def test_theorem_6_3_lemma_6_4_and_corollary_6_6_hold_with_clipping_bias_and_noise(C):
    rng, T, B, eta, nu = np.random.default_rng(3), 60, 4, 0.25, 0.05
    xi = deviations(0.6) + np.where(np.arange(20) % 5 == 0, 1.0, -0.25)[:, None]  # skewed, mean zero
    mask = np.isin(np.arange(D), [1, 4, 6, 7]).astype(float)
    w = np.tile(START, (REPEATS, 1))
    projected, full, biases, variances = (np.zeros((T, REPEATS)) for _ in range(4))
    for t in range(T):
        gradients = mask * sample_gradients(w, xi)
        clipped = clip(gradients, C)
        bias = clipped.mean(1) - gradients.mean(1)
        projected[t] = (gradients.mean(1) ** 2).sum(1)
        full[t] = ((CURVATURE * w) ** 2).sum(1)
        biases[t] = (bias**2).sum(1)
        variances[t] = ((clipped - clipped.mean(1, keepdims=True)) ** 2).sum(2).mean(1) / B
        for r in range(0, REPEATS, 40):
            norms = torch.from_numpy(np.linalg.norm(gradients[r], axis=1))
            assert math.sqrt(biases[t, r]) <= clipping_bias_bound(norms, C) + 1e-12
        noise = nu * rng.standard_normal(w.shape)
        w = w - eta * (batch(rng, clipped, B) + mask * noise)
    bound = projected_bound(
        loss_gap=LOSS_GAP - float(((1 - mask) * CURVATURE * START**2).sum() / 2), smoothness=SMOOTH,
        learning_rate=eta, steps=T, squared_biases=list(biases.mean(1)), batch_variance=float(variances.max()),
        mean_active=4, noise_std=nu,
    )  # fmt: skip
    below(projected.mean(0), bound.total)
    alpha = projected.mean() / full.mean()
    below(full.mean(0), bound.full_gradient(alpha))
    assert (bound.clipping_bias > 1e-6) == (C < 10)


def test_theorem_16_holds_with_k_for_d_and_the_noise_over_alpha():
    rng, T, B, noise, xi = np.random.default_rng(4), 60, 4, 2.0, deviations(1.0)
    support = Support([2, 5, 6, 7], D)
    mask = support.mask().double().numpy()
    w, total, least = np.tile(START, (REPEATS, 1)), np.zeros(REPEATS), 1.0
    for _ in range(T):
        total += ((CURVATURE * w) ** 2).sum(1)
        least = min(least, *(retained_energy(torch.from_numpy(CURVATURE * v), support) for v in w))
        step = batch(rng, sample_gradients(w, xi), B) + noise / B * rng.standard_normal(w.shape)
        w = w - mask * step / (SMOOTH * math.sqrt(T))
    bound = retention_bound(
        loss_gap=LOSS_GAP, smoothness=SMOOTH, steps=T, retained=least, deviation_bound=1.0,
        noise_std=noise, active=4, batch_size=B,
    )  # fmt: skip
    below(total / T, bound)


def test_theorem_17_holds_in_one_step_and_13_over_many():
    rng, B, C, eta, multiplier, xi, n = np.random.default_rng(5), 4, 1.0, 0.3, 2.0, deviations(0.5), 20_000
    mask = np.isin(np.arange(D), [2, 5, 6, 7]).astype(float)
    w = np.tile(START, (n, 1))
    clipped = batch(rng, np.tile(clip(mask * sample_gradients(w[:1], xi), C), (n, 1, 1)), B)
    after = w - eta * (clipped + mask * multiplier * C / B * rng.standard_normal(w.shape))
    decrease = (CURVATURE * (w**2 - after**2)).sum(1) / 2
    alignment = (CURVATURE * w * clipped).sum(1)
    common = {"smoothness": SMOOTH, "learning_rate": eta, "clip_norm": C}
    bound = private_alignment_bound(
        loss_decrease=float(decrease.mean()), noise_multiplier=multiplier, active=4, batch_size=B, **common
    )
    assert alignment.mean() <= bound + 5 * (alignment - decrease / eta).std() / math.sqrt(n)

    w, total, T = np.tile(START, (REPEATS, 1)), np.zeros(REPEATS), 40
    for _ in range(T):
        step = batch(rng, clip(sample_gradients(w, xi), C), B)
        total += (CURVATURE * w * step).sum(1)
        w = w - eta * step
    below(total / T, alignment_bound(loss_gap=LOSS_GAP, steps=T, **common))
    assert total.mean() / T > eta * LOSS_GAP / T + eta * SMOOTH * C**2 / (
        2 * T
    )  # the bound as printed is violated


A_RUN = Descent(
    loss_gap=2.0, smoothness=4.0, learning_rate=0.5, clip_norm=1.0, noise_multiplier=2.0,
    dimension=100, batch_size=10, steps=8,
)  # fmt: skip


def test_hand_computed_terms_and_the_best_rate():
    assert A_RUN.enlarged == pytest.approx(2 / 4 + 0.5 * 4 / 2)
    assert A_RUN.noise == pytest.approx(4 * 100 * 4 / 200)
    assert A_RUN.best_rate == pytest.approx(1 - 1.5 / 4)
    rates = np.linspace(0, 0.99, 1000)
    bounds = [A_RUN.private_bound(r, math.sqrt(1 - r)) for r in rates]
    assert rates[int(np.argmin(bounds))] == pytest.approx(A_RUN.best_rate, abs=2e-3)


def test_hand_computed_terms_of_theorem_6_3():
    bound = projected_bound(
        loss_gap=3.0, smoothness=2.0, learning_rate=0.25, steps=12, squared_biases=[0.1, 0.3], batch_variance=0.4,
        mean_active=50, noise_std=0.1,
    )  # fmt: skip
    terms = (bound.progress, bound.clipping_bias, bound.mini_batch, bound.dp_noise)
    assert terms == pytest.approx((2.0, 0.2, 0.2, 0.25))
    assert bound.full_gradient(0.5) == pytest.approx(2 * 2.65)


def test_the_budget_bound_is_theorem_3_5_with_its_choices_put_in():
    T, q, eps, delta, u = 64, 0.01, 2.0, 1e-5, 1.3
    noise = u * q * math.sqrt(T * math.log(1 / delta)) / eps
    run = Descent(
        loss_gap=2.0, smoothness=4.0, learning_rate=1 / (4.0 * 8), clip_norm=1.5, noise_multiplier=noise,
        dimension=1000, batch_size=8, steps=T, symmetry_error=0.01,
    )  # fmt: skip
    budget = budget_bound(run, 0.3, 0.8, epsilon=eps, delta=delta, sampling_rate=q, constant=u)
    assert budget == pytest.approx(run.private_bound(0.3, 0.8))


def test_kappa_is_one_without_sparsification_and_never_below_one_minus_r():
    gradient, xi = torch.from_numpy(CURVATURE * START), torch.from_numpy(deviations(0.7))
    assert kappa(gradient, xi, 1.0, 0.0, PublicRandomness(1)) == pytest.approx(1.0)
    for rate in [0.25, 0.5, 0.75]:
        assert 1 - rate <= kappa(gradient, xi, 1.0, rate, PublicRandomness(1), masks=500) <= 1
    with pytest.raises(SparseDPError, match="kappa"):
        kappa(gradient, xi, 0.1, 0.5, PublicRandomness(1))
