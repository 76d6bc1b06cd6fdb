"""Classifiers on scattering features (Tramèr and Boneh, ICLR 2021).

`groups` puts their per-sample GroupNorm (without parameters, so nothing is learned from the data) in front. The
features of `sparsedp_experiments.data.scattering_bundle` are normalised already: they need none.
"""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

from sparsedp.errors import ModelError
from sparsedp_experiments.models.heads import InputShape, check_shape, classifier_head, flat_size
from sparsedp_experiments.models.pooling import MaxPool2d

_GREY_CHANNELS = 81


def scatter_linear(input_shape: InputShape, classes: int, groups: int | None = None) -> nn.Sequential:
    """Scattering features and one linear layer: 39,700 parameters for 81x7x7, 155,530 for 243x8x8.

    The features may come flat, (3969,), or as maps, (81, 7, 7); only maps can be normalised here.
    """
    features = nn.Sequential(*_normalisation(input_shape, groups), nn.Flatten())
    return nn.Sequential(*features, classifier_head(flat_size(features, input_shape), classes))


def scatter_cnn(
    input_shape: InputShape, classes: int, groups: int | None = None, bypass: float | None = None
) -> nn.Sequential:
    """Scattering features and a small CNN with Tanh: 33,066 parameters for 81x7x7, 187,210 for 243x8x8.

    Two networks, as in the paper's code: one for grey images (81 channels), a wider one for colour (243).

    Args:
        input_shape: channels, height and width of the features.
        classes: how many there are.
        groups: of the per-sample GroupNorm in front; none without it.
        bypass: ours, not the papers': a linear classifier on the features, times this number, is added to the
            network's logits (39,700 and 155,530 parameters more). The smaller it is, the less of the clip norm
            the linear part takes from the network.
    """
    check_shape(input_shape, axes=3)
    network = nn.Sequential(*_network(input_shape, classes))
    if bypass is not None:
        network = nn.Sequential(Bypassed(network, scatter_linear(input_shape, classes), bypass))
    return nn.Sequential(*_normalisation(input_shape, groups), *network)


@final
class Bypassed(nn.Module):
    """The logits of a network plus those of a linear classifier on the scaled input."""

    def __init__(self, network: nn.Module, linear: nn.Module, scale: float) -> None:
        super().__init__()
        if not 0 < scale <= 1:
            raise ModelError(f"bypass: got {scale}, expected a number above 0 and at most 1, such as 0.3")
        self.network, self.linear, self.scale = network, linear, scale

    def forward(self, features: Tensor) -> Tensor:
        """One row of logits for each record."""
        logits: Tensor = self.network(features) + self.linear(self.scale * features)
        return logits


def _network(input_shape: InputShape, classes: int) -> list[nn.Module]:
    channels = input_shape[0]
    body = _grey_body(channels) if channels <= _GREY_CHANNELS else _colour_body(channels)
    features = [*body, nn.Flatten()]
    size = flat_size(nn.Sequential(*features), input_shape)
    if channels > _GREY_CHANNELS:
        return [*features, classifier_head(size, classes)]
    return [*features, nn.Linear(size, 32), nn.Tanh(), classifier_head(32, classes)]


def _normalisation(input_shape: InputShape, groups: int | None) -> list[nn.Module]:
    if groups is None:
        return []
    check_shape(input_shape, axes=3)
    return [nn.GroupNorm(groups, input_shape[0], affine=False)]


def _grey_body(channels: int) -> list[nn.Module]:
    return [
        nn.Conv2d(channels, 16, kernel_size=3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(16, 32, kernel_size=3, stride=1, padding=1),
        nn.Tanh(),
    ]


def _colour_body(channels: int) -> list[nn.Module]:
    return [
        nn.Conv2d(channels, 64, kernel_size=3, padding=1),
        nn.Tanh(),
        MaxPool2d(kernel_size=2, stride=2),
        nn.Conv2d(64, 64, kernel_size=3, padding=1),
        nn.Tanh(),
    ]
