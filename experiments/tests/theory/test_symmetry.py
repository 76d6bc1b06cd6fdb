"""Numbers for the symmetry of gradient deviations."""

import math

import pytest
import torch

from sparsedp.clipping import FlatClip
from sparsedp.errors import SparseDPError
from sparsedp.randomness import PublicRandomness
from sparsedp_experiments.theory.bounds import Descent
from sparsedp_experiments.theory.oracle import lopsidedness, lopsidedness_by_chance, symmetry_error


def test_a_cloud_and_its_mirror_image_are_symmetric_and_one_ray_is_not():
    points = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    assert lopsidedness(torch.cat([points, -points])) == pytest.approx(0, abs=1e-12)
    assert lopsidedness(torch.tensor([[1.0, 2.0], [2.0, 4.0], [0.5, 1.0]])) == pytest.approx(1)
    assert lopsidedness(torch.zeros(3, 2)) == 0


def test_lopsidedness_by_hand_and_whatever_the_scale():
    points = torch.tensor([[2.0, 0.0], [-1.0, 0.0], [-1.0, 0.0]])
    assert lopsidedness(points) == pytest.approx((8 - 1 - 1) / (8 + 1 + 1))
    assert lopsidedness(7 * points) == pytest.approx(0.6)


def test_chance_covers_a_symmetric_cloud_and_not_a_skewed_one():
    """A normal cloud is beyond the 99.5 % point of its flips once in 200 seeds; the seed is fixed."""
    public = PublicRandomness(5)
    symmetric = public.normal(4000, (0,)).reshape(2000, 2)
    skewed = torch.stack([torch.exp(symmetric[:, 0]) - math.exp(0.5), symmetric[:, 1]], dim=1)
    for points, inside in ((symmetric, True), (skewed, False)):
        chance = lopsidedness_by_chance(points, public)
        assert bool((chance[1:] >= chance[:-1]).all())
        assert (lopsidedness(points) <= float(chance[-2])) is inside


def test_symmetry_error_is_zero_for_symmetric_deviations_and_without_clipping():
    generator = torch.Generator().manual_seed(1)
    gradient, xi = (torch.randn(*shape, generator=generator).double() for shape in ((6,), (40, 6)))
    both = torch.cat([xi, -xi])
    assert symmetry_error(gradient, both, FlatClip(0.5)) == pytest.approx(0, abs=1e-12)
    centred = xi - xi.mean(dim=0)
    assert symmetry_error(gradient, centred, FlatClip(1e6)) == pytest.approx(0, abs=1e-9)


def test_symmetry_error_by_a_plain_loop():
    generator = torch.Generator().manual_seed(2)
    gradient, xi = (torch.randn(*shape, generator=generator).double() for shape in ((4,), (30, 4)))
    xi = xi.exp() - xi.exp().mean(dim=0)

    def clipped(vector):
        return vector * min(1.0, 0.7 / 1.001 / float(vector.norm()))

    true = sum(float(gradient @ clipped(gradient + row)) for row in xi) / 30
    mirrored = sum(float(gradient @ clipped(gradient - row)) for row in xi) / 30
    found = symmetry_error(gradient, xi, FlatClip(0.7))
    assert found == pytest.approx(true - (true + mirrored) / 2, rel=1e-4)
    assert abs(found) > 1e-3


def test_asymmetry_that_helps_lowers_the_enlarged_terms():
    common = {
        "loss_gap": 1.0, "smoothness": 2.0, "learning_rate": 0.1, "clip_norm": 1.0, "noise_multiplier": 1.0,
        "dimension": 100, "batch_size": 10.0, "steps": 50,
    }  # fmt: skip
    plain, helped = Descent(**common), Descent(**common, symmetry_error=0.05)
    assert helped.enlarged == pytest.approx(plain.enlarged - 0.05)


def test_shapes_that_cannot_be_are_refused():
    with pytest.raises(SparseDPError, match="one row for each sample"):
        lopsidedness(torch.zeros(3))
    with pytest.raises(SparseDPError, match="expected \\(3,\\)"):
        symmetry_error(torch.zeros(2), torch.zeros(4, 3), FlatClip(1.0))
    with pytest.raises(SparseDPError, match="at least 1"):
        lopsidedness_by_chance(torch.ones(2, 2), PublicRandomness(0), flips=0)
