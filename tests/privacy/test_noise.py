"""Noise, measured: the right scale on every active coordinate, none elsewhere, fresh at every step.

Kolmogorov-Smirnov tests at level 1e-6 each: a run of this file raises a false alarm less than once in 100,000.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from sparsedp.auditing.mechanism import KEPT, NoiseCorrelationTest
from sparsedp.batch import MicroBatch
from sparsedp.clipping import FlatClip, Geometry, Identity, Standardized
from sparsedp.grad_sample import BookKeepingEngine, ClippedSumQuery
from sparsedp.parameters import Support
from sparsedp.privacy.charge import Charge, ChargeLog
from sparsedp.privacy.mechanism import GaussianMechanism, Grid, Release
from sparsedp.privacy.queries import BoundedSum, ClippedVectorSum, GradientSum
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


def test_a_mechanism_with_too_little_or_too_much_noise_would_be_found():
    for wrong in (2 / 3, 3 / 2):
        noise = wrong * release(SUPPORTS["full"], SOURCES["system"]).mean
        assert p_value(noise, SCALE) < LEVEL


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


def test_noise_is_independent_between_coordinates_and_steps():
    draws = [release(SUPPORTS["full"], SystemRandomness(), step=step).mean.numpy() for step in range(2)]
    assert stats.pearsonr(draws[0], draws[1]).pvalue > LEVEL
    assert stats.pearsonr(draws[0][:-1], draws[0][1:]).pvalue > LEVEL
    half = DIMENSION // 2
    assert stats.pearsonr(draws[0][:half], draws[0][half:]).pvalue > LEVEL


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


def test_the_declared_noise_scale_is_the_noise_that_was_added():
    released = release(SUPPORTS["full"], SystemRandomness())
    assert p_value(released.mean / released.noise_scale, 1.0) > LEVEL


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


PAIRS, TRIALS, STD, SHIFT = 16, 100, 1.0, 1e-3
AROUND = 6
"""Multiples of 2^-53 tried on each side of a solution."""

Attack = Callable[[np.ndarray, np.ndarray, np.ndarray], bool | None]


def box_muller(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The noise of earlier versions, from two uniform multiples of 2^-53."""
    radius = torch.from_numpy(-first).log1p().mul(-2.0).sqrt()
    angle = torch.from_numpy(second) * (2.0 * np.pi)
    return (radius * angle.cos()).numpy(), (radius * angle.sin()).numpy()


def old_release(total: np.ndarray) -> np.ndarray:
    words = np.random.default_rng().integers(0, 2**53, len(total))
    half = len(total) // 2
    noise = np.concatenate(box_muller(words[:half] * 2.0**-53, words[half:] * 2.0**-53))
    return total + STD * noise


@dataclass
class _Given(BoundedSum):
    total: np.ndarray
    clip: FlatClip = field(default_factory=lambda: FlatClip(1.0))

    @property
    def size(self) -> int:
        return len(self.total)

    def partial_sums(self, bound: float) -> Iterator[Tensor]:
        yield torch.tensor(self.total)


def new_release(total: np.ndarray) -> np.ndarray:
    charge = Charge("train", 0, 1.0, STD)
    return GaussianMechanism(ChargeLog(), SystemRandomness()).release(_Given(total), charge).mean.numpy()


def pairs_reached(released: np.ndarray, total: np.ndarray) -> int:
    """In how many pairs of coordinates Box-Muller noise leads from the sum to the release."""
    half = len(total) // 2
    x, y = ((released - total) / STD).reshape(2, half)
    first = np.rint(-np.expm1(-(x * x + y * y) / 2) * 2.0**53)
    second = np.rint(np.arctan2(y, x) / (2 * np.pi) % 1.0 * 2.0**53)
    reached = np.zeros(half, dtype=bool)
    for i, j in itertools.product(range(-AROUND, AROUND + 1), repeat=2):
        uniform = [np.clip(u, 0, 2.0**53 - 1) * 2.0**-53 for u in (first + i, second + j)]
        again = total + STD * np.concatenate(box_muller(*uniform))
        reached |= (again == released).reshape(2, half).all(axis=0)
    return int(reached.sum())


def by_uniforms(released: np.ndarray, here: np.ndarray, there: np.ndarray) -> bool | None:
    """Whether it came from `there`: the sum that reaches more pairs."""
    counts = pairs_reached(released, here), pairs_reached(released, there)
    return None if counts[0] == counts[1] else counts[1] > counts[0]


def by_the_grid(released: np.ndarray, here: np.ndarray, there: np.ndarray) -> bool | None:
    """What one would try now: is the release a whole number of steps from one sum, and not from the other?"""
    step = Grid.for_mechanism(1.0, STD, len(here)).step
    whole = [np.all((released - np.rint(total / step) * step) % step == 0) for total in (here, there)]
    return None if whole[0] == whole[1] else bool(whole[1])


def right_guesses(release: Callable[[np.ndarray], np.ndarray], attack: Attack) -> int:
    """Of TRIALS; a coin decides where the attack has nothing to say."""
    rng, right = np.random.default_rng(), 0
    for _ in range(TRIALS):
        here = rng.standard_normal(2 * PAIRS)
        there = here + SHIFT
        truth = bool(rng.integers(2))
        guess = attack(release(there if truth else here), here, there)
        right += (bool(rng.integers(2)) if guess is None else guess) == truth
    return right


def test_float_noise_tells_a_thousandth_of_its_size_from_nothing():
    assert right_guesses(old_release, by_uniforms) == TRIALS


@pytest.mark.parametrize("attack", [by_uniforms, by_the_grid])
def test_noise_on_the_grid_tells_nothing(attack):
    """The true advantage is 0.2 %; a false alarm comes once in a million."""
    assert stats.binomtest(right_guesses(new_release, attack), TRIALS).pvalue > 1e-6


def test_every_release_can_come_from_either_sum():
    rng = np.random.default_rng()
    here = rng.standard_normal(2 * PAIRS)
    for total in (here, here + SHIFT):
        assert by_the_grid(new_release(total), here, here + SHIFT) is None


def test_float_noise_has_releases_that_only_one_sum_can_give():
    here = np.random.default_rng().standard_normal(2 * PAIRS)
    released = old_release(here)
    assert pairs_reached(released, here) == PAIRS
    assert pairs_reached(released, here + SHIFT) < PAIRS
