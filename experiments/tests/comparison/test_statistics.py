"""Means, intervals and paired differences."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sparsedp.errors import SparseDPError
from sparsedp_experiments.runs.results import estimate, paired_difference

T_TABLE = {2: 12.7062, 3: 4.3027, 5: 2.7764, 10: 2.2622, 30: 2.0452}
"""Two-sided 95 % points of Student's t for n values, from the printed tables."""


@pytest.mark.parametrize("n", T_TABLE)
def test_the_interval_is_the_mean_and_the_tables_t_times_the_standard_error(n):
    values = np.random.default_rng(n).normal(3.0, 2.0, n)
    found = estimate(values.tolist())
    half = T_TABLE[n] * values.std(ddof=1) / math.sqrt(n)
    assert found.count == n
    assert found.mean == pytest.approx(values.mean())
    assert found.std == pytest.approx(values.std(ddof=1))
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=2e-5)
    assert (found.high + found.low) / 2 == pytest.approx(values.mean())


def test_the_interval_covers_the_truth_19_times_of_20():
    """4,000 intervals at 95 %: outside 3,742 .. 3,856 with probability below 1e-5 (binomial, 4.2 deviations)."""
    samples = np.random.default_rng(7).normal(1.0, 3.0, (4000, 4))
    covered = sum(found.low <= 1.0 <= found.high for found in map(estimate, samples.tolist()))
    assert 3742 <= covered <= 3856


def test_a_single_value_has_no_spread_and_no_interval():
    found = estimate([0.7])
    assert (found.count, found.mean, found.std, found.low, found.high) == (1, 0.7, None, None, None)


def test_no_value_is_an_error():
    with pytest.raises(SparseDPError, match="no values"):
        estimate([])


def test_pairs_are_made_of_common_seeds_only():
    values, baseline = {0: 0.9, 1: 0.8, 5: 0.1}, {1: 0.5, 0: 0.7, 9: 0.0}
    found = paired_difference(values, baseline)
    assert found is not None
    assert found.count == 2
    assert found.mean == pytest.approx(((0.9 - 0.7) + (0.8 - 0.5)) / 2)
    assert paired_difference({1: 0.5}, {2: 0.5}) is None


def test_pairing_removes_what_seeds_share():
    shared = np.random.default_rng(0).normal(0, 10, 12)
    values = {i: float(x + 1.0 + 0.01 * i) for i, x in enumerate(shared)}
    baseline = {i: float(x) for i, x in enumerate(shared)}
    found = paired_difference(values, baseline)
    assert found is not None
    assert found.low > 0.9
    assert estimate(list(values.values())).low < 0
