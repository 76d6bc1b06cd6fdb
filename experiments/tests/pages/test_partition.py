"""Partitions at their true price, and the rates that the rule gives."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from scipy import sparse
from scipy.stats import norm
from torch import nn
from torch.utils.data import TensorDataset

from sparsedp import fit
from sparsedp.methods import build_plan, get_method
from sparsedp_experiments.models.networks import logistic
from sparsedp_experiments.runs.execute import load_data
from sparsedp_experiments.runs.partition import (
    PARTITION,
    POISSON,
    partition_batches,
    read_config,
    train,
    trainings,
)
from sparsedp_experiments.runs.settings import Settings
from sparsedp_experiments.tabular_rates import (
    People,
    Setting,
    simulate,
)

# Training with partitions: what RS's code does, with its true price.


def _training(sampling: str) -> dict:
    return dict(
        model="mlp", epsilon=8.0, delta=1e-5, method="on-rand", active_ratio=0.3, epochs=2, batch_size=200,
        clip_norm=0.25, lr=0.5, momentum=0.9, sampling=sampling, seed=0,
    )  # fmt: skip


def test_a_partition_has_every_row_once_an_epoch_in_batches_of_nearly_equal_size() -> None:
    bundle = load_data(Settings(dataset="digits"))
    plan = build_plan(
        get_method("dp-sgd"), units=len(bundle.train), batch_size=200, epochs=2, epsilon=8.0,
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
    assert honest["noise_multiplier"] == claimed["noise_multiplier"]
    assert claimed["epsilon"] == 8.0
    mu, epsilon = math.sqrt(2) / honest["noise_multiplier"], honest["epsilon"]
    delta = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    assert delta == pytest.approx(1e-5, rel=1e-4)
    assert honest["epsilon"] > claimed["epsilon"]


def test_the_config_names_every_cell_of_the_table() -> None:
    cells = list(trainings(read_config()))
    assert len(cells) == len({tuple(cell.items()) for cell in cells}) == 3 * 2 * 2 * 2


# The simulation of many rates at once: the same weights as the library, and the rule's rate holds on its records.


def some_people(rows, features=6):
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (rows, features)).astype(np.float32) * (rng.random((rows, features)) < 0.6)
    y = (x[:, 0] + 0.3 * rng.standard_normal(rows) > 0).astype(np.float32)
    return People(sparse.csr_matrix(x), y, np.arange(rows))


def quiet_plan(method, rows):
    """Every row in every batch and next to no noise, so that there is nothing left to chance."""
    return build_plan(
        method,
        units=rows,
        batch_size=rows,
        epochs=10,
        epsilon=200,
        delta=1e-5,
        max_grad_norm=0.2,
        accountant="rdp",
    )


@pytest.mark.parametrize(("name", "ratio"), [("dp-sgd", None), ("tp-coherent", 0.58)])
def test_without_noise_the_weights_are_the_librarys(name, ratio):
    people = some_people(3000)
    method = get_method(name, active_ratio=ratio)
    plan = quiet_plan(method, 3000)
    assert plan.phases[-1].noise_multiplier < 0.5
    found = simulate(people, plan, [Setting(0.4, 0.2, ratio)], seed=0)[0][:, 0]
    data = TensorDataset(torch.from_numpy(people.rows.toarray()), torch.from_numpy(people.targets).long())
    model = logistic((6,), 2)
    fit(
        model, data, nn.CrossEntropyLoss(reduction="none"), method=method, epsilon=200, delta=1e-5, epochs=10,
        batch_size=3000, max_grad_norm=0.2, lr=2.0, accountant="rdp", seed=0, progress=False,
    )  # fmt: skip
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()
    np.testing.assert_allclose(found, weights, rtol=0.02, atol=0.005)
    assert ratio is None or (found == 0).sum() > 0 or np.count_nonzero(weights) == 7
