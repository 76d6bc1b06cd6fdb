"""Batch norm made harmless: its running statistics are public constants, folded into the layer before.

A pretrained network's batch norm normalises by statistics of *public* data. Left in training mode it would mix
samples; replaced by GroupNorm the pretrained weights lose their meaning. As a fixed affine map it does neither.
"""

from __future__ import annotations

import copy
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparsedp.core.errors import ModelError

TOLERANCE = 1e-4
"""Largest difference of the outputs, relative to their size, that rounding explains."""

_FOLDABLE = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)


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
    """A copy of the model in which every batch norm is the fixed affine map it is in evaluation mode.

    Scale and shift are parameters and can be trained; the statistics are in them. Modes no longer matter.

    Raises:
        ModelError: a batch norm has no running statistics to fix.
    """
    return _replaced(copy.deepcopy(model), {})


def fold_batch_norm(model: nn.Module, example: Any) -> nn.Module:
    """A copy of the model with every batch norm folded into the convolution or linear layer that feeds it alone.

    Which layer feeds which is seen in one forward pass of `example` (inputs of the model, any batch). What has no
    such layer becomes a `ChannelAffine`. Outputs are compared before the copy is given back.

    Raises:
        ModelError: a batch norm has no running statistics, or the outputs differ: a layer is used twice.
    """
    folded = copy.deepcopy(model).eval()
    with torch.no_grad():
        before = folded(example)
        folded = _replaced(folded, _feeders(folded, example))
        after = folded(example)
    scale = float(before.abs().max())
    if not torch.allclose(before, after, rtol=0, atol=TOLERANCE * scale):
        raise ModelError(
            f"fold_batch_norm: outputs moved by {float((before - after).abs().max()):.2g} of {scale:.2g}, so a layer "
            "before a batch norm is used elsewhere, too; call freeze_batch_norm, which changes no other layer"
        )
    return folded


def _feeders(model: nn.Module, example: Any) -> dict[nn.Module, nn.Module]:
    """Each batch norm whose input is exactly the output of one layer that can take it in."""
    made: dict[int, tuple[Tensor, nn.Module]] = {}
    feeders: dict[nn.Module, nn.Module] = {}
    calls: dict[nn.Module, int] = {}

    def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        calls[module] = calls.get(module, 0) + 1
        if isinstance(module, _FOLDABLE):
            made[id(output)] = (output, module)  # holds the tensor, so that its id stays its own
        elif id(args[0]) in made:
            feeders[module] = made[id(args[0])][1]

    watched = [m for m in model.modules() if isinstance(m, (*_FOLDABLE, _BatchNorm))]
    handles = [module.register_forward_hook(note) for module in watched]
    try:
        model(example)
    finally:
        for handle in handles:
            handle.remove()
    fed = list(feeders.values())
    return {
        norm: layer
        for norm, layer in feeders.items()
        if fed.count(layer) == 1 and calls[layer] == calls[norm] == 1
    }


def _replaced(model: nn.Module, feeders: dict[nn.Module, nn.Module]) -> nn.Module:
    if isinstance(model, _BatchNorm):
        return _affine(model, "the model itself")
    for name, parent in list(model.named_modules()):
        for local, child in list(parent.named_children()):
            if not isinstance(child, _BatchNorm):
                continue
            affine = _affine(child, f"{name}.{local}" if name else local)
            layer = feeders.get(child)
            if layer is None:
                setattr(parent, local, affine)
            else:
                fold_into(layer, affine.weight.detach(), affine.bias.detach())
                setattr(parent, local, nn.Identity())
    return model


def fold_into(layer: nn.Module, scale: Tensor, shift: Tensor) -> None:
    """Let a convolution or linear layer give `scale * output + shift`, channel by channel."""
    assert isinstance(layer, _FOLDABLE)
    with torch.no_grad():
        axes = (-1, *[1] * (layer.weight.dim() - 1))
        layer.weight.mul_(scale.view(axes))
        bias = torch.zeros_like(shift) if layer.bias is None else layer.bias
        layer.bias = nn.Parameter(bias * scale + shift, requires_grad=layer.weight.requires_grad)


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
