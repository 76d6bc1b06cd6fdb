"""Affine normalisation layers that look at one sample at a time."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from sparsedp.grad_sample.blocks import Block
from sparsedp.grad_sample.graph import CannotBookError
from sparsedp.grad_sample.layers.source import Explicit, Family, Source, never, no_axes, working
from sparsedp.grad_sample.tape import Call
from sparsedp.grad_sample.workspace import Space

InstanceNorm = nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d


def trailing_source(call: Call, parameter: str, block: Block, space: Space) -> Source:
    """LayerNorm and RMSNorm: parameters live on the trailing axes, positions in between."""
    gradient = call.output_gradient
    module = call.module
    assert gradient is not None
    assert isinstance(module, nn.LayerNorm | nn.RMSNorm)
    b = working(gradient)
    if parameter == "weight":
        b = b * _normalised(module, working(call.input))
    leading = b.dim() - len(module.normalized_shape)
    if leading < 1:
        raise CannotBookError(f"layer {call.name!r} normalises over the batch axis")
    return Explicit(b.flatten(1, leading - 1).sum(1) if leading > 1 else b)


def _normalised(module: nn.LayerNorm | nn.RMSNorm, a: Tensor) -> Tensor:
    if isinstance(module, nn.LayerNorm):
        return F.layer_norm(a, module.normalized_shape, None, None, module.eps)
    return F.rms_norm(a, list(module.normalized_shape), None, module.eps)


def channel_source(call: Call, parameter: str, block: Block, space: Space) -> Source:
    """GroupNorm and InstanceNorm: one parameter per channel."""
    gradient = call.output_gradient
    assert gradient is not None
    b = working(gradient)
    if b.dim() < _least_axes(call.module):
        raise CannotBookError(f"layer {call.name!r} was given a single sample without a batch axis")
    if parameter == "weight":
        b = b * _normalised_channels(call.module, working(call.input))
    return Explicit(b.flatten(2).sum(2) if b.dim() > 2 else b)


def _least_axes(module: nn.Module) -> int:
    by_type: dict[type[nn.Module], int] = {nn.InstanceNorm1d: 3, nn.InstanceNorm2d: 4, nn.InstanceNorm3d: 5}
    return by_type.get(type(module), 2)


def _normalised_channels(module: nn.Module, a: Tensor) -> Tensor:
    if isinstance(module, nn.GroupNorm):
        return F.group_norm(a, module.num_groups, None, None, module.eps)
    assert isinstance(module, InstanceNorm)
    own_statistics = module.training or not module.track_running_stats
    return F.instance_norm(
        a,
        None if own_statistics else module.running_mean,
        None if own_statistics else module.running_var,
        use_input_stats=own_statistics,
        eps=module.eps,
    )


TRAILING_NORM = Family(frozenset({"weight", "bias"}), trailing_source, no_axes, never)
CHANNEL_NORM = Family(frozenset({"weight", "bias"}), channel_source, no_axes, never)
