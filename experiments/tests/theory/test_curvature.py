import pytest
import torch
from torch import nn

from diagnostic_probes import LOSS, batches, network, rows
from sparsedp.batch import MicroBatch, from_criterion
from sparsedp.errors import DataError, SparseDPError
from sparsedp.parameters import ParameterLayout
from sparsedp.randomness import PublicRandomness
from sparsedp_experiments.theory.oracle import _product, mean_loss, smoothness

DOUBLE = torch.float64


def moved(model, step):
    """The gradient of the mean loss after a move of the weights."""
    layout = ParameterLayout.of(model)
    parameters = layout.parameters(model)
    with torch.no_grad():
        for slot, p in zip(layout, parameters, strict=True):
            p += step[slot.span].reshape(slot.shape)
    x, y = rows(dtype=DOUBLE)
    slopes = torch.autograd.grad(LOSS(model, (x, y)).mean(), parameters)
    return torch.cat([s.reshape(-1) for s in slopes])


def test_hessian_vector_products_agree_with_finite_differences():
    vector = torch.randn(43, generator=torch.Generator().manual_seed(2), dtype=DOUBLE)
    step = 1e-5 * vector
    expected = (moved(network(dtype=DOUBLE), step) - moved(network(dtype=DOUBLE), -step)) / 2e-5
    found = _product(network(dtype=DOUBLE), LOSS, batches(dtype=DOUBLE), vector, 24)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


def test_smoothness_is_the_largest_magnitude_of_an_eigenvalue():
    model, data = network(dtype=DOUBLE), batches(dtype=DOUBLE)
    identity = torch.eye(43, dtype=DOUBLE)
    hessian = torch.stack([_product(model, LOSS, data, row, 24) for row in identity])
    torch.testing.assert_close(hessian, hessian.T)
    exact = float(torch.linalg.eigvalsh(hessian).abs().max())
    found = smoothness(model, LOSS, data, PublicRandomness(0), iterations=2000, tolerance=1e-10)
    assert found.value == pytest.approx(exact, rel=1e-4)
    assert found.value <= exact * (1 + 1e-9)
    assert found.residual < 0.05 * exact


def test_smoothness_of_least_squares_is_known():
    x = torch.tensor([[3.0, 0.0], [0.0, 1.0]])
    model = nn.Linear(2, 1, bias=False)
    square = from_criterion(lambda out, y: (out[:, 0] - y) ** 2 / 2)
    found = smoothness(model, square, [MicroBatch((x, torch.zeros(2)))], PublicRandomness(1), tolerance=1e-9)
    assert found.value == pytest.approx(9 / 2, rel=1e-4)


def test_a_loss_without_curvature_has_smoothness_zero():
    model = nn.Linear(4, 1)
    linear = from_criterion(lambda out, y: out[:, 0])
    found = smoothness(model, linear, batches(), PublicRandomness(0))
    assert (found.value, found.residual, found.iterations) == (0.0, 0.0, 1)


def test_mean_loss_counts_rows_not_batches():
    x, y = rows()
    expected = LOSS(network(), (x, y)).mean().item()
    assert mean_loss(network(), LOSS, batches()) == pytest.approx(expected, rel=1e-6)


def test_wrong_requests_are_refused():
    with pytest.raises(SparseDPError, match="d=43"):
        _product(network(), LOSS, batches(), torch.zeros(5), 24)
    with pytest.raises(DataError, match="no rows"):
        mean_loss(network(), LOSS, [])
