"""Noise, measured: the right scale on every active coordinate, none elsewhere, fresh at every step.

Normalisation: what one unit can move, and what the whole plan costs.

Kolmogorov-Smirnov tests at level 1e-6 each: a run of this file raises a false alarm less than once in 100,000.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

from sparsedp.auditing.mechanism import KEPT, NoiseCorrelationTest
from sparsedp.batch import MicroBatch
from sparsedp.clipping import FlatClip, Geometry, Identity, Standardized
from sparsedp.errors import DataError, SparseDPError
from sparsedp.grad_sample import BookKeepingEngine, ClippedSumQuery
from sparsedp.methods import build_plan
from sparsedp.parameters import Support
from sparsedp.privacy import EqualNoise, NominalSplit, PrivateNormalisation, plan_epsilon
from sparsedp.privacy.charge import Charge, ChargeLog
from sparsedp.privacy.mechanism import GaussianMechanism, Grid, Release
from sparsedp.privacy.plan import dp_event
from sparsedp.privacy.queries import ChannelStatisticsSum, ClippedVectorSum, GradientSum
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


def check_scale(noise: torch.Tensor, scale: float) -> None:
    """Normal with that deviation, and neither with two thirds nor with three halves of it."""
    values = [
        stats.kstest(noise.numpy(), "norm", args=(0, part * scale)).pvalue for part in (1, 2 / 3, 3 / 2)
    ]
    assert [value > LEVEL for value in values] == [True, False, False]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("support", SUPPORTS)
def test_noise_has_the_right_scale_and_neither_two_thirds_nor_three_halves_of_it(support, source):
    check_scale(release(SUPPORTS[support], SOURCES[source]).mean, SCALE)


def test_the_noise_is_the_same_around_a_signal_and_does_not_depend_on_the_batch():
    support = SUPPORTS["masked"]
    bits = Grid.for_mechanism(CLIP_NORM, NOISE_MULTIPLIER, support.size).noise_bits
    noise = SCALE * SeededRandomness(1).rounded_gaussian(bits, support.size, key=(0,)).double() / 2**bits
    nothing, signal = (release(support, SeededRandomness(1), rows=rows).mean - noise for rows in (0, 20))
    assert float(nothing.abs().max()) < 1e-15  # the product of the same integers, rounded twice
    assert float(signal.norm()) <= 20 * CLIP_NORM / EXPECTED
    check_scale(release(support, SystemRandomness(), rows=20).mean - signal, SCALE)


@pytest.mark.parametrize("rows", [0, 5])
def test_every_coordinate_that_may_carry_signal_carries_noise_and_no_other(rows):
    support = SUPPORTS["masked"]
    releases = [release(support, SystemRandomness(), rows=rows) for _ in range(8)]
    spread = torch.stack([one.mean for one in releases]).std(dim=0)
    assert bool((spread > SCALE / 100).all())  # 8 draws that close: below 1e-12 a coordinate
    assert bool((releases[0].mean != 0).all())
    assert not releases[0].dense()[~support.mask()].any()


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
    check_scale((released.mean - geometry.centre) / released.noise_scale, 1.0)


def test_noise_for_feature_statistics_is_scaled_by_their_clip():
    query = ClippedVectorSum(torch.zeros(3, 8000), FlatClip(4.0))
    released = GaussianMechanism(ChargeLog(), SystemRandomness()).release(
        query, Charge("statistics", 0, 1.0, 2.5)
    )
    assert released.noise_scale.unique().tolist() == [10.0]
    check_scale(released.mean, 10.0)


def test_every_coordinate_of_a_large_model_gets_noise_of_its_own():
    size = 200_003
    patterns, largest = NoiseCorrelationTest(size), np.zeros(size)
    for step in range(KEPT):
        released = GaussianMechanism(ChargeLog(), SystemRandomness()).release(
            ClippedVectorSum(torch.zeros(1, size), FlatClip(1.0)), Charge("main", step, 1.0, 3.0)
        )
        noise = released.mean.numpy() / 3
        assert abs(noise.std() - 1) < 0.012  # seven standard errors
        patterns.add(noise)
        largest = np.maximum(largest, np.abs(noise))
    assert largest.min() > 1e-3  # six normals below this: once in 10^18 coordinates
    assert patterns.problems(1e-9) == []


CLIP = 0.7
SHAPES = {"features": (4,), "maps": (4, 3, 5), "sequence": (4, 6)}
CENTRE = torch.tensor([0.1, -0.2, 0.0, 3.0])


def channel_sum(
    inputs: Tensor, units: Tensor | None = None, centre: Tensor | None = None, columns: Tensor | None = None
) -> Tensor:
    batch = MicroBatch((inputs, torch.zeros(len(inputs))), units)
    return sum(ChannelStatisticsSum([batch], 4, FlatClip(CLIP), centre, columns).partial_sums(CLIP))


def by_hand(inputs: Tensor, units: Sequence[int], centre: Tensor | None) -> np.ndarray:
    """The same in NumPy, unit by unit, with the clip's margin."""
    x = inputs.double().numpy().reshape(len(inputs), inputs.shape[1], -1)
    statistics = x.mean(axis=2)
    if centre is not None:
        statistics = np.sqrt(((x - centre.numpy()[:, None]) ** 2).mean(axis=2))
    total = np.zeros(inputs.shape[1])
    for unit in sorted(set(units)):
        vector = statistics[np.asarray(units) == unit].mean(axis=0)
        length = np.sqrt(np.sum(vector**2))
        if np.isfinite(length):
            total += vector * min(1.0, CLIP / 1.001 / length)
    return total


@pytest.mark.parametrize("centre", [None, CENTRE], ids=["means", "spreads"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("units", [None, [0, 0, 0, 1, 2, 2, 3]], ids=["rows", "patients"])
@pytest.mark.parametrize("columns", [None, [1, 3]], ids=["all", "two columns"])
def test_the_sum_is_what_the_definition_says(shape, centre, units, columns):
    """Columns that are left out neither count nor take part in the clip."""
    inputs = torch.randn(7, *SHAPES[shape], generator=torch.Generator().manual_seed(1))
    kept = torch.tensor(columns or range(4))
    centre = None if centre is None else centre[kept]
    asked = None if columns is None else kept
    found = channel_sum(inputs, None if units is None else torch.tensor(units), centre, asked)
    np.testing.assert_allclose(found.numpy(), by_hand(inputs[:, kept], units or range(7), centre), rtol=1e-6)


@given(
    size=st.floats(-200, 200).map(lambda power: 10.0 ** (power / 6)),
    rows=st.integers(1, 5),
    spoilt=st.sampled_from([None, torch.nan, torch.inf, -torch.inf]),
    spread=st.booleans(),
    columns=st.sampled_from([None, (1,), (0, 1, 3)]),
    seed=st.integers(0, 10),
)
@settings(deadline=None, max_examples=150)
def test_one_more_patient_moves_the_sum_by_at_most_the_clip(size, rows, spoilt, spread, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    others, own = (torch.randn(count, 4, 2, 2, generator=generator).double() for count in (5, rows))
    own *= size
    if spoilt is not None:
        own[0, 1, 0, 1] = spoilt
    chosen = None if columns is None else torch.tensor(columns)
    centre = (CENTRE if chosen is None else CENTRE[chosen]) if spread else None
    before = channel_sum(others, torch.tensor([0, 0, 1, 2, 2]), centre, chosen)
    after = channel_sum(torch.cat([others, own]), torch.tensor([0, 0, 1, 2, 2] + [3] * rows), centre, chosen)
    moved = float((after - before).norm())
    assert moved <= CLIP
    assert moved == 0 or spoilt is None


def test_inputs_without_the_channels_of_numbers_that_were_declared_are_refused():
    tokens, flat, named = torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3), {"x": torch.zeros(3, 4)}
    for rows in (tokens, flat, named, torch.zeros(2, 3)):
        with pytest.raises(DataError, match=r"normalise: got inputs|got 3 channels, expected 4"):
            sum(ChannelStatisticsSum([MicroBatch(rows)], 4, FlatClip(CLIP)).partial_sums(CLIP))


@pytest.mark.parametrize("split", [EqualNoise(), NominalSplit(0.3)], ids=["equal", "nominal"])
@pytest.mark.parametrize("method", ["dp-sgd", "tp-topk"])
def test_the_whole_plan_costs_the_target_and_no_more_by_two_accountants(method, split):
    import dp_accounting as dp

    plan = build_plan(
        method, units=45_000, batch_size=4096, epochs=4, epsilon=3.0, delta=1e-5, max_grad_norm=0.1,
        normalise=PrivateNormalisation(8.0), accountant="rdp", split=split,
    )  # fmt: skip
    first = plan.phases[0]
    assert (first.name, first.steps, first.sampling_rate, first.trains) == ("normalise", 2, 1.0, False)
    assert first.noise_multiplier == 8.0
    assert 0.995 * 3 <= plan_epsilon(plan) <= 3
    for accountant in (dp.rdp.RdpAccountant(), dp.pld.PLDAccountant(value_discretization_interval=1e-3)):
        assert accountant.compose(dp_event(plan.events())).get_epsilon(1e-5) <= 3.0


@pytest.mark.parametrize(
    "values",
    [{"noise_multiplier": 0}, {"clip_norm": -1.0}, {"clip_norm": "1"}, {"noise": 8}]
    + [{"columns": columns} for columns in ([], [1, 1], [-1], [True], ["age"])],
)
def test_what_is_asked_for_is_checked(values):
    with pytest.raises(SparseDPError, match="normalise"):
        PrivateNormalisation.from_json(values)
