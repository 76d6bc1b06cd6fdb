"""Empirical Bayes: the mixture, what it keeps, what it hands out, and that it sees nothing but releases."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from method_tools import begun, layout_of, plan_of, random_release, release
from scipy.integrate import quad
from scipy.optimize import minimize
from torch import nn
from torch.utils.data import TensorDataset

import sparsedp
from sparsedp.core.geometry import Standardized
from sparsedp.methods.catalog import get_method
from sparsedp.methods.empirical_bayes import (
    NOISE_WEIGHT,
    EmpiricalBayes,
    NormalMixture,
    SignalSums,
    best_size,
)
from sparsedp.methods.scores import Observation
from sparsedp.methods.support_scheduler import signal_sums
from sparsedp.parameters import Support
from sparsedp.runs.checkpoint import read_checkpoint

DENOISED = ("dp-shrink", "tp-adaptive")


def drawn(signals, noise=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = signals + noise * torch.randn(len(signals), generator=generator, dtype=torch.float64)
    return values, torch.full_like(values, noise**2)


def few_causes(size=5000, causes=25, strength=8.0):
    signals = torch.zeros(size, dtype=torch.float64)
    signals[:causes] = strength
    return signals


def log_likelihood(mixture, values, noise):
    total = torch.tensor(mixture.variances) + noise[:, None]
    density = torch.exp(-0.5 * values[:, None] ** 2 / total) / (2 * math.pi * total).sqrt()
    return float((density @ torch.tensor(mixture.shares, dtype=torch.float64)).log().mean())


def test_a_posterior_is_what_numerical_integration_gives():
    mixture = NormalMixture((0.0, 1.0, 9.0), (0.5, 0.3, 0.2))
    value, noise = 2.3, 1.7

    def moment(power):
        def integrand(signal):
            prior = sum(
                share * math.exp(-0.5 * signal**2 / v) / math.sqrt(2 * math.pi * v)
                for v, share in zip(mixture.variances[1:], mixture.shares[1:], strict=True)
            )
            return signal**power * prior * math.exp(-0.5 * (value - signal) ** 2 / noise)

        return quad(integrand, -30, 30, epsabs=1e-12)[0]

    everything = moment(0) + mixture.shares[0] * math.exp(-0.5 * value**2 / noise)
    factors, energies = mixture.posterior(
        *(torch.tensor([number], dtype=torch.float64) for number in (value, noise))
    )
    assert float(factors) == pytest.approx(moment(1) / everything / value, rel=1e-8)
    assert float(energies) == pytest.approx(moment(2) / everything, rel=1e-8)


@pytest.mark.parametrize("noise", [1.0, 1e-4])
def test_em_finds_the_likeliest_shares(noise):
    values, variance = drawn(noise * few_causes(400, 40, 4.0), noise)
    found = NormalMixture.fit(values, variance)

    def loss(logits):
        shares = np.exp(logits - logits.max())
        return -log_likelihood(NormalMixture(found.variances, tuple(shares / shares.sum())), values, variance)

    best = minimize(loss, np.zeros(len(found.shares)), method="L-BFGS-B").fun
    assert sum(found.shares) == pytest.approx(1)
    assert -log_likelihood(found, values, variance) <= best + 1e-3


def test_counting_coordinates_that_look_alike_together_changes_next_to_nothing():
    values, variance = drawn(few_causes())
    found = NormalMixture.fit(values, variance)
    alone = NormalMixture.fit(values.repeat(3), variance.repeat(3))
    assert found.shares == pytest.approx(alone.shares, abs=1e-3)
    assert found.variances == alone.variances


def test_pure_noise_is_taken_for_noise():
    values, variance = drawn(torch.zeros(20_000, dtype=torch.float64))
    mixture = NormalMixture.fit(values, variance)
    factors, energies = mixture.posterior(values, variance)
    assert float(factors.max()) < 0.3
    assert float(energies.mean()) < 0.05


def test_strong_signals_are_handed_out_as_they_are_and_the_rest_is_not():
    values, variance = drawn(few_causes())
    factors, _ = NormalMixture.fit(values, variance).posterior(values, variance)
    assert float(factors[:25].min()) > 0.85
    assert float((factors[25:] * values[25:]).square().mean()) < 0.1
    assert bool(((factors >= 0) & (factors <= 1)).all())


def test_denoising_lowers_the_squared_error_whatever_the_share_of_signals():
    for causes in (5, 500, 5000):
        signals = few_causes(5000, causes, 2.0)
        values, variance = drawn(signals, seed=causes)
        factors, _ = NormalMixture.fit(values, variance).posterior(values, variance)
        assert (factors * values - signals).square().sum() < (values - signals).square().sum()


def test_without_noise_nothing_is_shrunk():
    values = torch.tensor([0.0, 1.0, -2.0], dtype=torch.float64)
    factors, energies = NormalMixture.fit(values, torch.zeros(3)).posterior(
        values, torch.zeros(3, dtype=torch.float64)
    )
    assert torch.equal(factors, torch.ones(3, dtype=torch.float64))
    assert torch.equal(energies, values**2)


@pytest.mark.parametrize("left", [0.5, 2.33, 9.0])
def test_the_size_is_the_best_of_all(left):
    scores = (
        torch.rand(60, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        .mul(4)
        .sort()
        .values.flip(0)
    )
    cost = [left * float(scores[k:].sum()) + NOISE_WEIGHT * k * k / 60 for k in range(1, 61)]
    assert best_size(scores, left) == 1 + int(np.argmin(cost))


@pytest.mark.parametrize("strength, expected", [(10.0, range(25, 200)), (0.0, range(1, 200))])
def test_a_support_holds_the_causes_and_little_else(strength, expected):
    ranking, state = EmpiricalBayes(), EmpiricalBayes().init(5000)
    generator = torch.Generator().manual_seed(3)
    signals = few_causes(5000, 25, strength) / 6
    for _ in range(36):
        gradient = signals / 6 + 0.1667 * torch.randn(5000, generator=generator, dtype=torch.float64)
        state = ranking.update(
            state, Observation(gradient, torch.full((5000,), 0.1667**2, dtype=torch.float64))
        )
    scores = ranking.scores(state).sort(descending=True)
    kept = scores.indices[: best_size(scores.values, 2.33)]
    assert len(kept) in expected
    assert strength == 0 or set(range(25)) <= set(kept.tolist())


def test_the_clip_norm_follows_the_support_and_an_update_is_as_long_as_before():
    layout = layout_of((40,))
    controller = begun(plan_of(get_method("tp-adaptive")), layout)
    for step in range(8):
        setting = controller.setting(step)
        signal = torch.zeros(setting.support.size, dtype=torch.float64)
        signal[:4] = 50.0
        controller.observe(release(setting.support, signal, step=step))
    support, geometry = setting.support, setting.geometry
    assert 1 <= support.size < 40
    assert isinstance(geometry, Standardized)
    assert torch.equal(geometry.scale, torch.full_like(geometry.scale, (support.size / 40) ** 0.5))
    clipped = torch.randn(support.size, dtype=torch.float64)
    assert torch.allclose(geometry.inverse(clipped), clipped)
    assert torch.allclose(geometry.undo(geometry.inverse(clipped)), clipped)
    assert torch.allclose(
        geometry.noise_scale(0.7, support.size), torch.full((support.size,), 0.7, dtype=torch.float64)
    )


def test_sums_go_through_a_state_and_off_the_support_they_stand_still():
    sums = SignalSums(torch.zeros(6))
    sums.observe(release(Support.full(6), torch.arange(6.0), 0.5))
    part = Support(torch.tensor([1, 4]), 6)
    again = SignalSums.of(sums.state())
    for one in (sums, again):
        one.observe(release(part, torch.tensor([10.0, 20.0]), 2.0))
    assert torch.equal(sums.state()["sum"], torch.tensor([0, 11, 2, 3, 24, 5], dtype=torch.float64))
    assert torch.equal(sums.state()["variance"], torch.tensor([1, 17, 1, 1, 17, 1], dtype=torch.float64) / 4)
    assert all(torch.equal(value, again.state()[name]) for name, value in sums.state().items())


def data(rows, features=120, causes=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, features, generator=generator) / features**0.5
    weights = torch.zeros(features)
    weights[:causes] = 12.0
    return TensorDataset(x, (torch.rand(rows, generator=generator) < torch.sigmoid(x @ weights)).long())


def trained(method, folder=None, dataset=None, seed=1, **more):
    torch.manual_seed(0)
    dataset = data(4000) if dataset is None else dataset
    settings = {"epsilon": 1.0, "delta": 1e-5, "epochs": 10, "batch_size": 400, "clip_norm": 0.5, "lr": 4.0}
    return sparsedp.fit(
        nn.Linear(dataset.tensors[0].shape[1], 2),
        dataset,
        nn.CrossEntropyLoss(reduction="none"),
        method=method,
        accountant="rdp",
        out=folder,
        seed=seed,
        progress=False,
        **settings | more,
    )


def accuracy(model, dataset):
    with torch.no_grad():
        return float((model(dataset.tensors[0]).argmax(1) == dataset.tensors[1]).float().mean())


def test_on_few_causes_both_beat_dense_training():
    test = data(4000, seed=9)
    dense = accuracy(trained("dp-sgd").model, test)
    for method in DENOISED:
        assert accuracy(trained(method).model, test) > dense + 0.05


@pytest.mark.parametrize("method", DENOISED)
@pytest.mark.parametrize("ema_decay", [None, 0.9])
def test_loaded_weights_are_those_that_were_handed_out_and_the_run_goes_on_from_the_raw_ones(
    method, ema_decay, tmp_path
):
    result = trained(method, tmp_path / "run", ema_decay=ema_decay, eval_dataset=data(500, seed=5))
    loaded = nn.Linear(120, 2)
    sparsedp.load_weights(tmp_path / "run", loaded)
    checkpoint = read_checkpoint(tmp_path / "run/checkpoint.safetensors")
    assert torch.equal(loaded.weight, result.model.weight)
    assert not torch.equal(checkpoint.state["model"]["weight"], result.model.weight)
    assert result.metrics["accuracy"] == pytest.approx(accuracy(result.model, data(500, seed=5)))
    assert sparsedp.verify(tmp_path / "run")


def test_dp_shrink_trains_exactly_as_dp_sgd_does(tmp_path):
    plain = trained("dp-sgd", tmp_path / "plain")
    trained("dp-shrink", tmp_path / "shrunk")
    raw = read_checkpoint(tmp_path / "shrunk/checkpoint.safetensors").state["model"]["weight"]
    assert torch.equal(raw, plain.model.weight)


def test_the_sums_that_the_mixture_is_fitted_to_carry_the_noise_that_they_claim(tmp_path: Path):
    nothing = TensorDataset(torch.zeros(400, 3000), torch.zeros(400, dtype=torch.long))
    trained("tp-adaptive", tmp_path / "run", nothing, epochs=2)
    signals = signal_sums(
        read_checkpoint(tmp_path / "run/checkpoint.safetensors").state["controller"]["tensors"]
    )
    state = signals.state()
    active = state["variance"][:6000]
    size = (state["sum"][:6000].square() / active).mean()
    assert abs(float(size) - 1) < 5.1 * math.sqrt(2 / 6000)  # false alarm: 4e-7


def test_what_is_decided_depends_on_releases_alone():
    def decided():
        layout = layout_of((6, 7), (6,))
        controller = begun(plan_of(get_method("tp-adaptive")), layout)
        for step in range(20):
            controller.observe(random_release(4, step, controller.setting(step)))
        shrinkage = controller.shrinkage()
        assert shrinkage is not None
        return controller.support, shrinkage.factor

    first, second = decided(), decided()
    assert first[0] == second[0]
    assert torch.equal(first[1], second[1])
