"""What only an oracle sees: clipping bias, symmetry, curvature."""

import math

import pytest
import torch

from diagnostic_probes import LOSS, batches, gradients_by_loop, network, rows
from sparsedp.batch import MicroBatch
from sparsedp.clipping import FlatClip
from sparsedp.grad_sample import make_engine
from sparsedp.parameters import ParameterLayout, Support
from sparsedp.randomness import PublicRandomness
from sparsedp_experiments.theory.oracle import (
    _product,
    asymmetry_p_value,
    clipping_report,
    lopsidedness,
    lopsidedness_by_chance,
    mean_gradient,
    smoothness,
    symmetry_error,
)

SUPPORT = Support(range(3, 30, 2), 43)


@pytest.fixture(params=["bookkeeping", "reference"])
def engine(request):
    return make_engine(network(), LOSS, request.param)


def test_the_mean_gradient_is_the_mean_over_units_clipped_or_not(engine):
    looped = gradients_by_loop(network(), *rows())
    plain = mean_gradient(engine, batches())
    torch.testing.assert_close(plain, looped.mean(0), rtol=1e-4, atol=1e-7)
    masked = looped * SUPPORT.mask()
    factors = (0.2 / 1.001 / masked.norm(dim=1)).clamp(max=1)
    clipped = mean_gradient(engine, batches(), FlatClip(0.2), SUPPORT)
    torch.testing.assert_close(clipped, (factors[:, None] * masked).mean(0), rtol=1e-4, atol=1e-7)


def test_units_of_several_rows_count_once(engine):
    x, y = rows(5)
    batch = MicroBatch((x, y), torch.tensor([0, 0, 1, 1, 1]))
    looped = gradients_by_loop(network(), x, y)
    units = torch.stack([looped[:2].mean(0), looped[2:].mean(0)])
    torch.testing.assert_close(mean_gradient(engine, [batch]), units.mean(0), rtol=1e-4, atol=1e-7)
    norms = clipping_report(engine, [batch], Support.full(43), FlatClip(1.0)).norms
    torch.testing.assert_close(norms, units.norm(dim=1), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("norm", [0.05, 0.3, 100.0])
def test_clipping_bias_matches_a_plain_loop_and_its_bound_holds(engine, norm):
    masked = gradients_by_loop(network(), *rows())[:, SUPPORT.indices]
    clipped = masked * (norm / 1.001 / masked.norm(dim=1)).clamp(max=1)[:, None]
    report = clipping_report(engine, batches(), SUPPORT, FlatClip(norm))
    assert report.bias == pytest.approx(float((clipped.mean(0) - masked.mean(0)).norm()), rel=1e-3, abs=1e-6)
    assert report.bias <= report.bias_bound + 1e-12
    variance = float(((clipped - clipped.mean(0)) ** 2).sum(1).mean())
    assert report.unit_variance == pytest.approx(variance, rel=1e-3)
    assert report.energy == pytest.approx(float((masked.mean(0) ** 2).sum()), rel=1e-3)
    assert (report.bias_bound == 0) == (norm == 100.0)


def test_the_sign_flip_test_accepts_symmetry_and_rejects_skew():
    """Twenty tests at 5 % on symmetric points: eight or more rejections have probability below 1e-5."""
    rejected = 0
    for seed in range(20):
        points = torch.randn(100, 2, generator=torch.Generator().manual_seed(seed)).double()
        rejected += asymmetry_p_value(points, PublicRandomness(seed), flips=199) < 0.05
    assert rejected < 8
    skewed = torch.rand(200, 2, generator=torch.Generator().manual_seed(0)).double().log().neg() - 1
    assert asymmetry_p_value(skewed, PublicRandomness(0)) == pytest.approx(0.001)


# Numbers for the symmetry of gradient deviations.


def test_chance_covers_a_symmetric_cloud_and_not_a_skewed_one():
    """A normal cloud is beyond the 99.5 % point of its flips once in 200 seeds; the seed is fixed."""
    public = PublicRandomness(5)
    symmetric = public.normal(4000, (0,)).reshape(2000, 2)
    skewed = torch.stack([torch.exp(symmetric[:, 0]) - math.exp(0.5), symmetric[:, 1]], dim=1)
    for points, inside in ((symmetric, True), (skewed, False)):
        chance = lopsidedness_by_chance(points, public)
        assert bool((chance[1:] >= chance[:-1]).all())
        assert (lopsidedness(points) <= float(chance[-2])) is inside


def test_symmetry_error_by_a_plain_loop():
    generator = torch.Generator().manual_seed(2)
    gradient, xi = (torch.randn(*shape, generator=generator).double() for shape in ((4,), (30, 4)))
    xi = xi.exp() - xi.exp().mean(dim=0)

    def clipped(vector):
        return vector * min(1.0, 0.7 / 1.001 / float(vector.norm()))

    true = sum(float(gradient @ clipped(gradient + row)) for row in xi) / 30
    mirrored = sum(float(gradient @ clipped(gradient - row)) for row in xi) / 30
    found = symmetry_error(gradient, xi, FlatClip(0.7))
    assert found == pytest.approx(true - (true + mirrored) / 2, rel=1e-4)
    assert abs(found) > 1e-3


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
