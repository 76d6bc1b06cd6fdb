"""Batch norm of other libraries, under several names, and in models that give more than one tensor."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sparsedp.batch_norm import ChannelAffine
from sparsedp.errors import ModelError
from sparsedp_experiments.models import fold_batch_norm, freeze_batch_norm

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
