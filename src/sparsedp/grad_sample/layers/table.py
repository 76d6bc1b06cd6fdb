"""The table of layers the fast engine knows."""

from __future__ import annotations

from torch import nn

from sparsedp.grad_sample.layers.conv import CONV
from sparsedp.grad_sample.layers.embedding import EMBEDDING, EMBEDDING_BAG
from sparsedp.grad_sample.layers.linear import LINEAR
from sparsedp.grad_sample.layers.norm import CHANNEL_NORM, TRAILING_NORM
from sparsedp.grad_sample.layers.source import Family

FAMILIES: dict[type[nn.Module], Family] = {
    nn.Linear: LINEAR,
    nn.Conv1d: CONV,
    nn.Conv2d: CONV,
    nn.Conv3d: CONV,
    nn.Embedding: EMBEDDING,
    nn.EmbeddingBag: EMBEDDING_BAG,
    nn.LayerNorm: TRAILING_NORM,
    nn.RMSNorm: TRAILING_NORM,
    nn.GroupNorm: CHANNEL_NORM,
    nn.InstanceNorm1d: CHANNEL_NORM,
    nn.InstanceNorm2d: CHANNEL_NORM,
    nn.InstanceNorm3d: CHANNEL_NORM,
}

_FORWARDS = {kind: kind.forward for kind in FAMILIES}


def family_of(module: nn.Module) -> Family | None:
    """The family of a module, if it is exactly one of the known layers with its ordinary parameters.

    A subclass or an instance's own `forward` may compute anything, and a re-parametrised layer has other parameters:
    all are unknown.
    """
    if "forward" in vars(module) or type(module).forward is not _FORWARDS.get(type(module)):
        return None
    family = FAMILIES.get(type(module))
    own = {name for name, _ in module.named_parameters(recurse=False)}
    return family if family is not None and own <= family.parameters else None
