"""The grid: the same for every data set, wide enough, and one unit moves a sum on it by at most the clip norm."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sparsedp.batch import MicroBatch
from sparsedp.clipping import ROUNDING_MARGIN, FlatClip
from sparsedp.errors import PrivacyError
from sparsedp.grad_sample import ENGINES, Query
from sparsedp.parameters import Support
from sparsedp.privacy.ledger import Charge, MemoryLedger
from sparsedp.privacy.mechanism import MARGIN_BITS, GaussianMechanism, Grid
from sparsedp.privacy.queries import GradientSum
from sparsedp.randomness import SystemRandomness
from sparsedp.sampling import cut

CLIPS, NOISES, SIZES = [1e-6, 1.0, 1e6], [0.3, 1.0, 33.3, 1000.0], [1, 26_010, 550_570, 10**7]


def moved(grid: Grid, before: list[Tensor], after: list[Tensor]) -> Fraction:
    """The squared move of the sum, in squares of noise standard deviations: exact."""
    steps = (
        grid.round_and_sum(map(torch.clone, after)) - grid.round_and_sum(map(torch.clone, before))
    ).tolist()
    return Fraction(sum(step * step for step in steps), 4**grid.noise_bits)


def allowed(noise_multiplier: float) -> Fraction:
    """What the accountant is told: the sensitivity is one over the noise multiplier, squared."""
    return 1 / Fraction(noise_multiplier) ** 2


@pytest.mark.parametrize(("clip", "noise", "size"), itertools.product(CLIPS, NOISES, SIZES))
def test_the_noise_is_a_power_of_two_of_steps_and_all_extremes_have_a_grid(clip, noise, size):
    grid = Grid.for_mechanism(clip, noise, size)
    assert Fraction(grid.step) * 2**grid.noise_bits == Fraction(noise * clip)
    assert 1.5 * math.sqrt(size) * grid.step <= 2.0 ** -(MARGIN_BITS + 1) * clip
    assert grid.step * math.sqrt(size) * 1.5 > 2.0 ** -(MARGIN_BITS + 2) * clip * 0.999
    million = grid.round_and_sum([torch.tensor([1e6 * clip, -1e6 * clip], dtype=torch.float64)])
    assert million.tolist() == [round(1e6 * clip / grid.step), -round(1e6 * clip / grid.step)]
    assert million[0] + 40 * 2**grid.noise_bits < 2**61
    back = grid.dequantize(million)
    torch.testing.assert_close(
        back, torch.tensor([1e6, -1e6], dtype=torch.float64) * clip, rtol=1e-12, atol=0
    )


def test_the_grid_depends_on_public_numbers_alone():
    assert Grid.for_mechanism(0.7, 1.3, 100) == Grid.for_mechanism(0.7, 1.3, 100)
    assert Grid.for_mechanism(1.0, 1.0, 100).noise_bits < Grid.for_mechanism(1.0, 1.0, 10_000).noise_bits


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("clip", "noise"), [(1.0, 1.0), (0.3, 1.7), (1e-6, 1000.0), (1e6, 0.3)])
@pytest.mark.parametrize("others", [0.0, 0.77, 1e3])
def test_the_worst_roundings_stay_within_what_the_accountant_is_told(size, clip, noise, others):
    """In every coordinate one part just below a half step becomes two just above it, and the unit moves its most."""
    grid = Grid.for_mechanism(clip, noise, size)
    base, unit = round(others * clip / grid.step), grid.bound / math.sqrt(size) / grid.step
    whole, left, right = base + 0.499, base + 0.501, math.floor(unit - 0.51) + 0.501
    before, *after = (
        torch.full((size,), part * grid.step, dtype=torch.float64) for part in (whole, left, right)
    )
    assert float(torch.linalg.vector_norm(sum(after) - before)) <= grid.bound
    assert moved(grid, [before], after) <= allowed(noise)
    assert (grid.round_and_sum(after) - grid.round_and_sum([before])).tolist() == [
        math.floor(unit - 0.51) + 2
    ] * size


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 7]), st.sampled_from([0.3, 1.0, 21.0]))
@settings(max_examples=150)
def test_a_unit_added_moves_a_sum_of_cut_parts_by_at_most_the_clip(seed, most, noise):
    rng = np.random.default_rng(seed)
    size, clip = int(rng.integers(1, 6)), float(10 ** rng.uniform(-6, 6))
    grid = Grid.for_mechanism(clip, noise, size)
    units = np.flatnonzero(rng.random(32) < 0.4)
    rows = rng.standard_normal((32, size))
    rows *= grid.bound / np.linalg.norm(rows, axis=1, keepdims=True)
    rows = np.where(rng.random((32, 1)) < 0.5, rows, (rng.integers(-9, 9, (32, size)) + 0.5) * grid.step)
    newcomer = int(rng.integers(32))

    def parts(members: np.ndarray) -> list[Tensor]:
        zero = torch.zeros(size, dtype=torch.float64)
        return [zero, *(torch.from_numpy(rows[members[run]].sum(axis=0)) for run in cut(members, most))]

    without = units[units != newcomer]
    assert moved(grid, parts(without), parts(np.union1d(without, [newcomer]))) <= allowed(noise)


def test_without_the_margin_the_worst_rounding_would_pass_the_clip():
    grid = Grid.for_mechanism(1.0, 1.0, 4)
    unit = torch.full((4,), (math.ceil(0.5 / grid.step) + 0.5001) * grid.step, dtype=torch.float64)
    assert moved(grid, [torch.zeros(4)], [unit]) > allowed(1.0)
    assert float(unit.norm()) > grid.bound


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_any_order_and_any_number_of_ranks_give_the_same_bits(ranks):
    grid = Grid.for_mechanism(1.0, 1.1, 50)
    generator = torch.Generator().manual_seed(0)
    parts = [100 * torch.randn(50, generator=generator, dtype=torch.float64) for _ in range(12)]
    expected = grid.round_and_sum(map(torch.clone, parts))
    shares = [grid.round_and_sum(parts[rank::ranks][::-1]) for rank in range(ranks)]
    assert torch.equal(sum(shares), expected)
    assert expected.dtype == torch.int64


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
def test_what_is_off_the_grid_stops_the_step_before_any_noise(bad):
    @dataclass
    class Broken:
        size: int = 2
        sensitivity: float = 1.0

        def partial_sums(self, bound: float) -> Iterator[Tensor]:
            yield torch.tensor([0.0, bad], dtype=torch.float64)

    class NoNoise:
        for_release = True

        def add_rounded_gaussian(self, *_: object, **__: object) -> None:
            raise AssertionError("noise was drawn")

    with pytest.raises(PrivacyError, match="nothing was released"):
        GaussianMechanism(MemoryLedger(), NoNoise()).noisy_sum(Broken(), Charge("train", 0, 0.1, 1.0))


def test_integers_that_would_overflow_stop_it_too():
    grid = Grid.for_mechanism(1.0, 1.0, 1)
    large = torch.tensor([2.0**60 * grid.step], dtype=torch.float64)
    assert grid.round_and_sum([large.clone()]) == 2**60
    with pytest.raises(PrivacyError, match="too many units"):
        grid.round_and_sum([large.clone(), large])
    with pytest.raises(PrivacyError, match="without parts"):
        grid.round_and_sum([])


@pytest.mark.parametrize(("clip", "noise", "size"), [(1.0, 1e9, 10**7), (1e-306, 1.0, 10), (1e300, 1e300, 1)])
def test_numbers_no_grid_holds_are_refused_before_the_ledger_is_charged(clip, noise, size):
    @dataclass
    class Huge:
        size: int
        sensitivity: float

    ledger = MemoryLedger()
    with pytest.raises(PrivacyError):
        GaussianMechanism(ledger, SystemRandomness()).noisy_sum(Huge(size, clip), Charge("t", 0, 0.1, noise))
    assert ledger.charges == []


def squares(model: nn.Module, rows: tuple[Tensor, Tensor]) -> Tensor:
    return (model(rows[0]) - rows[1]).square().sum(1)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rows", [0, 1, 40])
def test_every_released_value_is_on_the_grid_whatever_the_data(engine, rows):
    torch.manual_seed(rows)
    support, clip, noise, expected = Support([0, 3, 4, 9], 10), 0.37, 1.3, 7.0
    batches = [MicroBatch((torch.randn(part, 4), torch.randn(part, 2))) for part in (rows, rows // 2)]
    clipped = GradientSum(ENGINES[engine](nn.Linear(4, 2), squares), batches, Query(support, FlatClip(clip)))
    released = GaussianMechanism(MemoryLedger(), SystemRandomness()).release(
        clipped, Charge("train", 0, 0.1, noise), expected_batch_size=expected
    )
    grid = Grid.for_mechanism(clip, noise, support.size)
    steps = (released.mean * expected / grid.step).round().to(torch.int64)
    assert torch.equal(grid.dequantize(steps).div_(expected), released.mean)
    assert released.noise_scale.tolist() == [noise * clip / expected] * 4


@pytest.mark.parametrize("engine", ENGINES)
def test_plan_ledger_and_mechanism_agree_after_the_margin(engine, monkeypatch):
    """A unit far over the clip moves the release by just below what the charge says, and by no more."""
    clip, noise = 0.5, 0.8
    charge = Charge("train", 0, 0.1, noise)
    ledger = MemoryLedger()
    monkeypatch.setattr(
        SystemRandomness,
        "add_rounded_gaussian",
        lambda self, bits, sums, key: None,
    )
    model = nn.Linear(4, 2)
    query = Query(Support.full(10), FlatClip(clip))

    def silent(batches: list[MicroBatch]) -> Tensor:
        clipped = GradientSum(ENGINES[engine](model, squares), batches, query)
        mechanism = GaussianMechanism(ledger, SystemRandomness())
        return mechanism.release(clipped, charge, expected_batch_size=1.0).mean

    row = MicroBatch((torch.full((1, 4), 50.0), torch.zeros(1, 2)))
    others = MicroBatch((torch.randn(9, 4), torch.randn(9, 2)))
    change = float((silent([others, row]) - silent([others])).norm())
    grid = Grid.for_mechanism(clip, noise, 10)
    assert grid.bound / (1 + 1.1 * ROUNDING_MARGIN) - 4 * grid.step < change <= clip
    assert ledger.charges[0].noise_multiplier * clip == grid.step * 2**grid.noise_bits
