"""Training with partitions: what RS's code does, with its true price."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from scipy.stats import norm

from sparsedp.methods import MethodOptions, build_plan, get_method
from sparsedp_experiments.runs.execute import load_data
from sparsedp_experiments.runs.partition import (
    PARTITION,
    POISSON,
    Training,
    partition_batches,
    read_config,
    train,
    trainings,
)
from sparsedp_experiments.runs.settings import Settings


def _training(sampling: str) -> Training:
    return Training(
        model="mlp", epsilon=8.0, delta=1e-5, method="on-rand", active_ratio=0.3, epochs=2, batch_size=200,
        clip_norm=0.25, lr=0.5, momentum=0.9, sampling=sampling, seed=0,
    )  # fmt: skip


def test_a_partition_has_every_row_once_an_epoch_in_batches_of_nearly_equal_size() -> None:
    bundle = load_data(Settings(dataset="digits"))
    plan = build_plan(
        get_method("dp-sgd"), MethodOptions(), units=len(bundle.train), batch_size=200, epochs=2, epsilon=8.0,
        delta=1e-5, max_grad_norm=1.0,
    )  # fmt: skip
    steps = [(batch.step, list(batch)) for batch in partition_batches(bundle, plan, seed=0)]
    per_epoch = plan.epoch_ends()[0]
    assert [step for step, _ in steps] == list(range(2 * per_epoch))
    for epoch in range(2):
        chosen = steps[epoch * per_epoch : (epoch + 1) * per_epoch]
        inputs = Counter(
            row.numpy().tobytes() for _, parts in chosen for part in parts for row in part.rows[0]
        )
        known = Counter(
            item[0].numpy().tobytes() for item in (bundle.train[i] for i in range(len(bundle.train)))
        )
        assert inputs == known
        sizes = [sum(len(part.rows[0]) for part in parts) for _, parts in chosen]
        assert max(sizes) - min(sizes) < per_epoch + 1


def test_partitions_pay_one_gaussian_mechanism_per_epoch() -> None:
    bundle = load_data(Settings(dataset="digits"))
    honest, claimed = train(_training(PARTITION), bundle), train(_training(POISSON), bundle)
    assert honest.noise_multiplier == claimed.noise_multiplier
    assert claimed.epsilon == 8.0
    mu, epsilon = math.sqrt(2) / honest.noise_multiplier, honest.epsilon
    delta = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    assert delta == pytest.approx(1e-5, rel=1e-4)
    assert honest.epsilon > claimed.epsilon


def test_the_config_names_every_cell_of_the_table() -> None:
    cells = list(trainings(read_config()))
    assert len(cells) == len(set(cells)) == 3 * 2 * 2 * 2
