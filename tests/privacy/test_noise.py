"""Noise, measured: the right scale on every active coordinate, none elsewhere, fresh at every step.

Kolmogorov-Smirnov tests at level 1e-6 each: a run of this file raises a false alarm less than once in 100,000.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from sparsedp.auditing.mechanism import KEPT, NoiseCorrelationTest
from sparsedp.batch import MicroBatch
from sparsedp.clipping import FlatClip, Geometry, Identity, Standardized
from sparsedp.grad_sample import BookKeepingEngine, ClippedSumQuery
from sparsedp.parameters import Support
from sparsedp.privacy.charge import Charge, ChargeLog
from sparsedp.privacy.mechanism import GaussianMechanism, Grid, Release
from sparsedp.privacy.queries import ClippedVectorSum, GradientSum
from sparsedp.randomness import PrivateRandomness, SeededRandomness, SystemRandomness

LEVEL = 1e-6
CLIP_NORM, NOISE_MULTIPLIER, EXPECTED = 0.7, 1.3, 50.0
SCALE = NOISE_MULTIPLIER * CLIP_NORM / EXPECTED
INPUTS = 4000
DIMENSION = 2 * INPUTS + 2

SOURCES = {"system": SystemRandomness(), "seeded": SeededRandomness(11)}
SUPPORTS = {
    "full": Support.full(DIMENSION),
    "masked": Support(
        torch.randperm(DIMENSION, generator=torch.Generator().manual_seed(0))[:4000], DIMENSION
    ),
}


def release(
    support: Support,
    randomness: PrivateRandomness,
    rows: int = 0,
    geometry: Geometry | None = None,
    step: int = 0,
) -> Release:
    torch.manual_seed(0)
    engine = BookKeepingEngine(nn.Linear(INPUTS, 2), lambda model, rows: model(rows).square().sum(1))
    batch = MicroBatch(torch.randn(rows, INPUTS))
    return GaussianMechanism(ChargeLog(), randomness).release(
        GradientSum(engine, [batch], ClippedSumQuery(support, FlatClip(CLIP_NORM), geometry or Identity())),
        Charge("train", step, 0.1, NOISE_MULTIPLIER),
        expected_batch_size=EXPECTED,
    )


def p_value(noise: torch.Tensor, scale: float) -> float:
    return float(stats.kstest(noise.numpy(), "norm", args=(0, scale)).pvalue)


def seeded_noise(size: int) -> torch.Tensor:
    bits = Grid.for_mechanism(CLIP_NORM, NOISE_MULTIPLIER, size).noise_bits
    return SCALE * SeededRandomness(1).rounded_gaussian(bits, size, key=(0,)).double() / 2**bits


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("support", SUPPORTS)
def test_noise_has_the_right_scale_and_neither_two_thirds_nor_three_halves_of_it(support, source):
    noise = release(SUPPORTS[support], SOURCES[source]).mean
    assert p_value(noise, SCALE) > LEVEL
    assert p_value(noise, SCALE * 2 / 3) < LEVEL
    assert p_value(noise, SCALE * 3 / 2) < LEVEL


def test_the_noise_around_a_signal_is_the_same():
    support = SUPPORTS["masked"]
    exact, noisy = (
        release(support, source, rows=20).mean for source in (SeededRandomness(1), SystemRandomness())
    )
    noise = seeded_noise(support.size)
    assert p_value(noisy - (exact - noise), SCALE) > LEVEL


def test_the_noise_does_not_depend_on_the_batch():
    support = SUPPORTS["masked"]
    noise = seeded_noise(support.size)
    sums = [release(support, SeededRandomness(1), rows=rows).mean - noise for rows in (0, 5)]
    assert float(sums[0].abs().max()) < 1e-15  # the product of the same integers, rounded twice
    assert float(sums[1].norm()) <= 5 * CLIP_NORM / EXPECTED


def test_off_the_support_there_is_exactly_nothing():
    support = SUPPORTS["masked"]
    for rows in (0, 5):
        dense = release(support, SystemRandomness(), rows=rows).dense()
        assert torch.equal(dense[~support.mask()], torch.zeros(DIMENSION - support.size, dtype=torch.float64))


@pytest.mark.parametrize("rows", [0, 5])
def test_every_coordinate_that_may_carry_signal_carries_noise(rows):
    support = SUPPORTS["masked"]
    releases = torch.stack([release(support, SystemRandomness(), rows=rows).mean for _ in range(8)])
    assert bool((releases.std(dim=0) > SCALE / 100).all())  # 8 draws that close: below 1e-12 a coordinate
    assert bool((releases[0] != 0).all())


@pytest.mark.parametrize("source", SOURCES)
def test_noise_differs_from_step_to_step(source):
    first, second = (release(SUPPORTS["full"], SOURCES[source], step=step).mean for step in (0, 1))
    assert int((first == second).sum()) == 0


def test_restored_noise_has_each_coordinates_own_scale():
    support = SUPPORTS["masked"]
    scale = torch.from_numpy(np.exp(np.random.default_rng(0).uniform(-3, 3, support.size)))
    geometry = Standardized(torch.linspace(-1, 1, support.size, dtype=torch.float64), scale)
    released = release(support, SystemRandomness(), geometry=geometry)
    torch.testing.assert_close(released.noise_scale, SCALE * scale)
    in_units_of_scale = (released.mean - geometry.centre) / released.noise_scale
    assert p_value(in_units_of_scale, 1.0) > LEVEL
    assert p_value(in_units_of_scale, 2 / 3) < LEVEL
    assert p_value(in_units_of_scale, 3 / 2) < LEVEL


def test_noise_for_feature_statistics_is_scaled_by_their_clip():
    query = ClippedVectorSum(torch.zeros(3, 8000), FlatClip(4.0))
    released = GaussianMechanism(ChargeLog(), SystemRandomness()).release(
        query, Charge("statistics", 0, 1.0, 2.5)
    )
    noisy = released.mean
    assert released.noise_scale.unique().tolist() == [10.0]
    assert p_value(noisy, 10.0) > LEVEL
    assert p_value(noisy, 10.0 * 2 / 3) < LEVEL
    assert p_value(noisy, 10.0 * 3 / 2) < LEVEL


SIZE = 200_003
RISK = 1e-9


def test_every_coordinate_of_a_large_model_gets_noise_of_its_own():
    patterns, largest = NoiseCorrelationTest(SIZE), np.zeros(SIZE)
    for step in range(KEPT):
        released = GaussianMechanism(ChargeLog(), SystemRandomness()).release(
            ClippedVectorSum(torch.zeros(1, SIZE), FlatClip(1.0)),
            Charge("main", step, 1.0, 3.0),
            expected_batch_size=1.0,
        )
        noise = released.mean.numpy() / 3
        assert abs(noise.std() - 1) < 0.012  # seven standard errors
        patterns.add(noise)
        largest = np.maximum(largest, np.abs(noise))
    assert largest.min() > 1e-3  # six normals below this: once in 10^18 coordinates
    assert patterns.problems(RISK) == []
