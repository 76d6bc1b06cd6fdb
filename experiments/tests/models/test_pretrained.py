"""Pretrained networks, and folding their batch norms into fixed maps."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections import OrderedDict
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from sparsedp import fit
from sparsedp.batch_norm import ChannelAffine, freeze_batch_norm
from sparsedp.errors import DataError, ModelError
from sparsedp_experiments.data.bundle import DataBundle, Dense, Split
from sparsedp_experiments.data.features import lite0_bundle
from sparsedp_experiments.models.folding import fold_batch_norm
from sparsedp_experiments.models.networks import parameter_count
from sparsedp_experiments.models.pretrained import (
    PRETRAINED,
    BlockMoments,
    Pictures,
    lite0_top,
    load_public_weights,
    pretrained,
    train_from,
)

# Pretrained networks: the same function as the original, in plain layers; damaged or missing weights are told.


LITE0 = PRETRAINED["efficientnet-lite0"]


class Branching(nn.Module):
    """Batch norms behind a convolution, behind an addition, and behind a convolution that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.first = nn.Conv2d(3, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5)
        self.shared, self.second = nn.Conv2d(5, 5, 1), nn.BatchNorm2d(5, affine=False)
        self.third = nn.BatchNorm2d(5)
        self.head, self.last = nn.Linear(5, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(self.conv(x)).relu()
        x = self.third(self.second(self.shared(x)) + self.shared(x).tanh())
        return self.last(self.head(x.mean((2, 3))))


def with_statistics(model: nn.Module) -> nn.Module:
    """Running statistics, scales and shifts that are far from their start."""
    generator = torch.Generator().manual_seed(5)
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            module.running_mean.normal_(generator=generator)
            module.running_var.uniform_(0.2, 3.0, generator=generator)
            if module.affine:
                nn.init.normal_(module.weight, generator=generator)
                nn.init.normal_(module.bias, generator=generator)
    return model.eval()


@pytest.mark.parametrize("convert", [freeze_batch_norm, lambda m: fold_batch_norm(m, torch.rand(3, 3, 6, 6))])
def test_a_network_without_batch_norm_computes_what_it_did_with_it(convert):
    torch.manual_seed(0)
    model = with_statistics(Branching())
    x = torch.rand(7, 3, 6, 6)
    converted = convert(model).train()
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in converted.modules())
    torch.testing.assert_close(converted(x), model(x), rtol=1e-5, atol=1e-5)


def test_folding_leaves_an_affine_map_where_no_layer_feeds_a_batch_norm_alone():
    folded = fold_batch_norm(with_statistics(Branching()), torch.rand(2, 3, 6, 6))
    assert isinstance(folded.first, nn.Identity)
    assert isinstance(folded.last, nn.Identity)
    assert isinstance(folded.third, ChannelAffine)
    assert isinstance(folded.second, ChannelAffine)


def test_a_batch_norm_without_running_statistics_cannot_be_fixed():
    with pytest.raises(ModelError, match="no running statistics"):
        freeze_batch_norm(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False)))


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
    with pytest.raises(ModelError, match=r"got torch\.int64, expected bytes"):
        pictures(seen)


def test_a_pretrained_network_takes_bytes():
    seen = torch.randint(0, 256, (2, 3, 32, 32), generator=torch.Generator().manual_seed(1))
    network = pretrained(classes=3, size=32).eval()
    torch.testing.assert_close(network(seen.to(torch.uint8)), network(seen / 255))


def test_only_what_lies_above_the_chosen_part_is_trained():
    network = pretrained(classes=10, size=32)
    assert [n for n, p in network.named_parameters() if p.requires_grad] == ["head.weight", "head.bias"]
    train_from(network, "features")
    assert {n.split(".")[0] for n, p in network.named_parameters() if p.requires_grad} == {"features", "head"}
    with pytest.raises(ModelError, match="block15"):
        train_from(network, "block99")


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


def test_a_data_set_can_be_kept_as_the_moments_of_every_block():
    pictures = torch.rand(3, 3, 20, 20, generator=torch.Generator().manual_seed(4))
    split = Split(Dense(pictures), torch.zeros(3, dtype=torch.int64))
    kept = lite0_bundle(DataBundle("pictures", "random", split, split, ("a", "b")), resize=40, cut="blocks")
    assert kept.input_shape == (3616,)
    assert "moments of every block" in kept.variant
    with torch.no_grad():
        torch.testing.assert_close(
            kept.train.features.batch(torch.arange(3)), BlockMoments(pretrained(classes=2, size=40))(pictures)
        )


def test_a_run_names_the_public_weights_and_their_checksum(tmp_path):
    pictures = torch.rand(16, 3, 32, 32, generator=torch.Generator().manual_seed(6)), torch.arange(16) % 2
    fit(
        pretrained(classes=2, size=32), pictures, nn.CrossEntropyLoss(reduction="none"), method="dp-sgd", epsilon=8.0,
        delta=1e-3, epochs=1, batch_size=8, lr=1.0, seed=0, progress=False, accountant="rdp", run_dir=tmp_path /
        "run",
    )  # fmt: skip
    (named,) = json.loads((tmp_path / "run" / "record.json").read_text())["schema"]["public_weights"]
    assert named == str(PRETRAINED["efficientnet-lite0"])
    assert PRETRAINED["efficientnet-lite0"].sha256 in named


def test_weights_that_are_not_the_published_ones_are_refused():
    with pytest.raises(DataError, match=r"SHA-256 57934424.*expected 0000"):
        load_public_weights(replace(LITE0, sha256="0" * 64))


def test_damaged_weights_are_told_from_a_bad_network(tmp_path, monkeypatch):
    package = tmp_path / "damaged_weights"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "w.pth").write_bytes(b"not a weights file")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    damaged = replace(LITE0, package="damaged_weights", file="w.pth")
    with pytest.raises(DataError, match="damaged or another version"):
        load_public_weights(damaged)
    expected = hashlib.sha256(b"not a weights file").hexdigest()
    with pytest.raises(DataError, match="cannot be loaded"):
        load_public_weights(replace(damaged, sha256=expected))
    with pytest.raises(DataError, match="cannot be read"):
        load_public_weights(replace(damaged, file="gone.pth"))


# Batch norm of other libraries, under several names, and in models that give more than one tensor.


PICTURES = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1))


CONVERSIONS = [freeze_batch_norm, lambda model: fold_batch_norm(model, PICTURES)]


class NormAct(nn.BatchNorm2d):
    """Like timm's `BatchNormAct2d`: normalises, drops, activates."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Dropout(0.5), nn.SiLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.drop(super().forward(x)))


class ActNorm(NormAct):
    """The same parts in another order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.BatchNorm2d.forward(self, self.act(x.clone()))


class Doubled(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Renamed(nn.BatchNorm2d):
    """Another name, and torch's forward."""


def far_from_the_start(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(5)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(generator=generator)
            module.running_var.uniform_(0.2, 3.0, generator=generator)
    return model.eval()


def network(norm: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return far_from_the_start(nn.Sequential(nn.Conv2d(3, 5, 3), norm, nn.Flatten(), nn.Linear(80, 2)))


@pytest.mark.parametrize("convert", CONVERSIONS, ids=["freeze", "fold"])
@pytest.mark.parametrize("norm", [NormAct, Renamed])
def test_a_batch_norm_with_dropout_and_activation_keeps_both(convert, norm):
    model = network(norm(5))
    converted = convert(model)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in converted.modules())
    kept = [type(module) for module in converted.modules() if isinstance(module, (nn.Dropout, nn.SiLU))]
    assert kept == ([nn.Dropout, nn.SiLU] if norm is NormAct else [])
    torch.testing.assert_close(converted(PICTURES), model(PICTURES), rtol=1e-5, atol=1e-5)


def test_folding_leaves_dropout_and_activation_alone_behind_the_layer():
    folded = fold_batch_norm(network(NormAct(5)), PICTURES)
    assert [type(module) for module in folded[1]] == [nn.Dropout, nn.SiLU]


@pytest.mark.parametrize("convert", CONVERSIONS, ids=["freeze", "fold"])
@pytest.mark.parametrize("norm", [ActNorm, Doubled])
def test_a_batch_norm_that_does_anything_else_is_refused_by_name(convert, norm):
    with pytest.raises(ModelError, match=rf"batch norm '1': got a {norm.__name__} with a forward of its own"):
        convert(network(norm(5)))


def test_a_batch_norm_whose_forward_was_replaced_is_refused_by_name():
    norm = nn.BatchNorm2d(5)
    norm.forward = lambda x: x
    with pytest.raises(ModelError, match="'1': got a BatchNorm2d with a forward of its own"):
        freeze_batch_norm(network(norm))


class TwoNames(nn.Module):
    def __init__(self, calls: int) -> None:
        super().__init__()
        self.conv, self.one, self.calls = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), calls
        self.other = self.one

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.other(self.conv(x))
        return x if self.calls == 1 else self.one(x)


@pytest.mark.parametrize("convert", CONVERSIONS, ids=["freeze", "fold"])
@pytest.mark.parametrize("calls", [1, 2])
def test_a_batch_norm_with_two_names_is_replaced_under_both(convert, calls):
    model = far_from_the_start(TwoNames(calls))
    converted = convert(model)
    assert converted.one is converted.other
    assert isinstance(converted.one, (ChannelAffine, nn.Identity))
    torch.testing.assert_close(converted(PICTURES), model(PICTURES), rtol=1e-5, atol=1e-5)


class PreActivation(nn.Module):
    """Two blocks of a pre-activation network, whose skips are added in place to what a convolution gave."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one = nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)
        self.second, self.two = nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)
        self.last = nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, conv in ((self.first, self.one), (self.second, self.two)):
            moved = conv(norm(x).relu_())
            moved += x
            x = moved
        return self.last(x)


def written_in_place() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(inplace=True), nn.BatchNorm2d(3))


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("make", [written_in_place, PreActivation])
def test_a_batch_norm_behind_what_was_written_in_place_becomes_an_affine_map(make, inference):
    torch.manual_seed(0)
    model = far_from_the_start(make())
    with torch.inference_mode(inference):
        folded = fold_batch_norm(model, PICTURES)
    norms = [name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
    assert all(isinstance(folded.get_submodule(name), ChannelAffine) for name in norms)
    torch.testing.assert_close(folded(PICTURES), model(PICTURES), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("features", [5, 16])
def test_a_linear_layer_whose_features_are_not_the_batch_norms_channels_is_left_alone(features):
    torch.manual_seed(0)
    model, example = nn.Sequential(nn.Linear(8, features), nn.BatchNorm1d(5)), torch.randn(4, 5, 8)
    model(example)
    folded = fold_batch_norm(model.eval(), example)
    assert isinstance(folded[1], ChannelAffine)
    torch.testing.assert_close(folded(example), model(example), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("convert", CONVERSIONS, ids=["freeze", "fold"])
@pytest.mark.parametrize("training", [False, True])
def test_modules_are_in_the_mode_they_were_in(convert, training):
    model = nn.Sequential(
        OrderedDict(body=network(NormAct(5)), dropout=nn.Dropout(0.1), last=nn.BatchNorm1d(2))
    )
    model.train(training)
    model.body.eval()
    converted = convert(model)
    assert converted.training == converted.dropout.training == converted.last.training == training
    assert not any(module.training for module in converted.body.modules())
    assert (model.training, model.body.training) == (training, False)


@dataclass
class Record:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


class Entries(OrderedDict):
    """Like Hugging Face's outputs: a dict that is also asked by attribute, and that torch does not know."""


OUTPUTS = {
    "dict": lambda x: {"logits": x},
    "tuple": lambda x: (x.argmax(1), (x,)),
    "data class": lambda x: Record(x),
    "mapping": lambda x: Entries(logits=x, hidden=(x, x + 1)),
    "object": lambda x: SimpleNamespace(logits=x, hidden=None),
}


class Giving(nn.Module):
    """Gives its scores in some form; takes pictures by name; its convolution's output may be used twice."""

    def __init__(self, form: str, twice: bool = False) -> None:
        super().__init__()
        self.body, self.form, self.twice = network(nn.BatchNorm2d(5)), form, twice

    def forward(self, pixels: torch.Tensor, scale: torch.Tensor) -> object:
        maps = self.body[0](pixels)
        used_again = maps.mean((1, 2, 3)).unsqueeze(1) if self.twice else 0
        return OUTPUTS[self.form](scale * self.body[1:](maps) + used_again)


@pytest.mark.parametrize("form", OUTPUTS)
def test_outputs_of_any_form_are_compared_and_a_dict_is_keyword_arguments(form):
    example = {"pixels": PICTURES, "scale": torch.tensor(2.0)}
    folded = fold_batch_norm(Giving(form), example)
    assert isinstance(folded.body[1], nn.Identity)
    with pytest.raises(ModelError, match="used elsewhere"):
        fold_batch_norm(Giving(form, twice=True), example)


class FromDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = network(nn.BatchNorm2d(5))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.body(batch["pixels"])


def test_a_model_that_takes_a_dict_is_given_it():
    assert isinstance(fold_batch_norm(FromDict(), {"pixels": PICTURES}).body[1], nn.Identity)


def test_an_output_without_numbers_is_refused():
    class Silent(FromDict):
        def forward(self, batch: dict[str, torch.Tensor]) -> str:
            self.body(batch["pixels"])
            return "done"

    with pytest.raises(ModelError, match="output of type str without real numbers"):
        fold_batch_norm(Silent(), {"pixels": PICTURES})
