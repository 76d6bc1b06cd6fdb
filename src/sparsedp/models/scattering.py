"""Classifiers on scattering features (Tramèr and Boneh, ICLR 2021).

`groups` puts their per-sample GroupNorm (without parameters, so nothing is learned from the data) in front. The
features of `sparsedp.datasets.scattering_bundle` are normalised already: they need none.
"""

from __future__ import annotations

from torch import nn

from sparsedp.models.heads import InputShape, check_shape, classifier_head, flat_size
from sparsedp.models.pooling import MaxPool2d

_GREY_CHANNELS = 81


def scatter_linear(input_shape: InputShape, classes: int, groups: int | None = None) -> nn.Sequential:
    """Scattering features and one linear layer: 39,700 parameters for 81x7x7, 155,530 for 243x8x8.

    The features may come flat, (3969,), or as maps, (81, 7, 7); only maps can be normalised here.
    """
    features = nn.Sequential(*_normalisation(input_shape, groups), nn.Flatten())
    return nn.Sequential(*features, classifier_head(flat_size(features, input_shape), classes))


def scatter_cnn(input_shape: InputShape, classes: int, groups: int | None = None) -> nn.Sequential:
    """Scattering features and a small CNN with Tanh: 33,066 parameters for 81x7x7, 187,210 for 243x8x8.

    Two networks, as in the paper's code: one for grey images (81 channels), a wider one for colour (243).
    """
    check_shape(input_shape, axes=3)
    channels = input_shape[0]
    body = _grey_body(channels) if channels <= _GREY_CHANNELS else _colour_body(channels)
    features = nn.Sequential(*_normalisation(input_shape, groups), *body, nn.Flatten())
    size = flat_size(features, input_shape)
    if channels > _GREY_CHANNELS:
        return nn.Sequential(*features, classifier_head(size, classes))
    return nn.Sequential(*features, nn.Linear(size, 32), nn.Tanh(), classifier_head(32, classes))


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
