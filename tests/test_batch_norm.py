"""`freeze_batch_norm`: the same function in evaluation mode, of any batch norm with torch's forward, and no other."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from sparsedp.batch_norm import ChannelAffine, freeze_batch_norm
from sparsedp.errors import ModelError


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


def test_a_network_without_batch_norm_computes_what_it_did_with_it():
    torch.manual_seed(0)
    model = with_statistics(Branching())
    x = torch.rand(7, 3, 6, 6)
    converted = freeze_batch_norm(model).train()
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in converted.modules())
    torch.testing.assert_close(converted(x), model(x), rtol=1e-5, atol=1e-5)


def test_a_batch_norm_without_running_statistics_cannot_be_fixed():
    with pytest.raises(ModelError, match="no running statistics"):
        freeze_batch_norm(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False)))


PICTURES = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1))


class NormAct(nn.BatchNorm2d):
    """Like timm's `BatchNormAct2d`: normalises, drops, activates."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Dropout(0.5), nn.SiLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.drop(super().forward(x)))


class Doubled(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def network(norm: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return with_statistics(nn.Sequential(nn.Conv2d(3, 5, 3), norm, nn.Flatten(), nn.Linear(80, 2)))


def test_a_batch_norm_with_dropout_and_activation_keeps_both():
    model = network(NormAct(5))
    converted = freeze_batch_norm(model)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in converted.modules())
    kept = [type(module) for module in converted.modules() if isinstance(module, (nn.Dropout, nn.SiLU))]
    assert kept == [nn.Dropout, nn.SiLU]
    torch.testing.assert_close(converted(PICTURES), model(PICTURES), rtol=1e-5, atol=1e-5)


def replaced(channels: int) -> nn.Module:
    norm = nn.BatchNorm2d(channels)
    norm.forward = lambda x: x
    return norm


@pytest.mark.parametrize("norm", [Doubled, replaced])
def test_a_batch_norm_that_does_anything_else_is_refused_by_name(norm):
    with pytest.raises(ModelError, match=r"batch norm '1': got a \w+ with a forward of its own"):
        freeze_batch_norm(network(norm(5)))


class TwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.one = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.other = self.one

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(self.other(self.conv(x)))


def test_a_batch_norm_with_two_names_is_replaced_under_both():
    model = with_statistics(TwoNames())
    converted = freeze_batch_norm(model)
    assert converted.one is converted.other
    assert isinstance(converted.one, ChannelAffine)
    torch.testing.assert_close(converted(PICTURES), model(PICTURES), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("training", [False, True])
def test_modules_are_in_the_mode_they_were_in(training):
    model = nn.Sequential(
        OrderedDict(body=network(NormAct(5)), dropout=nn.Dropout(0.1), last=nn.BatchNorm1d(2))
    )
    model.train(training)
    model.body.eval()
    converted = freeze_batch_norm(model)
    assert converted.training == converted.dropout.training == converted.last.training == training
    assert not any(module.training for module in converted.body.modules())
    assert (model.training, model.body.training) == (training, False)
