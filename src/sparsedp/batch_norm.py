"""Batch norm made harmless: its running statistics are public constants, so it is a fixed affine map.

A pretrained network's batch norm normalises by statistics of *public* data. Left in training mode it would mix
examples; replaced by GroupNorm the pretrained weights lose their meaning. As a fixed affine map it does neither.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparsedp.errors import ModelError

TOLERANCE = 1e-4
"""Largest difference of the outputs, relative to their size, that rounding explains."""
_OWN_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
"""Torch's own: in evaluation mode they are the affine map and nothing else."""


@final
class ChannelAffine(nn.Module):
    """`x * weight + bias`, one pair of numbers per channel (axis 1): what batch norm is with fixed statistics."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        """Scale and shift every channel."""
        shape = (1, -1, *[1] * (x.dim() - 2))
        return torch.addcmul(self.bias.view(shape), x, self.weight.view(shape))


def freeze_batch_norm(model: nn.Module) -> nn.Module:
    """Copy a model, with every batch norm replaced by the fixed affine map it is in evaluation mode.

    Scale and shift are parameters and can be trained; the statistics are in them. A batch norm that goes on with
    dropout and an activation (timm's `BatchNormAct2d`) keeps both behind the map. What was in training mode still is.

    Raises:
        ModelError: a batch norm has no running statistics to fix, or a forward of its own that is none of these.
    """
    model = copy.deepcopy(model)
    modes, around = {module: module.training for module in model.modules()}, model.training
    made: dict[nn.Module, nn.Module] = {}
    if isinstance(model, _BatchNorm):
        return _set_modes(_fixed(model, "the model itself"), modes, around)
    for name, parent in list(model.named_modules()):
        for local, child in list(parent._modules.items()):  # named_children leaves out a second name
            if isinstance(child, _BatchNorm):
                if child not in made:
                    made[child] = _fixed(child, f"{name}.{local}" if name else local)
                setattr(parent, local, made[child])
    return _set_modes(model, modes, around)


def _fixed(norm: _BatchNorm, name: str) -> nn.Module:
    """The map, and behind it what a batch norm of another library runs after it has normalised."""
    affine = _affine(norm, name)
    if getattr(norm.forward, "__func__", None) in _OWN_FORWARDS:
        return affine
    parts = {part: getattr(norm, part, None) for part in ("drop", "act")}
    rest = {part: module for part, module in parts.items() if isinstance(module, nn.Module)}
    whole = nn.Sequential(OrderedDict(affine=affine, **rest))
    if len(rest) != len(parts) or not _same(norm, whole):
        raise ModelError(
            f"batch norm {name!r}: got a {type(norm).__name__} with a forward of its own, expected one of torch's, "
            "or one that normalises and then runs its modules drop and act; put what it does besides into a module "
            "of its own, behind a batch norm of torch's"
        )
    return whole


def _set_modes(model: nn.Module, modes: Mapping[nn.Module, bool], around: bool) -> nn.Module:
    """Put every module in the mode it had; one that is new gets that of the module around it."""
    model.training = modes.get(model, around)
    for child in model.children():
        _set_modes(child, modes, model.training)
    return model


def _same(norm: _BatchNorm, whole: nn.Module) -> bool:
    """Whether a batch norm is the map and then its parts, seen on a few numbers in evaluation mode."""
    assert norm.running_mean is not None
    axes = 2 if isinstance(norm, nn.BatchNorm1d) else 5 if isinstance(norm, nn.BatchNorm3d) else 4
    shape = (4, len(norm.running_mean), *[2] * (axes - 2))
    numbers = torch.linspace(-3, 3, math.prod(shape)).reshape(shape).to(norm.running_mean)
    old, new = copy.deepcopy(norm).eval(), copy.deepcopy(whole).eval()
    try:
        with torch.no_grad():
            expected, found = old(numbers.clone()), new(numbers.clone())
    except Exception:  # whatever a forward of another library asks for
        return False
    return torch.allclose(expected, found, rtol=0, atol=TOLERANCE * float(expected.abs().max()))


def _affine(norm: _BatchNorm, name: str) -> ChannelAffine:
    if norm.running_mean is None or norm.running_var is None:
        raise ModelError(
            f"batch norm {name!r} keeps no running statistics (track_running_stats=False), so it cannot be fixed; "
            "use a layer that looks at one sample at a time, such as nn.GroupNorm"
        )
    weight = torch.ones_like(norm.running_mean) if norm.weight is None else norm.weight.detach()
    bias = torch.zeros_like(norm.running_mean) if norm.bias is None else norm.bias.detach()
    scale = weight / torch.sqrt(norm.running_var + norm.eps)
    affine = ChannelAffine(scale, bias - norm.running_mean * scale)
    trainable = norm.weight is not None and norm.weight.requires_grad
    return affine.requires_grad_(trainable)
