import numpy as np
import pytest
import torch
from method_tools import release

from sparsedp.core.errors import SparseDPError
from sparsedp.core.support import Support
from sparsedp.methods.standardization import Decays, Statistics


def test_hand_computed_update_moves_beta_with_the_old_alpha():
    support = Support([0, 2], 3)
    decays = Decays(centre=0.9, variance=0.99, stabilizer=0.5)
    first = Statistics.fresh(3).updated(release(support, torch.tensor([2.0, -1.0])), decays)
    np.testing.assert_allclose(first.alpha, [0.2, 0, -0.1])
    np.testing.assert_allclose(first.beta, [0.99 + 0.01 * 4, 1, 0.99 + 0.01 * 1])
    second = first.updated(release(support, torch.tensor([1.0, 1.0])), decays)
    np.testing.assert_allclose(second.alpha, [0.9 * 0.2 + 0.1, 0, -0.09 + 0.1])
    np.testing.assert_allclose(
        second.beta, [0.99 * 1.03 + 0.01 * (1 - 0.2) ** 2, 1, 0.99 * 1.0 + 0.01 * (1 + 0.1) ** 2]
    )


def test_the_geometry_is_centre_alpha_and_scale_root_beta_plus_mu_on_the_support():
    statistics = Statistics(torch.tensor([1.0, 2.0, 3.0]).double(), torch.tensor([4.0, 9.0, 16.0]).double())
    geometry = statistics.geometry(Support([0, 2], 3), Decays(stabilizer=0.5))
    assert geometry.centre.tolist() == [1.0, 3.0]
    assert geometry.scale.tolist() == [2.5, 4.5]
    assert geometry.noise_scale(0.1, 2).tolist() == pytest.approx([0.25, 0.45])


def test_coordinates_off_the_support_are_back_at_their_start():
    statistics = Statistics(torch.tensor([1.0, 2.0, 3.0]).double(), torch.tensor([4.0, 9.0, 16.0]).double())
    restricted = statistics.restricted(Support([1], 3))
    assert restricted.alpha.tolist() == [0, 2, 0]
    assert restricted.beta.tolist() == [1, 9, 1]


def test_the_first_geometry_barely_scales():
    geometry = Statistics.fresh(4).geometry(Support.full(4), Decays())
    assert geometry.centre.tolist() == [0.0] * 4
    assert geometry.scale.tolist() == [1 + 1e-6] * 4


@pytest.mark.parametrize(
    "bad",
    [{"centre": 1.0}, {"variance": -0.1}, {"stabilizer": 0.0}, {"stabilizer": float("inf")}, {"centre": 2}],
)
def test_constants_that_would_divide_by_zero_or_never_forget_are_refused(bad):
    with pytest.raises(SparseDPError, match="got"):
        Decays(**bad)
