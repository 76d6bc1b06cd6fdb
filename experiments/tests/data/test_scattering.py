"""Scattering features against Kymatio's numbers, against their definition, and on disk."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from sparsedp_experiments.data import DataBundle, Dense, Split, scattering_bundle
from sparsedp_experiments.data.features import MAPS, Scattering

GOLDENS = Path(__file__).parent / "goldens" / "scattering.npz"


@pytest.mark.parametrize(("name", "size"), [("grey", 28), ("colour", 32)])
def test_features_equal_kymatio(name, size):
    goldens = np.load(GOLDENS)
    features = Scattering(size)(torch.from_numpy(goldens[f"{name}_images"]))
    expected = torch.from_numpy(goldens[f"{name}_features"])
    assert expected.shape[1] == MAPS * goldens[f"{name}_images"].shape[1]
    torch.testing.assert_close(features, expected, rtol=1e-5, atol=1e-6)


def test_features_of_an_image_do_not_depend_on_its_neighbours():
    images = torch.rand(70, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    transform = Scattering(12)
    together = transform(images)
    torch.testing.assert_close(transform(images[69:]), together[69:], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(transform(images.flip(0)).flip(0), together, rtol=1e-5, atol=1e-7)


def image_bundle(fingerprint=None, size=8, channels=1):
    generator = torch.Generator().manual_seed(3)

    def split(rows):
        values = torch.randint(0, 256, (rows, channels, size, size), dtype=torch.uint8, generator=generator)
        return Split(Dense(values), torch.arange(rows) % 2, torch.arange(rows) + 1000 * rows)

    return DataBundle("toy", "made", split(600), split(7), ("a", "b"), "patient", ("a note",), fingerprint)


def test_a_bundle_of_images_becomes_a_bundle_of_normalised_features():
    bundle = image_bundle(channels=3)
    features = scattering_bundle(bundle, groups=27)
    assert features.input_shape == (243, 2, 2)
    assert features.unit == "patient"
    assert features.notes == ("a note",)
    assert torch.equal(features.train.targets, bundle.train.targets)
    assert torch.equal(features.train.units, bundle.train.units)
    expected = nn.GroupNorm(27, 243, affine=False)(Scattering(8)(bundle.test.inputs))
    torch.testing.assert_close(features.test.inputs, expected, rtol=2**-10, atol=1e-4)
    assert features.test.inputs.dtype == torch.float32
    raw = scattering_bundle(bundle, groups=0)  # what a config says for None
    torch.testing.assert_close(raw.test.inputs, Scattering(8)(bundle.test.inputs), rtol=2**-10, atol=1e-6)


def test_half_floats_move_a_feature_by_at_most_one_part_in_two_thousand():
    bundle = image_bundle()
    exact = nn.GroupNorm(27, 81, affine=False)(Scattering(8)(bundle.train.inputs))
    kept = scattering_bundle(bundle).train.inputs
    assert ((kept - exact).abs() <= exact.abs() / 2000 + 1e-5).all()


def test_features_are_computed_once_and_then_mapped_from_disk(monkeypatch, private_cache):
    bundle = image_bundle(fingerprint="toy files")
    first = scattering_bundle(bundle)
    assert len(list((private_cache / "decoded").glob("*.npy"))) == 2
    monkeypatch.setattr("sparsedp_experiments.data.features.shown", lambda *_: pytest.fail("computed again"))
    again = scattering_bundle(bundle)
    assert torch.equal(again.train.inputs, first.train.inputs)
    assert again.fingerprint == first.fingerprint != bundle.fingerprint


def test_a_picture_and_its_mirror_image_are_two_rows_of_one_unit(private_cache):
    bundle = image_bundle(fingerprint="toy files")
    bundle = replace(bundle, train=replace(bundle.train, units=None), unit="row")
    plain, both = scattering_bundle(bundle), scattering_bundle(bundle, mirror=True)
    n = len(bundle.train)
    turned = replace(bundle.train, features=Dense(bundle.train.inputs.flip(-1)))
    expected = scattering_bundle(replace(bundle, train=turned, fingerprint=None)).train.inputs
    assert torch.equal(both.train.inputs, torch.cat([plain.train.inputs, expected]))
    assert not torch.equal(expected, plain.train.inputs)
    assert torch.equal(both.train.targets, bundle.train.targets.repeat(2))
    assert torch.equal(both.train.units, torch.arange(n).repeat(2))
    assert both.unit == "picture"
    assert both.train.unit_count == n
    assert len(both.test) == len(plain.test)
    assert "mirrored" in both.variant
