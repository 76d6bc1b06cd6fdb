"""The clipping space, and the bound on one contribution."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsedp.clipping import ROUNDING_MARGIN, FlatClip, Identity, NoClip, Standardized
from sparsedp.errors import PrivacyError, SparseDPError

numbers = st.floats(-1e3, 1e3)
positive = st.floats(1e-3, 1e3)
norms = st.floats(0, 1e300)


@given(st.lists(st.tuples(numbers, numbers, positive), min_size=1, max_size=10))
def test_the_inverse_undoes_standardizing(entries):
    gradient, centre, scale = torch.tensor(entries, dtype=torch.float64).T
    geometry = Standardized(centre, scale)
    torch.testing.assert_close(geometry.inverse(geometry.forward(gradient)), gradient, rtol=1e-12, atol=1e-9)


def test_standardizing_is_gradient_minus_centre_over_scale():
    geometry = Standardized(torch.tensor([1.0, -2.0]), torch.tensor([2.0, 0.5]))
    assert geometry.forward(torch.tensor([[5.0, 1.0], [1.0, -2.0]])).tolist() == [[2.0, 6.0], [0.0, 0.0]]


def test_restored_noise_is_scaled_per_coordinate():
    geometry = Standardized(torch.zeros(2), torch.tensor([2.0, 0.5]))
    assert geometry.noise_scale(3.0, 2).tolist() == [6.0, 1.5]
    assert Identity().noise_scale(3.0, 2).tolist() == [3.0, 3.0]
    with pytest.raises(SparseDPError, match="2 entries"):
        geometry.noise_scale(3.0, 3)


def test_identity_changes_nothing():
    vector = torch.tensor([1.0, torch.nan])
    assert Identity().forward(vector) is vector
    assert Identity().inverse(vector) is vector


@pytest.mark.parametrize(
    ("centre", "scale"),
    [
        ([0.0], [0.0]),
        ([0.0], [-1.0]),
        ([0.0], [math.nan]),
        ([0.0], [math.inf]),
        ([math.nan], [1.0]),
        ([0.0, 0.0], [1.0]),
        ([[0.0]], [[1.0]]),
    ],
)
def test_a_geometry_without_an_inverse_is_refused(centre, scale):
    with pytest.raises(SparseDPError, match="Standardized"):
        Standardized(torch.tensor(centre), torch.tensor(scale))


@given(st.lists(norms, min_size=1, max_size=10), st.floats(1e-6, 1e6))
def test_a_clipped_contribution_never_exceeds_the_sensitivity(values, bound):
    clip = FlatClip(bound)
    contributions = torch.tensor(values, dtype=torch.float64)
    assert bool((clip.factors(contributions) * contributions <= clip.sensitivity).all())


@given(st.floats(1e-6, 1e6), st.floats(0, 1))
def test_a_contribution_clearly_below_the_bound_is_kept_as_it_is(bound, share):
    norm = torch.tensor([share * bound * (1 - 1.1 * ROUNDING_MARGIN)], dtype=torch.float64)
    assert FlatClip(bound).factors(norm).tolist() == [1.0]


@given(st.floats(1e-6, 1e6), st.floats(1.1, 1e6))
def test_a_contribution_above_the_bound_is_scaled_down_to_it_but_for_the_margin(bound, times):
    norm = torch.tensor([times * bound], dtype=torch.float64)
    clipped = float(FlatClip(bound).factors(norm) * norm)
    assert bound * (1 - 1.1 * ROUNDING_MARGIN) <= clipped <= bound


@pytest.mark.parametrize("clip", [FlatClip(1.0), NoClip()])
def test_a_contribution_that_is_not_finite_counts_as_absent(clip):
    norms = torch.tensor([math.nan, math.inf, 0.5], dtype=torch.float64)
    assert clip.factors(norms).tolist() == [0.0, 0.0, 1.0]


def test_without_a_clip_the_sensitivity_is_infinite():
    assert NoClip().sensitivity == math.inf
    assert NoClip().factors(torch.tensor([1e9])).tolist() == [1.0]


@pytest.mark.parametrize("norm", [0.0, -1.0, math.nan, math.inf])
def test_a_bound_that_bounds_nothing_is_refused(norm):
    with pytest.raises(PrivacyError, match="clip_norm"):
        FlatClip(norm)
