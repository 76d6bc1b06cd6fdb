"""Empirical Bayes: the mixture, what it keeps, what becomes of the weights, and that it sees nothing but releases."""

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from method_tools import begun, layout_of, plan_of, release
from scipy.integrate import quad
from scipy.optimize import minimize
from torch import nn
from torch.utils.data import TensorDataset

import sparsedp
from sparsedp.diagnostics import inspect_run
from sparsedp.methods.catalog import get_method
from sparsedp.methods.empirical_bayes import (
    MOST_SPREAD,
    NOISE_COST,
    EmpiricalBayes,
    NormalMixture,
    best_size,
    decide,
)
from sparsedp.methods.scores import NoisyGradient
from sparsedp.runs.checkpoint import read_checkpoint

METHOD = "tp-adaptive"


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


def test_denoising_lowers_the_squared_error_whatever_the_share_of_signals():
    for causes in (5, 500, 5000):
        signals = few_causes(5000, causes, 2.0)
        values, variance = drawn(signals, seed=causes)
        factors, _ = NormalMixture.fit(values, variance).posterior(values, variance)
        assert (factors * values - signals).square().sum() < (values - signals).square().sum()


@pytest.mark.parametrize("looked", [0.1, 0.43, 2.0])
def test_a_size_is_as_good_as_the_best_of_all(looked):
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(60, generator=generator, dtype=torch.float64).mul(4).pow(3).sort().values.flip(0)

    def worth(k):
        return sum(e * e / (e + NOISE_COST * looked * k / 60) for e in scores[:k].tolist())

    best = max(worth(k) for k in range(1, 61))
    assert worth(best_size(scores, looked)) >= 0.995 * best


def decision_of(signals, steps=36, left=84):
    ranking, state, noise = EmpiricalBayes(), EmpiricalBayes().init(len(signals)), steps**-0.5
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        gradient = signals / steps + noise * torch.randn(
            signals.shape, generator=generator, dtype=torch.float64
        )
        state = ranking.update(state, NoisyGradient(gradient, torch.full_like(gradient, noise**2)))
    scores = ranking.scores(state).sort(descending=True)
    mixture = NormalMixture.fit(state["sum"], state["variance"])
    return decide(mixture, scores.values, int(state["steps"]), left), scores.indices


def test_few_causes_are_kept_and_little_else():
    decision, order = decision_of(few_causes(5000, 25, 10.0))
    assert decision.spread < MOST_SPREAD
    assert 25 <= decision.kept < 500
    assert set(range(25)) <= set(order[: decision.kept].tolist())
    assert "others are not worth their noise" in decision.reason


def test_a_signal_that_is_spread_is_left_to_dense_training():
    signals = 1.5 * torch.randn(5000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    decision, _ = decision_of(signals)
    assert decision.spread > MOST_SPREAD
    assert decision.kept == decision.of == 5000


def test_the_sums_go_on_over_all_rounds_and_what_left_does_not_come_back():
    layout = layout_of((60,))
    controller = begun(plan_of(get_method(METHOD)), layout)
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros(60, dtype=torch.float64)
    supports = []
    for step in range(20):
        support = controller.begin_step(step).support
        mean = torch.randn(support.size, generator=generator, dtype=torch.float64)
        mean[:3] += 20.0
        total[support.indices] += mean
        controller.update(release(support, mean, step=step))
        supports.append(set(support.indices.tolist()))
    assert torch.allclose(controller.state().tensors["score.sum"], total)
    assert all(later <= earlier for earlier, later in pairwise(supports))
    assert 3 <= len(supports[-1]) < 60
    decisions = controller.state().values["decisions"]
    assert [one["step"] for one in decisions] == [6, 9, 13, 16]
    assert decisions[-1]["kept"] == len(supports[-1])
    assert 0 <= decisions[0]["share_at_zero"] <= 1


def test_the_clip_norm_follows_the_support_and_an_update_is_as_long_as_before():
    controller = begun(plan_of(get_method(METHOD)), layout_of((40,)))
    for step in range(8):
        setting = controller.begin_step(step)
        signal = torch.zeros(setting.support.size, dtype=torch.float64)
        signal[:4] = 50.0
        controller.update(release(setting.support, signal, step=step))
    size, geometry = setting.support.size, setting.geometry
    assert 1 <= size < 40
    assert torch.equal(geometry.scale, torch.full_like(geometry.scale, (size / 40) ** 0.5))
    clipped = torch.arange(size, dtype=torch.float64)
    assert torch.allclose(geometry.inverse(clipped), clipped)
    assert torch.allclose(geometry.noise_scale(0.7, size), torch.full((size,), 0.7, dtype=torch.float64))


def data(rows, features=400, causes=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, features, generator=generator) / features**0.5
    weights = torch.zeros(features)
    weights[:causes] = 20.0
    return TensorDataset(x, (torch.rand(rows, generator=generator) < torch.sigmoid(x @ weights)).long())


def trained(method, folder=None, dataset=None, **more):
    torch.manual_seed(0)
    dataset = data(4000) if dataset is None else dataset
    settings = {"epochs": 10, "batch_size": 400, "max_grad_norm": 0.5, "lr": 2.0, "seed": 1}
    return sparsedp.fit(
        nn.Linear(dataset.tensors[0].shape[1], 2), dataset, nn.CrossEntropyLoss(reduction="none"), method=method,
        epsilon=1.0, delta=1e-5, accountant="rdp", run_dir=folder, progress=False, **settings | more,
    )  # fmt: skip


def test_where_all_is_kept_it_is_dense_training_to_the_bit():
    spread = data(1000, features=30, causes=30)
    dense, adaptive = trained("dp-sgd", dataset=spread), trained(METHOD, dataset=spread)
    assert adaptive.k == 62
    assert torch.equal(dense.model.weight, adaptive.model.weight)


def flat(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("ema_decay", [None, 0.9])
def test_weights_off_the_support_are_those_of_the_warm_up_shrunk(ema_decay, tmp_path):
    folder = tmp_path / "run"
    result = trained(METHOD, folder, ema_decay=ema_decay)
    tensors = read_checkpoint(folder / "checkpoint.safetensors").state["controller"]["tensors"]
    off = torch.ones(802, dtype=torch.bool)
    off[tensors["support"]] = False
    assert off.sum() > 400
    raw = flat(trained("dp-sgd", epochs=3, ema_decay=None).model)  # the warm-up alone, in size
    moved, unshrunk = ((one - tensors["start"])[off].square().mean() for one in (flat(result.model), raw))
    assert moved < 0.5 * unshrunk
    loaded = nn.Linear(400, 2)
    sparsedp.load_weights(folder, loaded)
    assert torch.equal(loaded.weight, result.model.weight)
    assert sparsedp.verify(folder)
    assert inspect_run(folder).decisions[-1]["kept"] == result.k


def test_the_sums_that_the_mixture_is_fitted_to_carry_the_noise_that_they_claim(tmp_path: Path):
    nothing = TensorDataset(torch.zeros(400, 3000), torch.zeros(400, dtype=torch.long))
    method = get_method(METHOD, warmup_fraction=0.75)
    trained(method, tmp_path / "run", nothing, epochs=4)
    tensors = read_checkpoint(tmp_path / "run/checkpoint.safetensors").state["controller"]["tensors"]
    total, variance = tensors["score.sum"][:6000], tensors["score.variance"][:6000]
    kept = float((total.square() / variance).mean())
    assert abs(kept - 1) < 5.1 * math.sqrt(2 / 6000)  # false alarm: 4e-7
