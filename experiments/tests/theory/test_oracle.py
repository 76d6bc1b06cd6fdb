import math

import pytest
import torch

from diagnostic_probes import LOSS, batches, gradients_by_loop, network, rows
from sparsedp.batch import MicroBatch
from sparsedp.clipping import FlatClip
from sparsedp.errors import DataError
from sparsedp.grad_sample import make_engine
from sparsedp.parameters import Support
from sparsedp.randomness import PublicRandomness
from sparsedp_experiments.theory.oracle import (
    asymmetry_p_value,
    clipping_report,
    mean_gradient,
    projected_deviations,
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


def test_projected_deviations_are_centred_and_repeatable(engine):
    points = projected_deviations(engine, batches(), PublicRandomness(3))
    again = projected_deviations(engine, batches(), PublicRandomness(3))
    assert points.shape == (24, 2)
    assert torch.equal(points, again)
    torch.testing.assert_close(points.mean(0), torch.zeros(2).double(), atol=1e-12, rtol=0)


def test_the_sign_flip_test_accepts_symmetry_and_rejects_skew():
    """Twenty tests at 5 % on symmetric points: eight or more rejections have probability below 1e-5."""
    rejected = 0
    for seed in range(20):
        points = torch.randn(100, 2, generator=torch.Generator().manual_seed(seed)).double()
        rejected += asymmetry_p_value(points, PublicRandomness(seed), flips=199) < 0.05
    assert rejected < 8
    skewed = torch.rand(200, 2, generator=torch.Generator().manual_seed(0)).double().log().neg() - 1
    assert asymmetry_p_value(skewed, PublicRandomness(0)) == pytest.approx(0.001)


def test_batches_without_rows_are_refused(engine):
    x, y = rows(0)
    with pytest.raises(DataError, match="no rows"):
        mean_gradient(engine, [MicroBatch((x, y))])
    assert math.isfinite(mean_gradient(engine, batches()).sum())
