"""A data set of images as what a pretrained network makes of them, computed once and kept on disk."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from sparsedp.errors import DataError
from sparsedp_experiments.data.bundle import DataBundle, Split
from sparsedp_experiments.data.kept import Compute, with_features
from sparsedp_experiments.models.efficientnet import BlockMoments
from sparsedp_experiments.models.pretrained import PRETRAINED, parts_before, pretrained

_VERSION = 1
_NETWORK = "efficientnet-lite0"
_BLOCKS = "blocks"
"""A cut that is no part: features of all blocks together."""
_AT_ONCE = 16
"""Pictures: their activations then fit into the processor's cache, which at 224 pixels takes half the time of 64."""


def lite0_bundle(bundle: DataBundle, resize: int = 96, cut: str = "head") -> DataBundle:
    """What EfficientNet-Lite0, pretrained on ImageNet, hands to its part `cut`, for pictures resized to `resize`.

    With `cut="blocks"` it is the mean and the spread of every map of all its blocks; see `BlockMoments`.

    **Privacy.** The network is public and each record's features depend on that record alone: no privacy cost.
    """
    if len(bundle.input_shape) != 3:
        raise DataError(f"lite0: {bundle.name} has inputs of shape {bundle.input_shape}, expected images")
    weights = PRETRAINED[_NETWORK]
    network = pretrained(_NETWORK, classes=2, size=resize)
    below = (BlockMoments(network) if cut == _BLOCKS else parts_before(network, cut)).eval()
    below.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with torch.no_grad():
        shape = tuple(below(torch.zeros(1, *bundle.input_shape)).shape[1:])
    told = f"{resize} px, " + ("moments of every block" if cut == _BLOCKS else f"before {cut!r}")
    key = None if bundle.fingerprint is None else f"{bundle.fingerprint}|lite0 {_VERSION}|{told}"

    found = with_features(
        bundle,
        lambda split, _: _compute(below, split),
        shape,
        np.float32,
        key=key,
        title=f"Lite0 features of {bundle.name}",
    )
    return replace(
        found,
        variant=f"{bundle.variant}, {weights.name} features, {told}",
        notes=(*bundle.notes, str(weights)),
    )


def _compute(below: nn.Module, split: Split) -> Compute:
    def features(indices: Tensor) -> Tensor:
        with torch.no_grad():
            pictures = [split.features.batch(part) for part in torch.split(indices, _AT_ONCE)]
            return torch.cat([below(part).contiguous() for part in pictures])

    return features
