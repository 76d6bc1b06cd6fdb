import numpy as np
import pytest
import torch
from method_tools import release

from sparsedp.errors import SparseDPError
from sparsedp.methods.method import Decays, Statistics
from sparsedp.parameters import Support


def test_hand_computed_update_moves_beta_with_the_old_alpha():
    support = Support([0, 2], 3)
    decays = Decays(centre=0.9, variance=0.99, stabilizer=0.5)
    first = Statistics.fresh(support).updated(release(support, torch.tensor([2.0, -1.0])), decays)
    np.testing.assert_allclose(first.alpha, [0.2, -0.1])
    np.testing.assert_allclose(first.beta, [0.99 + 0.01 * 4, 0.99 + 0.01 * 1])
    second = first.updated(release(support, torch.tensor([1.0, 1.0])), decays)
    np.testing.assert_allclose(second.alpha, [0.9 * 0.2 + 0.1, -0.09 + 0.1])
    np.testing.assert_allclose(
        second.beta, [0.99 * 1.03 + 0.01 * (1 - 0.2) ** 2, 0.99 * 1.0 + 0.01 * (1 + 0.1) ** 2]
    )


def some_statistics() -> Statistics:
    return Statistics(
        Support([0, 2, 5], 6), torch.tensor([1.0, 2.0, 3.0]).double(), torch.tensor([4.0, 9, 16]).double()
    )


def test_the_geometry_is_centre_alpha_and_scale_root_beta_plus_mu():
    geometry = some_statistics().geometry(Decays(stabilizer=0.5))
    assert geometry.centre.tolist() == [1.0, 2.0, 3.0]
    assert geometry.scale.tolist() == [2.5, 3.5, 4.5]
    assert geometry.noise_scale(0.1, 3).tolist() == pytest.approx([0.25, 0.35, 0.45])


@pytest.mark.parametrize(
    ("indices", "alpha", "beta"),
    [
        ([2], [2], [9]),
        ([1, 2, 3], [0, 2, 0], [1, 9, 1]),
        (range(6), [1, 0, 2, 0, 0, 3], [4, 1, 9, 1, 1, 16]),
        ([], [], []),
    ],
)
def test_coordinates_that_stay_keep_their_statistics_and_others_start(indices, alpha, beta):
    moved = some_statistics().moved_to(Support(list(indices), 6))
    assert moved.alpha.tolist() == alpha
    assert moved.beta.tolist() == beta


def test_the_first_geometry_barely_scales():
    geometry = Statistics.fresh(Support([1, 2, 3, 7], 9)).geometry(Decays())
    assert geometry.centre.tolist() == [0.0] * 4
    assert geometry.scale.tolist() == [1 + 1e-6] * 4


@pytest.mark.parametrize(
    "bad",
    [{"centre": 1.0}, {"variance": -0.1}, {"stabilizer": 0.0}, {"stabilizer": float("inf")}, {"centre": 2}],
)
def test_constants_that_would_divide_by_zero_or_never_forget_are_refused(bad):
    with pytest.raises(SparseDPError, match="got"):
        Decays(**bad)
