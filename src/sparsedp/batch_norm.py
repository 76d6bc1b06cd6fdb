"""Batch norm made harmless: its running statistics are public constants, folded into the layer before.

A pretrained network's batch norm normalises by statistics of *public* data. Left in training mode it would mix
samples; replaced by GroupNorm the pretrained weights lose their meaning. As a fixed affine map it does neither.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from sparsedp.errors import ModelError

TOLERANCE = 1e-4
"""Largest difference of the outputs, relative to their size, that rounding explains."""

_FOLDABLE = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
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
    """A copy of the model in which every batch norm is the fixed affine map it is in evaluation mode.

    Scale and shift are parameters and can be trained; the statistics are in them. A batch norm that goes on with
    dropout and an activation (timm's `BatchNormAct2d`) keeps both behind the map. What was in training mode still is.

    Raises:
        ModelError: a batch norm has no running statistics to fix, or a forward of its own that is none of these.
    """
    frozen = copy.deepcopy(model)
    modes = _modes(frozen)
    return _in_modes(_replaced(frozen, {}), modes, model.training)


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
        modes = _modes(folded)
        folded.eval()
        before = _numbers(_call(folded, example))
        folded = _replaced(folded, _feeders(folded, example))
        after = _numbers(_call(folded, example))
    for old, new in zip(before, after, strict=True):
        scale = float(old.abs().max())
        if not torch.allclose(old, new, rtol=0, atol=TOLERANCE * scale):
            raise ModelError(
                f"fold_batch_norm: outputs moved by {float((old - new).abs().max()):.2g} of {scale:.2g}, so a layer "
                "before a batch norm is used elsewhere, too; call freeze_batch_norm, which changes no other layer"
            )
    return _in_modes(folded, modes, model.training)


def _modes(model: nn.Module) -> dict[nn.Module, bool]:
    """Which modules are in training mode."""
    return {module: module.training for module in model.modules()}


def _in_modes(model: nn.Module, modes: Mapping[nn.Module, bool], around: bool) -> nn.Module:
    """Every module in the mode it had; one that is new has that of the module around it."""
    model.training = modes.get(model, around)
    for child in model.children():
        _in_modes(child, modes, model.training)
    return model


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


def _replaced(model: nn.Module, feeders: dict[nn.Module, nn.Module]) -> nn.Module:
    if isinstance(model, _BatchNorm):
        return _fixed(model, "the model itself", None)
    made: dict[nn.Module, nn.Module] = {}
    for name, parent in list(model.named_modules()):
        for local, child in list(parent._modules.items()):  # named_children leaves out a second name
            if not isinstance(child, _BatchNorm):
                continue
            if child not in made:
                made[child] = _fixed(child, f"{name}.{local}" if name else local, feeders.get(child))
            setattr(parent, local, made[child])
    return model


def _fixed(norm: _BatchNorm, name: str, feeder: nn.Module | None) -> nn.Module:
    """What takes the place of a batch norm; its affine map goes into the layer that feeds it alone, if one does."""
    affine, rest = _affine(norm, name), _after(norm, name)
    whole = nn.Sequential(OrderedDict(affine=affine, **rest)) if rest else affine
    if rest:
        _check_same(norm, whole, name)
    if feeder is None:
        return whole
    fold_into(feeder, affine.weight.detach(), affine.bias.detach())
    return nn.Sequential(OrderedDict(rest)) if rest else nn.Identity()


def _after(norm: _BatchNorm, name: str) -> dict[str, nn.Module]:
    """The modules that a batch norm of another library runs after it has normalised."""
    if getattr(norm.forward, "__func__", None) in _OWN_FORWARDS:
        return {}
    parts = {part: getattr(norm, part, None) for part in ("drop", "act")}
    modules = {part: module for part, module in parts.items() if isinstance(module, nn.Module)}
    if len(modules) != len(parts):
        raise _unknown_forward(norm, name)
    return modules


def _check_same(norm: _BatchNorm, whole: nn.Module, name: str) -> None:
    """Refuse a batch norm that is not the map and then its parts, seen on a few numbers in evaluation mode."""
    assert norm.running_mean is not None
    axes = 2 if isinstance(norm, nn.BatchNorm1d) else 5 if isinstance(norm, nn.BatchNorm3d) else 4
    shape = (4, len(norm.running_mean), *[2] * (axes - 2))
    numbers = torch.linspace(-3, 3, math.prod(shape)).reshape(shape).to(norm.running_mean)
    old, new = copy.deepcopy(norm).eval(), copy.deepcopy(whole).eval()
    try:
        with torch.no_grad():
            expected, found = old(numbers.clone()), new(numbers.clone())
    except Exception as error:  # whatever a forward of another library asks for
        raise _unknown_forward(norm, name) from error
    if not torch.allclose(expected, found, rtol=0, atol=TOLERANCE * float(expected.abs().max())):
        raise _unknown_forward(norm, name)


def _unknown_forward(norm: _BatchNorm, name: str) -> ModelError:
    return ModelError(
        f"batch norm {name!r}: got a {type(norm).__name__} with a forward of its own, expected one of torch's, or "
        "one that normalises and then runs its modules drop and act; put what it does besides into a module of its "
        "own, behind a batch norm of torch's"
    )


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
