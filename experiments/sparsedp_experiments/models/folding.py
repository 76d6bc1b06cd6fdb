"""Batch norm folded into the convolution or linear layer before it."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from sparsedp.batch_norm import TOLERANCE, ChannelAffine, replace_batch_norm, set_modes
from sparsedp.errors import ModelError

_FOLDABLE = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)


def fold_batch_norm(model: nn.Module, example: Any) -> nn.Module:
    """A copy of the model with every batch norm folded into the convolution or linear layer that feeds it alone.

    Which layer feeds which is seen in one forward pass of `example` (inputs of the model, any batch; a dict is
    keyword arguments where the model takes those names), in evaluation mode. What has no such layer becomes a
    `ChannelAffine`. Outputs, also those in tuples, dicts and data classes, are compared before the copy is given
    back. What was in training mode is so in the copy: call `eval()` on it to have no dropout.

    Raises:
        ModelError: a batch norm cannot be fixed (see `freeze_batch_norm`), there is no output to compare, or outputs
            differ: a layer is used twice.
    """
    with torch.inference_mode(False), torch.no_grad():
        folded = copy.deepcopy(model)
        modes = {module: module.training for module in folded.modules()}
        folded.eval()
        before = _numbers(_call(folded, example))
        feeders = _feeders(folded, example)

        def place(norm: _BatchNorm, affine: ChannelAffine, rest: dict[str, nn.Module]) -> nn.Module:
            """The affine map goes into the layer that feeds the norm alone, if one does."""
            feeder = feeders.get(norm)
            if feeder is None:
                return nn.Sequential(OrderedDict(affine=affine, **rest)) if rest else affine
            fold_into(feeder, affine.weight.detach(), affine.bias.detach())
            return nn.Sequential(OrderedDict(rest)) if rest else nn.Identity()

        folded = replace_batch_norm(folded, place)
        after = _numbers(_call(folded, example))
    for old, new in zip(before, after, strict=True):
        scale = float(old.abs().max())
        if not torch.allclose(old, new, rtol=0, atol=TOLERANCE * scale):
            raise ModelError(
                f"fold_batch_norm: outputs moved by {float((old - new).abs().max()):.2g} of {scale:.2g}, so a layer "
                "before a batch norm is used elsewhere, too; call freeze_batch_norm, which changes no other layer"
            )
    return set_modes(folded, modes, model.training)


def _call(model: nn.Module, example: Any) -> Any:
    """The model on an example; a dict is keyword arguments, unless the model has other names for them."""
    if not isinstance(example, Mapping):
        return model(example)
    try:
        inspect.signature(model.forward).bind(**example)
    except TypeError:
        return model(example)
    return model(**example)


def _numbers(output: Any) -> list[Tensor]:
    """Every tensor of real numbers in what a model gave."""
    found = [leaf for leaf in _tensors(output) if leaf.is_floating_point() and leaf.numel()]
    if not found:
        raise ModelError(
            f"fold_batch_norm: got an output of type {type(output).__name__} without real numbers to compare, "
            "expected a tensor, or a tuple, dict or data class of them; call freeze_batch_norm, which compares none"
        )
    return found


def _tensors(output: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif isinstance(leaf, Mapping):
            found += _tensors(list(leaf.values()))
        elif is_dataclass(leaf):
            found += _tensors([getattr(leaf, entry.name) for entry in fields(leaf)])
        else:
            found += [value for value in getattr(leaf, "__dict__", {}).values() if isinstance(value, Tensor)]
    return found


def _feeders(model: nn.Module, example: Any) -> dict[nn.Module, nn.Module]:
    """Each batch norm whose input is exactly the output of one layer that can take it in."""
    made: dict[int, tuple[Tensor, int, nn.Module]] = {}
    feeders: dict[nn.Module, nn.Module] = {}
    calls: dict[nn.Module, int] = {}

    def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        calls[module] = calls.get(module, 0) + 1
        if isinstance(module, _FOLDABLE):
            if output.dim() == module.weight.dim():  # its channels are on axis 1, as a batch norm's are
                # Holds the tensor, so that its id stays its own.
                made[id(output)] = (output, output._version, module)
        elif args and id(args[0]) in made:
            given, version, layer = made[id(args[0])]
            if given._version == version:  # nothing has written into it in between
                feeders[module] = layer

    watched = [m for m in model.modules() if isinstance(m, (*_FOLDABLE, _BatchNorm))]
    handles = [module.register_forward_hook(note) for module in watched]
    try:
        _call(model, example)
    finally:
        for handle in handles:
            handle.remove()
    fed = list(feeders.values())
    return {
        norm: layer
        for norm, layer in feeders.items()
        if fed.count(layer) == 1 and calls[layer] == calls[norm] == 1
    }


def fold_into(layer: nn.Module, scale: Tensor, shift: Tensor) -> None:
    """Let a convolution or linear layer give `scale * output + shift`, channel by channel."""
    assert isinstance(layer, _FOLDABLE)
    with torch.no_grad():
        axes = (-1, *[1] * (layer.weight.dim() - 1))
        layer.weight.mul_(scale.view(axes))
        bias = torch.zeros_like(shift) if layer.bias is None else layer.bias
        layer.bias = nn.Parameter(bias * scale + shift, requires_grad=layer.weight.requires_grad)
