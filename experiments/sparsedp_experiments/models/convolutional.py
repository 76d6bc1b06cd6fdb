"""The papers' convolutional networks, and a small residual one with GroupNorm.

None mixes samples (no BatchNorm) and none changes an activation in place: both break per-sample gradients.
"""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

from sparsedp.errors import ModelError
from sparsedp_experiments.models.heads import InputShape, check_shape, classifier_head, flat_size
from sparsedp_experiments.models.pooling import MaxPool2d

Activation = type[nn.Module]


def mnist_cnn(input_shape: InputShape, classes: int, activation: Activation = nn.Tanh) -> nn.Sequential:
    """The CNN for MNIST and Fashion-MNIST of Tramèr and Boneh and of AdaDPIGU (its Table 1): 26,010 parameters.

    **Deviations.** AdaDPIGU's Table 1 pads the second convolution by 2; the count both papers' code gives needs
    no padding there. Its code uses ReLU in the private model and Tanh in the other; pass `activation=nn.ReLU`.
    """
    check_shape(input_shape, axes=3)
    features = nn.Sequential(
        nn.Conv2d(input_shape[0], 16, kernel_size=8, stride=2, padding=2),
        activation(),
        MaxPool2d(kernel_size=2, stride=1),
        nn.Conv2d(16, 32, kernel_size=4, stride=2),
        activation(),
        MaxPool2d(kernel_size=2, stride=1),
        nn.Flatten(),
    )
    size = flat_size(features, input_shape)
    return nn.Sequential(*features, nn.Linear(size, 32), activation(), classifier_head(32, classes))


def dp_cnn(input_shape: InputShape, classes: int, activation: Activation = nn.Tanh) -> nn.Sequential:
    """DP-CNN (Papernot et al. 2021; RS Sec. 6): six 3x3 convolutions, 550,570 parameters on CIFAR-10."""
    check_shape(input_shape, axes=3)
    layers: list[nn.Module] = []
    channels = input_shape[0]
    for width in (32, 64, 128):
        layers += [_conv3x3(channels, width), activation(), _conv3x3(width, width), activation(), _halve()]
        channels = width
    return _with_hidden_layer(layers, input_shape, hidden=128, classes=classes, activation=activation)


def adadpigu_cnn(input_shape: InputShape, classes: int, activation: Activation = nn.ReLU) -> nn.Sequential:
    """AdaDPIGU's CNN for CIFAR-10 (its Table 2): 74,362 parameters.

    The paper names no activation; its published private models use ReLU.
    """
    check_shape(input_shape, axes=3)
    layers: list[nn.Module] = []
    channels = input_shape[0]
    for width in (16, 16, 32):
        layers += [_conv3x3(channels, width), activation(), _halve()]
        channels = width
    return _with_hidden_layer(layers, input_shape, hidden=128, classes=classes, activation=activation)


def resnet_gn(
    input_shape: InputShape, classes: int, width: int = 16, groups: int = 8, activation: Activation = nn.ReLU
) -> nn.Sequential:
    """A three-block pre-activation ResNet with GroupNorm: 78,186 parameters on CIFAR-10.

    GroupNorm looks at one sample at a time, which BatchNorm does not.
    """
    check_shape(input_shape, axes=3)
    if width % groups:
        raise ModelError(f"resnet_gn: width {width} is not a multiple of groups {groups}")
    return nn.Sequential(
        _conv3x3(input_shape[0], width),
        ResidualBlock(width, width, 1, groups, activation),
        ResidualBlock(width, 2 * width, 2, groups, activation),
        ResidualBlock(2 * width, 4 * width, 2, groups, activation),
        nn.GroupNorm(groups, 4 * width),
        activation(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        classifier_head(4 * width, classes),
    )


@final
class ResidualBlock(nn.Module):
    """GroupNorm, activation, 3x3 convolution, twice, plus the input (He et al. 2016, pre-activation)."""

    def __init__(self, channels: int, width: int, stride: int, groups: int, activation: Activation) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.GroupNorm(groups, channels),
            activation(),
            _conv3x3(channels, width, stride),
            nn.GroupNorm(groups, width),
            activation(),
            _conv3x3(width, width),
        )
        same = stride == 1 and channels == width
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels, width, kernel_size=1, stride=stride)

    def forward(self, inputs: Tensor) -> Tensor:
        """Residual plus shortcut."""
        out: Tensor = self.residual(inputs) + self.shortcut(inputs)
        return out


def _conv3x3(channels: int, width: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, width, kernel_size=3, stride=stride, padding=1)


def _halve() -> nn.Module:
    return MaxPool2d(kernel_size=2, stride=2)


def _with_hidden_layer(
    layers: list[nn.Module], input_shape: InputShape, hidden: int, classes: int, activation: Activation
) -> nn.Sequential:
    features = nn.Sequential(*layers, nn.Flatten())
    size = flat_size(features, input_shape)
    return nn.Sequential(*features, nn.Linear(size, hidden), activation(), classifier_head(hidden, classes))
