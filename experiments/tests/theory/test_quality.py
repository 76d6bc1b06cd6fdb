import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sparsedp.diagnostics import overlap, support_per_layer
from sparsedp.errors import SparseDPError
from sparsedp.parameters import ParameterLayout, Support
from sparsedp_experiments.theory.criteria import (
    concentration_curve,
    energy_captured,
    random_capture,
    recovery_curve,
    trajectory_capture,
)

ENERGIES = torch.tensor([4.0, 0.0, 1.0, 3.0, 2.0])


@given(st.integers(1, 40), st.integers(0, 10**6))
def test_projection_and_complement_make_one_and_the_full_support_captures_all(dimension, seed):
    rng = np.random.default_rng(seed)
    energies = torch.from_numpy(rng.standard_normal(dimension) ** 2)
    support = Support.from_mask(torch.from_numpy(rng.random(dimension) < 0.4))
    captured = energy_captured(energies, support)
    rest = energy_captured(energies, Support.from_mask(~support.mask()))
    assert 0 <= captured <= 1
    assert captured + rest == pytest.approx(1.0)
    assert energy_captured(energies, Support.full(dimension)) == pytest.approx(1.0)


def test_no_energy_is_captured_where_there_is_none():
    assert energy_captured(torch.zeros(3), Support([0], 3)) == 0.0
    assert random_capture(torch.zeros(3), 1).mean == 0.0


def test_random_supports_capture_k_over_d_with_the_stated_deviation():
    """z-test on the mean and chi-square-like test on the deviation, 4,000 draws; false-alarm rate below 1e-6."""
    rng, draws = np.random.default_rng(0), 4000
    energies = torch.from_numpy(rng.exponential(size=50) ** 2)
    baseline = random_capture(energies, 12)
    seen = [energy_captured(energies, Support(rng.permutation(50)[:12], 50)) for _ in range(draws)]
    assert baseline.mean == 12 / 50
    assert abs(np.mean(seen) - baseline.mean) < 5 * baseline.std / math.sqrt(draws)
    assert np.std(seen) == pytest.approx(baseline.std, rel=0.08)
    low, high = baseline.interval(0.95)
    assert 0.9 < np.mean([(low <= s <= high) for s in seen]) < 0.99


def test_curves_by_hand():
    assert concentration_curve(ENERGIES, [0.2, 0.4, 0.1, 1.0]) == pytest.approx((0.4, 0.7, 0.0, 1.0))
    order = torch.tensor([2, 0, 1, 3, 4])
    (point,) = recovery_curve(ENERGIES, order, [0.4])
    assert (point.size, point.learned, point.oracle, point.random.mean) == (2, 0.5, 0.7, 0.4)


@given(st.integers(2, 30), st.integers(0, 10**6), st.floats(0.05, 1))
def test_no_ranking_beats_the_oracle(dimension, seed, ratio):
    rng = np.random.default_rng(seed)
    energies = torch.from_numpy(rng.random(dimension))
    (point,) = recovery_curve(energies, torch.from_numpy(rng.permutation(dimension)), [ratio])
    assert point.learned <= point.oracle + 1e-12


def test_overlap_by_hand():
    found = overlap(Support([0, 1, 2, 3], 10), Support([2, 3, 4], 10))
    assert found.shared == 2
    assert found.share == pytest.approx(2 / 3)
    assert found.jaccard == pytest.approx(2 / 5)
    assert found.churn == pytest.approx(0.5)
    assert found.random.mean == pytest.approx(0.4)
    with pytest.raises(SparseDPError, match="empty"):
        overlap(Support([], 10), Support([1], 10))


def test_overlap_by_chance_agrees_with_simulation():
    """z-test and spread over 3,000 pairs; false-alarm rate below 1e-6."""
    rng, first = np.random.default_rng(1), Support(range(9), 30)
    found = [overlap(first, Support(rng.permutation(30)[:12], 30)) for _ in range(3000)]
    shares, chance = np.array([o.share for o in found]), found[0].random
    assert abs(shares.mean() - chance.mean) < 5 * chance.std / math.sqrt(3000)
    assert shares.std() == pytest.approx(chance.std, rel=0.1)


def test_support_per_layer_counts_every_coordinate_once():
    layout = ParameterLayout.of(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)))
    shares = support_per_layer(Support([0, 1, 6, 8, 10], 11), layout)
    assert [(s.size, s.active) for s in shares] == [(6, 2), (2, 1), (2, 1), (1, 1)]
    assert shares[0].active_ratio == pytest.approx(1 / 3)


def test_trajectory_capture_weighs_steps_by_their_energy():
    assert trajectory_capture([1.0, 0.0], [2.0, 8.0]) == 0.1
    assert trajectory_capture([0.0], [0.0]) == 1.0
    assert trajectory_capture([3.0, 5.0], [3.0, 5.0]) == 1.0
    with pytest.raises(SparseDPError, match="alpha_T"):
        trajectory_capture([1.0], [])
