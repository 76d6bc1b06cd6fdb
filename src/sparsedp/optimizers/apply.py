"""Applying a release: any torch optimizer, only the support moves."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from sparsedp.errors import ModelError, SparseDPError
from sparsedp.methods.support_scheduler import SupportChange
from sparsedp.optimizers.compact import ELEMENTWISE, CompactOptimizer
from sparsedp.optimizers.masked import WEIGHT_DECAY, MaskedOptimizer
from sparsedp.optimizers.places import places_in
from sparsedp.parameters import Layout, Support
from sparsedp.privacy.mechanism import Released

logger = logging.getLogger("sparsedp")

_GRADIENT_DECAY: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
)
"""Optimizers whose weight decay is added to the gradient, unless their group says `decoupled_weight_decay`."""


class SupportOptimizer(Protocol):
    """A torch optimizer behind a support.

    **Privacy.** Post-processing of a release.
    """

    def apply(self, released: Released) -> None:
        """One optimizer step with the released gradient; no `grad` is left afterwards."""
        ...

    def enter(self, support: Support) -> None:
        """Be on this support from now on: `apply` does so itself."""
        ...

    def hand_back(self) -> None:
        """Leave the optimizer over the model's own parameters, as it was given."""
        ...

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        ...

    def restore(self, saved: Mapping[str, Any], support: Support) -> None:
        """Go on from a checkpoint taken on this support."""
        ...


def support_optimizer(
    model: nn.Module, layout: Layout, optimizer: Optimizer, *, coasts: bool
) -> SupportOptimizer:
    """The optimizer that moves a support only: over the active entries alone wherever that gives the same.

    Raises:
        SparseDPError: the optimizer cannot honour a support, and why.
        ModelError: it holds other parameters than the model's that it could move.
    """
    _check_optimizer(model, layout, optimizer, coasts)
    if coasts or type(optimizer) not in ELEMENTWISE:
        logger.info(
            "%s holds state for all %d coordinates, and every step costs as many: %s",
            type(optimizer).__name__,
            layout.dimension,
            "the method lets coordinates off the support coast"
            if coasts
            else "it may tie coordinates together",
        )
        return MaskedOptimizer(model, layout, optimizer, coasts=coasts)
    return CompactOptimizer(model, layout, optimizer)


def change_weights(model: nn.Module, layout: Layout, change: SupportChange) -> None:
    """Prune and shrink the weights of a model as a change of its support asks."""
    if change.prune:
        set_to_zero(model, layout, change.left)
    if change.shrinkage is not None:
        change.shrinkage.apply(layout, model)


@torch.no_grad()
def set_to_zero(model: nn.Module, layout: Layout, support: Support) -> None:
    """Set these coordinates of a model to exactly zero (AdaDPIGU's pruning, m * theta)."""
    split = support.split(layout)
    for slot, parameter in zip(layout, layout.parameters(model), strict=True):
        places = places_in(split[slot.name], slot.shape, parameter.device)
        if places is None:
            parameter.zero_()
        else:
            places.write(parameter, parameter.new_zeros(places.shape))


def _check_optimizer(model: nn.Module, layout: Layout, optimizer: Optimizer, coasts: bool) -> None:
    """Refuse what cannot honour a support, saying why."""
    name = type(optimizer).__name__
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise SparseDPError(
            f"{name} evaluates the loss again inside its step (a closure), and every evaluation on private data "
            "must be paid for; use an optimizer that needs one gradient a step, such as SGD or Adam"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise SparseDPError("SparseAdam wants sparse gradient tensors; use Adam, the support is kept for you")
    held = {p for group in optimizer.param_groups for p in group["params"]}
    trainable = dict(zip((slot.name for slot in layout), layout.parameters(model), strict=True))
    strangers = sum(p.requires_grad or p.grad is not None for p in held - set(model.parameters()))
    if strangers:
        raise ModelError(
            f"the optimizer holds {strangers} parameter tensors that are not the model's; "
            "build it from this model's parameters()"
        )
    missing = [parameter for parameter, p in trainable.items() if p not in held]
    if missing:
        raise ModelError(
            f"the optimizer does not hold the trainable parameters {missing[:6]}; they would take clip norm and "
            "noise without moving. Add them, or freeze them with requires_grad_(False)"
        )
    if coasts:
        _check_coasting(optimizer, name)


def _check_coasting(optimizer: Optimizer, name: str) -> None:
    decays = any(group.get("weight_decay", 0) != 0 for group in optimizer.param_groups)
    if isinstance(optimizer, torch.optim.ASGD) or (
        decays and not isinstance(optimizer, _GRADIENT_DECAY + WEIGHT_DECAY)
    ):
        raise SparseDPError(
            f"this method lets coordinates off the support coast by their velocity, and {name} would also decay "
            "them; use SGD, Adam or AdamW, or weight_decay=0"
        )
