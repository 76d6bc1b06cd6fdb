"""Private normalisation: what one unit can move, the noise, and what the whole plan costs.

Kolmogorov-Smirnov tests at level 1e-6 each: a run of this file raises a false alarm less than once in 100,000.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsedp.batch import MicroBatch
from sparsedp.clipping import FlatClip
from sparsedp.errors import DataError, PrivacyError
from sparsedp.methods import build_plan, get_method
from sparsedp.privacy import EqualNoise, NominalSplit, Plan, PrivateNormalisation, plan_epsilon
from sparsedp.privacy.plan import dp_event
from sparsedp.privacy.queries import ChannelStatisticsSum

LEVEL = 1e-6
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
    x = inputs.double().numpy()
    total = np.zeros(4)
    for unit in sorted(set(units)):
        rows = []
        for row in x[np.asarray(units) == unit]:
            flat = row.reshape(4, -1)
            if centre is None:
                rows.append([np.mean(channel) for channel in flat])
            else:
                rows.append(
                    [np.sqrt(np.mean((c - m) ** 2)) for c, m in zip(flat, centre.tolist(), strict=True)]
                )
        vector = np.mean(rows, axis=0)
        length = np.sqrt(np.sum(vector**2))
        if np.isfinite(length):
            total += vector * min(1.0, CLIP / 1.001 / length)
    return total


@pytest.mark.parametrize("centre", [None, CENTRE], ids=["means", "spreads"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("units", [None, [0, 0, 0, 1, 2, 2, 3]], ids=["rows", "patients"])
def test_the_sum_is_what_the_definition_says(shape, centre, units):
    inputs = torch.randn(7, *SHAPES[shape], generator=torch.Generator().manual_seed(1))
    found = channel_sum(inputs, None if units is None else torch.tensor(units), centre)
    np.testing.assert_allclose(found.numpy(), by_hand(inputs, units or range(7), centre), rtol=1e-6)


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


@pytest.mark.parametrize(
    "rows",
    [torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3), {"x": torch.zeros(3, 4)}],
    ids=["token ids", "no channels", "a dict"],
)
def test_inputs_that_have_no_channels_of_numbers_are_refused(rows):
    with pytest.raises(DataError, match="normalise: got inputs"):
        sum(ChannelStatisticsSum([MicroBatch(rows)], 4, FlatClip(CLIP)).partial_sums(CLIP))


def test_columns_that_are_left_out_neither_count_nor_take_part_in_the_clip():
    inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
    extreme = inputs.clone()
    extreme[:, [0, 2]] *= 1e6
    kept = torch.tensor([1, 3])
    plain = channel_sum(inputs, columns=kept)
    assert torch.equal(channel_sum(extreme, columns=kept), plain)
    x = inputs[:, kept].double().numpy()
    lengths = np.linalg.norm(x, axis=1, keepdims=True)
    expected = (x * np.minimum(1, CLIP / 1.001 / lengths)).sum(axis=0)
    np.testing.assert_allclose(plain.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("columns", [(), (1, 1), (-1,), (True,), ("age",), "ab"])
def test_columns_are_distinct_numbers(columns):
    with pytest.raises(PrivacyError, match="normalise: columns: got"):
        PrivateNormalisation(columns=columns)


def test_other_channels_than_declared_are_refused():
    with pytest.raises(DataError, match="got 3 channels, expected 4"):
        sum(ChannelStatisticsSum([MicroBatch(torch.zeros(2, 3))], 4, FlatClip(CLIP)).partial_sums(CLIP))


def plan_of(method: str, **more: object) -> Plan:
    return build_plan(
        get_method(method), units=45_000, batch_size=4096, epochs=4, epsilon=3.0, delta=1e-5, max_grad_norm=0.1,
        **more,
    )  # fmt: skip


@pytest.mark.parametrize("split", [EqualNoise(), NominalSplit(0.3)], ids=["equal", "nominal"])
@pytest.mark.parametrize("method", ["dp-sgd", "tp-topk"])
def test_the_whole_plan_costs_the_target_and_no_more_by_two_accountants(method, split):
    import dp_accounting as dp

    plan = plan_of(method, normalise=PrivateNormalisation(8.0), accountant="rdp", split=split)
    first = plan.phases[0]
    assert (first.name, first.steps, first.sampling_rate, first.trains) == ("normalise", 2, 1.0, False)
    assert first.noise_multiplier == 8.0
    assert 0.995 * 3 <= plan_epsilon(plan) <= 3
    for accountant in (dp.rdp.RdpAccountant(), dp.pld.PLDAccountant(value_discretization_interval=1e-3)):
        assert accountant.compose(dp_event(plan.events())).get_epsilon(1e-5) <= 3.0


def test_a_normalisation_that_costs_more_than_the_budget_is_refused():
    with pytest.raises(PrivacyError, match=r"epsilon=3 .*too small.*noise already \(normalise\)"):
        plan_of("dp-sgd", normalise=PrivateNormalisation(0.5), accountant="rdp")


@pytest.mark.parametrize(
    "values", [{"noise_multiplier": 0}, {"clip_norm": -1.0}, {"clip_norm": "1"}, {"noise": 8}]
)
def test_what_is_asked_for_is_checked(values):
    with pytest.raises(PrivacyError, match="normalise"):
        PrivateNormalisation.from_json(values)
