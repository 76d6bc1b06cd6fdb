import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsedp.errors import DataError
from sparsedp.parameters import Support
from sparsedp_experiments.theory.communication import decode_support, encode_support, encode_values, traffic


@given(st.integers(0, 300), st.floats(0, 1), st.integers(0, 10**6))
def test_supports_come_back_as_they_were_and_never_take_more_than_a_bitmap(dimension, ratio, seed):
    mask = torch.from_numpy(np.random.default_rng(seed).random(dimension) < ratio)
    support = Support.from_mask(mask)
    message = encode_support(support)
    assert decode_support(message, support.size, dimension) == support
    assert len(message) <= 1 + math.ceil(dimension / 8)


@pytest.mark.parametrize("indices", [[0], [99], [0, 99], list(range(100)), list(range(50, 100)), []])
def test_supports_at_the_edges_come_back(indices):
    support = Support(indices, 100)
    assert decode_support(encode_support(support), support.size, 100) == support


@pytest.mark.parametrize("ratio", [0.01, 0.05, 0.2, 0.5])
def test_random_indices_cost_within_five_percent_of_their_entropy(ratio):
    d = 20_000
    support = Support(np.random.default_rng(0).permutation(d)[: int(ratio * d)], d)
    entropy = d * -(ratio * math.log2(ratio) + (1 - ratio) * math.log2(1 - ratio)) / 8
    assert entropy * 0.98 < len(encode_support(support)) < entropy * 1.05 + 1


def test_values_come_back_to_the_bit():
    values = torch.randn(100, generator=torch.Generator().manual_seed(0))
    message = encode_values(values)
    assert len(message) == 400
    assert np.array_equal(np.frombuffer(message, "<f4"), values.numpy())


def test_a_run_sends_indices_once_per_refresh():
    first, second, full = Support([1, 5, 9], 1000), Support([2, 5, 9], 1000), Support.full(1000)
    supports = [full, first, first, first, second, second]
    messages = [encode_values(torch.zeros(s.size)) for s in supports]
    counted = traffic(supports, messages)
    assert counted.values == 4000 + 5 * 12
    assert counted.indices == len(encode_support(first)) + len(encode_support(second))
    assert counted.dense == 6 * 4000
    assert counted.share == pytest.approx((4060 + counted.indices) / 24_000)
    assert counted.per_step == pytest.approx((4060 + counted.indices) / 6)


def test_a_fifth_of_the_coordinates_costs_little_more_than_a_fifth_of_the_bytes():
    d, k, steps = 26_000, 5200, 100
    support = Support(np.random.default_rng(1).permutation(d)[:k], d)
    counted = traffic([support] * steps, [encode_values(torch.zeros(k))] * steps)
    assert 0.2 < counted.share < 0.2005


def test_damaged_messages_are_refused():
    support = Support([3, 40, 77], 1000)
    message = encode_support(support)
    with pytest.raises(DataError, match="damaged"):
        decode_support(message[:2], 3, 1000)
    with pytest.raises(DataError, match="damaged"):
        decode_support(message, 3, 50)
    with pytest.raises(DataError, match="no bytes"):
        decode_support(b"", 0, 10)
