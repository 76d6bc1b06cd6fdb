"""Networks built from an input shape and a number of classes: the papers' and a few more.

None mixes examples (no BatchNorm) and none changes an activation in place: both break per-example gradients.
"""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor, nn

from sparsedp.errors import ModelError

InputShape = tuple[int, ...]


@final
class PairWithZero(nn.Module):
    """Turns one logit z into the two-class logits (0, z), so that softmax gives sigmoid(z)."""

    def forward(self, logit: Tensor) -> Tensor:
        """Logits of shape [..., 2] from one of shape [..., 1]."""
        return torch.cat([torch.zeros_like(logit), logit], dim=-1)


def classifier_head(features: int, classes: int) -> nn.Module:
    """A linear layer to `classes` logits.

    Two classes get one logit, not two that say the same thing and are ranked and noised apart. It is paired with
    a constant zero, so cross entropy and softmax work as for any other head.
    """
    if classes < 2:
        raise ModelError(f"classes: got {classes}, expected at least 2")
    if classes == 2:
        return nn.Sequential(nn.Linear(features, 1), PairWithZero())
    return nn.Linear(features, classes)


def flat_size(features: nn.Module, input_shape: InputShape) -> int:
    """How many numbers one record has after `features`; refuses inputs too small for it."""
    try:
        with torch.no_grad():
            out: Tensor = features(torch.zeros(1, *input_shape))
    except RuntimeError as error:
        raise ModelError(f"input_shape {input_shape} does not fit this network: {error}") from error
    return out.numel()


def check_shape(input_shape: InputShape, axes: int) -> None:
    """Refuse shapes that are not of `axes` axes."""
    if len(input_shape) != axes:
        expected = "(channels, height, width)" if axes == 3 else "(length,)"
        raise ModelError(f"input_shape: got {input_shape}, expected {axes} axes {expected}")


def parameter_count(model: nn.Module) -> int:
    """The number of trainable scalars, tied ones counted once."""
    return sum(math.prod(p.shape) for p in model.parameters() if p.requires_grad)


@final
class MaxPool2d(nn.MaxPool2d):
    """`nn.MaxPool2d` with the channels last in memory: the same numbers, ties included, and faster.

    PyTorch's kernel for the usual layout compares one number at a time; for a small CNN it is the dearest layer.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        usual = inputs.dim() != 4 or inputs.device.type != "cpu"
        laid_out = inputs if usual else inputs.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        pooled: Tensor = super().forward(laid_out)
        return pooled.contiguous()


def mnist_cnn(input_shape: InputShape, classes: int) -> nn.Sequential:
    """The CNN for MNIST and Fashion-MNIST of Tramèr and Boneh and of AdaDPIGU (its Table 1): 26,010 parameters.

    **Deviations.** AdaDPIGU's Table 1 pads the second convolution by 2; the count both papers' code gives needs
    no padding there. Its code uses ReLU in the private model and Tanh in the other.
    """
    check_shape(input_shape, axes=3)
    features = nn.Sequential(
        nn.Conv2d(input_shape[0], 16, kernel_size=8, stride=2, padding=2),
        nn.Tanh(),
        MaxPool2d(kernel_size=2, stride=1),
        nn.Conv2d(16, 32, kernel_size=4, stride=2),
        nn.Tanh(),
        MaxPool2d(kernel_size=2, stride=1),
        nn.Flatten(),
    )
    size = flat_size(features, input_shape)
    return nn.Sequential(*features, nn.Linear(size, 32), nn.Tanh(), classifier_head(32, classes))


def dp_cnn(input_shape: InputShape, classes: int) -> nn.Sequential:
    """DP-CNN (Papernot et al. 2021; RS Sec. 6): six 3x3 convolutions, 550,570 parameters on CIFAR-10."""
    check_shape(input_shape, axes=3)
    layers: list[nn.Module] = []
    channels = input_shape[0]
    for width in (32, 64, 128):
        layers += [_conv3x3(channels, width), nn.Tanh(), _conv3x3(width, width), nn.Tanh(), _halve()]
        channels = width
    return _with_hidden_layer(layers, input_shape, classes, nn.Tanh())


def adadpigu_cnn(input_shape: InputShape, classes: int) -> nn.Sequential:
    """AdaDPIGU's CNN for CIFAR-10 (its Table 2): 74,362 parameters.

    The paper names no activation; its published private models use ReLU.
    """
    check_shape(input_shape, axes=3)
    layers: list[nn.Module] = []
    channels = input_shape[0]
    for width in (16, 16, 32):
        layers += [_conv3x3(channels, width), nn.ReLU(), _halve()]
        channels = width
    return _with_hidden_layer(layers, input_shape, classes, nn.ReLU())


def _conv3x3(channels: int, width: int) -> nn.Conv2d:
    return nn.Conv2d(channels, width, kernel_size=3, padding=1)


def _halve() -> nn.Module:
    return MaxPool2d(kernel_size=2, stride=2)


def _with_hidden_layer(
    layers: list[nn.Module], input_shape: InputShape, classes: int, activation: nn.Module
) -> nn.Sequential:
    features = nn.Sequential(*layers, nn.Flatten())
    hidden = nn.Linear(flat_size(features, input_shape), 128)
    return nn.Sequential(*features, hidden, activation, classifier_head(128, classes))


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
    channels = input_shape[0]
    if channels <= _GREY_CHANNELS:
        body = nn.Sequential(
            nn.Conv2d(channels, 16, kernel_size=3, stride=2, padding=1),
            nn.Tanh(),
            nn.Conv2d(16, 32, kernel_size=3, stride=1, padding=1),
            nn.Tanh(),
            nn.Flatten(),
        )
        hidden = nn.Linear(flat_size(body, input_shape), 32)
        network = nn.Sequential(*body, hidden, nn.Tanh(), classifier_head(32, classes))
    else:
        body = nn.Sequential(
            nn.Conv2d(channels, 64, kernel_size=3, padding=1),
            nn.Tanh(),
            MaxPool2d(kernel_size=2, stride=2),
            nn.Conv2d(64, 64, kernel_size=3, padding=1),
            nn.Tanh(),
            nn.Flatten(),
        )
        network = nn.Sequential(*body, classifier_head(flat_size(body, input_shape), classes))
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
        logits: Tensor = self.network(features) + self.linear(self.scale * features)
        return logits


def _normalisation(input_shape: InputShape, groups: int | None) -> list[nn.Module]:
    if groups is None:
        return []
    check_shape(input_shape, axes=3)
    return [nn.GroupNorm(groups, input_shape[0], affine=False)]


def logistic(input_shape: InputShape, classes: int) -> nn.Sequential:
    """Logistic regression, started at zero: `features + 1` parameters for two classes.

    It is convex, so a random start would add nothing but a starting error.
    """
    flatten = nn.Flatten()
    head = classifier_head(flat_size(flatten, input_shape), classes)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    return nn.Sequential(flatten, head)


def mlp(input_shape: InputShape, classes: int, hidden: tuple[int, ...] = (64,)) -> nn.Sequential:
    """A multilayer perceptron with Tanh."""
    layers: list[nn.Module] = [nn.Flatten()]
    size = flat_size(layers[0], input_shape)
    for width in hidden:
        layers += [nn.Linear(size, width), nn.Tanh()]
        size = width
    return nn.Sequential(*layers, classifier_head(size, classes))


def bag_of_words(input_shape: InputShape, classes: int) -> nn.Sequential:
    """A linear classifier on a hashed bag of words: 16,385 parameters for 2^14 buckets and two classes."""
    check_shape(input_shape, axes=1)
    return logistic(input_shape, classes)
