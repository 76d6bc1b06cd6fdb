"""Least squares from released moments: the closed form, the norm of a record, the ledger, and a private run."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils.data import TensorDataset

import sparsedp
from sparsedp_experiments.models import LeastSquares, keep_noise_down, moments_loss


def problem(rows=300, features=6, classes=3, seed=4):
    truth = torch.randn(features, classes, generator=torch.Generator().manual_seed(3))
    x = torch.randn(rows, features, generator=torch.Generator().manual_seed(seed))
    return x, (x @ truth).argmax(1)


def by_hand(x, y, classes, ridge):
    """Ridge regression of centred one-hot targets on unit records with a constant, in NumPy, from the data."""
    x, y = x.double().numpy(), y.numpy()
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    records = np.hstack([unit, np.full((len(x), 1), 0.1)]) / math.sqrt(1.01)
    targets = np.eye(classes)[y] - 1 / classes
    gram = records.T @ records / len(x) + ridge * np.eye(records.shape[1])
    return np.linalg.solve(gram, records.T @ targets / len(x))


def filled(x, y, classes, ridge=1e-3):
    """The model after one exact full-batch step of rate one."""
    model = LeastSquares(x.shape[1], classes, ridge)
    loss = moments_loss().loss(model, (x, y)).mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad)
    return model


def test_without_noise_it_is_ridge_regression():
    x, y = problem()
    found = filled(x, y, 3).solution().numpy()
    np.testing.assert_allclose(found, by_hand(x, y, 3, 1e-3), rtol=1e-4, atol=1e-5)


def test_held_out_numbers_are_of_the_scores():
    x, y = problem()
    model = filled(x, y, 3)
    with torch.no_grad():
        scores = model(x)
        found = sparsedp.held_out(TensorDataset(x, y), moments_loss().loss)(model)
    assert found["accuracy"] == float((scores.argmax(1) == y).double().mean()) > 0.8
    assert found["loss"] == pytest.approx(float(functional.cross_entropy(scores, y)), rel=1e-5)


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_every_record_adds_a_vector_of_the_same_public_norm(classes):
    x, y = problem(20, classes=classes)
    model = LeastSquares(x.shape[1], classes)
    for row in range(20):
        loss = moments_loss().loss(model, (x[row : row + 1], y[row : row + 1])).sum()
        norm = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]).norm()
        assert float(norm) == pytest.approx(model.record_norm, rel=1e-5)


def run(x, y, out, **settings):
    torch.manual_seed(0)
    model = LeastSquares(x.shape[1], 3)
    return sparsedp.fit(
        model,
        TensorDataset(x, y),
        moments_loss(),
        method="dp-sgd",
        epochs=1,
        batch_size=len(x),
        max_grad_norm=model.record_norm,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        callbacks=[keep_noise_down(model)],
        run_dir=out,
        progress=False,
        **settings,
    )


def test_a_private_run_is_one_release_in_the_ledger_and_learns(tmp_path):
    x, y = problem(20_000)
    result = run(x, y, tmp_path / "run", epsilon=1.0, delta=1e-5)
    assert result.ledger.steps == result.plan.total_steps == 1
    assert result.plan.phases[0].sampling_rate == 1.0
    assert result.epsilon <= 1.0
    held_x, held_y = problem(2000, seed=5)
    accuracy = float((result.model(held_x).argmax(1) == held_y).float().mean())
    assert accuracy > 0.8
    assert float(result.model.ridge) > 1e-6


def test_the_released_moments_are_the_true_ones_plus_noise_of_the_planned_size(tmp_path):
    x, y = problem(5000)
    result = run(x, y, tmp_path / "run", epsilon=2.0, delta=1e-5, seed=1)
    exact = filled(x, y, 3)
    noise = torch.cat(
        [
            (a - b).detach().flatten()
            for a, b in zip(result.model.parameters(), exact.parameters(), strict=True)
        ]
    )
    planned = result.plan.phases[0].noise_multiplier * exact.record_norm / len(x)
    assert float(noise.std()) == pytest.approx(planned, rel=0.35)  # 70 draws: three sigma is 0.25


def test_several_steps_have_the_ridge_of_their_sum():
    x, y = problem(5000)
    model, told = LeastSquares(6, 3), []
    result = sparsedp.fit(
        model, TensorDataset(x, y), moments_loss(), method="dp-sgd", epochs=2, batch_size=2500, epsilon=8.0,
        delta=1e-5, max_grad_norm=model.record_norm, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        lr_scheduler=lambda optimizer, _: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        callbacks=[keep_noise_down(model), told.append], seed=1, progress=False,
    )  # fmt: skip
    steps = [event for event in told if hasattr(event, "released")]
    assert [event.learning_rates for event in steps] == [(0.5,), (0.25,), (0.5 / 3,), (0.125,)]
    one = result.plan.phases[0].noise_multiplier * model.record_norm / 2500
    noise = one * math.sqrt(0.25 + 0.0625 + 0.25 / 9 + 0.125**2)
    assert float(model.noise) == pytest.approx(noise)
    assert float(model.ridge) == pytest.approx(0.25 * noise * math.sqrt(2 * 7))
