"""The automatic method: r by hand, the choice on both sides of the threshold, and nothing but public numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import sparsedp
from sparsedp.cli.plan import quote
from sparsedp.methods import PlanConfig, build_plan, get_method
from sparsedp.methods.auto import MIN_NOISE_RATIO, choose_method, is_linear, noise_ratio
from sparsedp.parameters import ParameterLayout

CIFAR = {"units": 50_000, "batch_size": 2048, "epochs": 10, "delta": 1e-5, "accountant": "rdp"}


def test_r_is_the_expected_norm_of_the_noise_over_the_clip_norm():
    plan = build_plan("dp-sgd", epsilon=1.0, max_grad_norm=0.1, **CIFAR)
    std = plan.phases[0].noise_multiplier * 0.1
    norms = (std * torch.randn(200, 1000, generator=torch.Generator().manual_seed(0)) / 2048).norm(dim=1)
    assert noise_ratio(plan, 1000) == pytest.approx(float(norms.mean()) / 0.1, rel=0.02)


@pytest.mark.parametrize(
    ("dimension", "epsilon", "units", "expected"),
    [
        (5_000, 1.0, 50_000, "tp-adaptive"),
        (400, 1.0, 50_000, "dp-sgd"),
        (5_000, 50.0, 50_000, "dp-sgd"),
        (2_000_000, 1.0, 50_000, "dp-sgd"),
        (5_000, 1.0, 10_000, "tp-adaptive"),
        (5_000, 1.0, 9_999, "dp-sgd"),
    ],
)
def test_one_linear_layer_finds_its_support_where_noise_is_audible(dimension, epsilon, units, expected):
    plan = {**CIFAR, "units": units}
    method = choose_method(dimension, linear=True, epsilon=epsilon, max_grad_norm=0.1, **plan)
    assert method.name == expected
    assert not method.denoise
    assert choose_method(dimension, epsilon=epsilon, max_grad_norm=0.1, **plan) == get_method("dp-sgd")


def test_linear_is_what_trains_one_linear_layer_and_nothing_else():
    body = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()).requires_grad_(False)
    assert is_linear(nn.Linear(4, 2))
    assert is_linear(nn.Sequential(body, nn.Linear(4, 2)))
    assert not is_linear(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)))
    assert not is_linear(nn.Embedding(9, 2))
    assert not is_linear(nn.Tanh())


def test_all_coordinates_are_trained_where_there_are_few_or_noise_is_all_there_is():
    assert choose_method(2_000_000, epsilon=1.0, max_grad_norm=0.1, **CIFAR) == get_method("dp-sgd")
    few = {"units": 1400, "batch_size": 128, "epochs": 10, "delta": 1e-5, "accountant": "rdp", "epsilon": 8.0}
    assert MIN_NOISE_RATIO < noise_ratio(build_plan("dp-sgd", **few), 4810) < 1
    assert choose_method(4810, **few) == get_method("dp-sgd")


@pytest.mark.parametrize(("epochs", "expected"), [(1, "dp-sgd"), (9, "dp-sgd"), (10, "tp-topk")])
def test_a_plan_too_short_for_a_warm_up_is_dense(epochs, expected):
    short = {"units": 2000, "batch_size": 2000, "delta": 1e-5, "accountant": "rdp", "max_grad_norm": 0.1}
    plan = {**short, "epochs": epochs, "epsilon": 1.0}
    dimension = math.ceil((0.7 / noise_ratio(build_plan("dp-sgd", **plan), 1)) ** 2)
    method = choose_method(dimension, **plan)
    assert method.name == expected
    build_plan(method, **plan)


def test_the_delta_that_was_not_given_is_said_once(caplog):
    with caplog.at_level("INFO", logger="sparsedp"):
        fit(epsilon=8.0)
    assert sum("delta was not given" in line for line in caplog.messages) == 1


def test_the_threshold_is_where_it_is_said_to_be():
    plan = build_plan("dp-sgd", epsilon=3.0, **CIFAR)
    at = (MIN_NOISE_RATIO / noise_ratio(plan, 1)) ** 2
    assert choose_method(math.floor(at) - 1, epsilon=3.0, **CIFAR).name == "dp-sgd"
    assert choose_method(math.ceil(at) + 1, epsilon=3.0, **CIFAR).name == "tp-topk"


def test_a_quote_has_r_for_all_the_head_and_the_biases_of_a_model():
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 4))
    size = ParameterLayout.of(model)
    parts = {"all": 20 * 30 + 30 + 30 * 4 + 4, "head": 30 * 4 + 4, "bias": 30 + 4}
    spec = PlanConfig.asked("tp-topk", epsilon=1.0, max_grad_norm=0.1, **CIFAR)
    rows = {row["which"]: row for row in quote(spec, size, ())["noise_ratios"]}
    assert {name: rows[name]["coordinates"] for name in parts} == parts
    assert set(rows) - set(parts) == {"the support of tp-topk"}
    noise = spec.plan().phases[-1].noise_multiplier / 2048
    for row in rows.values():
        assert row["noise_ratio"] == pytest.approx(noise * math.sqrt(row["coordinates"]))


def data(rows=200):
    return TensorDataset(torch.rand(rows, 6), torch.arange(rows) % 3)


def fit(**settings):
    return sparsedp.fit(
        nn.Linear(6, 3), data(), nn.CrossEntropyLoss(reduction="none"), epochs=2, accountant="rdp", **settings
    )


def test_fit_chooses_by_itself_and_keeps_to_what_is_said_of_a_support():
    assert fit(epsilon=8.0).method == "dp-sgd"
    assert fit(epsilon=8.0, method=get_method("tp-topk", active_ratio=0.5)).method == "tp-topk"
    assert fit(epsilon=8.0, method="on-rand").method == "on-rand"
