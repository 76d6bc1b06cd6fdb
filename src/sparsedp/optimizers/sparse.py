"""torch.optim behind a support: state of size k (d where coasting needs it), updates of active coordinates."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from sparsedp.errors import ModelError, SparseDPError
from sparsedp.methods.support_scheduler import SupportChange
from sparsedp.optimizers.factory import optimizer_state, restore_optimizer
from sparsedp.optimizers.places import Places, moved, places_in
from sparsedp.parameters import ParameterLayout, Support
from sparsedp.privacy.mechanism import Release


class ElementwiseOptimizer(Optimizer):
    """Base of one's own optimizers that move each coordinate by its own gradient and state alone.

    On a support such an optimizer keeps state for the active coordinates only, as torch's own do.
    """

    def observe_noise(self, parameter: Tensor, variance: Tensor) -> None:
        """Take the variance of the noise in a parameter's next gradient, in its shape; ignored unless overridden."""


_TORCHS = "SGD Adam AdamW NAdam RAdam RMSprop Adagrad Adadelta Adamax Rprop ASGD"
ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(getattr(optim, name) for name in _TORCHS.split())
"""Torch's that move each coordinate by its own gradient and state alone, so that the others need not be there."""

PER_PARAMETER_STATE = frozenset({"step", "mu_product", "eta", "mu"})
"""Names of optimizer state that belongs to a whole parameter even when the parameter is a single scalar."""


def first_value(state: str, group: Mapping[str, Any]) -> float:
    """What a fresh optimizer puts into that state of a coordinate: Adagrad's `sum`, Rprop's steps are not zero."""
    fresh = {"step_size": group["lr"], "sum": group.get("initial_accumulator_value", 0.0)}
    return float(fresh.get(state, 0.0))


@dataclass(slots=True, eq=False)
class _Seat:
    """One parameter, its place in the optimizer, what is held there, and its part of the support (`span`)."""

    parameter: nn.Parameter
    group: int
    place: int
    held: nn.Parameter
    active: Places
    span: slice

    def spread(self, entries: Tensor) -> Tensor:
        """Values of the active entries in the shape of what is held, zero elsewhere."""
        if self.held.shape == entries.shape:
            return entries
        whole = torch.zeros_like(self.held.detach(), dtype=entries.dtype)
        self.active.write(whole, entries)
        return whole


@final
class SupportOptimizer:
    """Moves the support by a torch optimizer, and nothing else but for coasting velocity.

    Where the optimizer moves each coordinate by itself, it holds the active entries alone, in the places of their
    parameters: they are read from the weights before a step and written back after it, and state follows its
    coordinate from support to support. Other optimizers hold every coordinate, as do those whose coordinates coast
    off the support: these get a zero gradient and go on by their velocity (RS Sec. 4). A step then costs d. Weight
    decay acts on the support only. Off the support of an optimizer that does not coast no bit changes, and state is
    forgotten. `compact` says whether it holds active entries alone; by default wherever that gives the same.

    Formal guarantees: Post-processing of a release.
    Edge cases: A coordinate that comes back starts with fresh state but the parameter's old step count. The weights
    are the truth: whoever changes them between steps is followed. State that an optimizer shares between coordinates
    (step counts, Adafactor's rows and columns) is left to it.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: ParameterLayout,
        optimizer: Optimizer,
        *,
        coasts: bool,
        compact: bool | None = None,
    ) -> None:
        _check_optimizer(model, layout, optimizer, coasts)
        elementwise = type(optimizer) in ELEMENTWISE or isinstance(optimizer, ElementwiseOptimizer)
        self._compact = elementwise and not coasts if compact is None else compact
        self._layout, self._optimizer, self._coasts = layout, optimizer, coasts
        self._support: Support | None = None
        found = {
            p: (number, place)
            for number, group in enumerate(optimizer.param_groups)
            for place, p in enumerate(group["params"])
        }
        self._seats = [
            _Seat(p, *found[p], p, Places(slot.shape), slot.span)
            for slot, p in zip(layout, layout.parameters(model), strict=True)
        ]

    def apply(self, released: Release) -> None:
        """One optimizer step with the released gradient; no `grad` is left afterwards."""
        self.enter(released.support)
        moving = [seat for seat in self._seats if self._coasts or seat.span.start < seat.span.stop]
        for seat in moving:
            seat.held.grad = self._gradient(seat, released)
        if isinstance(self._optimizer, ElementwiseOptimizer):
            variance = released.noise_scale.square_()
            for seat in moving:
                own = variance[seat.span].view(seat.active.shape)
                self._optimizer.observe_noise(seat.held, seat.spread(own))
        keeps = not self._compact and not self._coasts
        before = [
            s.parameter.detach().clone() if keeps and s.active.index is not None else None for s in moving
        ]
        with self._without_decay():
            self._optimizer.step()
        for seat, old in zip(moving, before, strict=True):
            seat.held.grad = None
            full = seat.parameter.detach()
            if seat.held is not seat.parameter:
                seat.active.write(full, seat.held.detach())
            elif old is not None:
                seat.active.write(old, seat.active.read(full))
                full.copy_(old)
                self._carry_state(seat, seat.held, seat.active)

    def enter(self, support: Support) -> None:
        """Be on this support from now on: `apply` does so itself."""
        if support is self._support:
            return
        if support != self._support:
            whole = support.is_full and support.dimension == self._layout.dimension
            split = None if whole else support.split(self._layout)
            filled = 0
            for seat, slot in zip(self._seats, self._layout, strict=True):
                active = Places(slot.shape)
                if split is not None:
                    active = places_in(split[slot.name], slot.shape, seat.parameter.device)
                seat.span = slice(filled, filled + math.prod(active.shape))
                filled = seat.span.stop
                self._seat(seat, active)
        self._support = support

    def hand_back(self) -> None:
        """Give the optimizer its parameters back, with their state as far as it was kept."""
        for seat in self._seats:
            self._seat(seat, Places(tuple(seat.parameter.shape)))
        self._support = None

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: the optimizer's state, k numbers for each it keeps of a coordinate."""
        return optimizer_state(self._optimizer) | ({"compact": True} if self._compact else {})

    def restore(self, saved: Mapping[str, Any], support: Support) -> None:
        """Go on from `state` on the support it was taken on; or from one with state for every coordinate."""
        if saved.get("compact"):
            self.enter(support)
        restore_optimizer(self._optimizer, saved)
        self.enter(support)

    def _seat(self, seat: _Seat, active: Places) -> None:
        """Change which entries take part; what the optimizer keeps of them follows."""
        before, old, seat.active = seat.held, seat.active, active
        if self._compact:
            full = seat.parameter
            seat.held = full if active.index is None else nn.Parameter(active.read(full.detach()))
            self._group(seat)["params"][seat.place] = seat.held
        if not self._coasts:
            self._carry_state(seat, before, old)

    def _carry_state(self, seat: _Seat, before: nn.Parameter, old: Places) -> None:
        """Bring the state of what was held before to what is held now; it is fresh off the support."""
        kept, full = self._optimizer.state.pop(before, None), seat.parameter.detach()
        if kept is None:
            return
        state = dict(kept)  # a `state_dict` that was taken shares the old one
        for name, value in state.items():
            if not isinstance(value, Tensor) or value.shape != before.shape or name in PER_PARAMETER_STATE:
                continue
            fill = first_value(name, self._group(seat))
            if self._compact:
                state[name] = moved(value, old, seat.active, full, fill)
            else:
                state[name] = moved(seat.active.read(value), seat.active, Places(full.shape), full, fill)
        self._optimizer.state[seat.held] = state

    def _group(self, seat: _Seat) -> dict[str, Any]:
        group: dict[str, Any] = self._optimizer.param_groups[seat.group]
        return group

    def _gradient(self, seat: _Seat, released: Release) -> Tensor:
        """The release on one seat; entries that are held in a parameter's place are read anew from the weights."""
        held, shape = seat.held.detach(), seat.active.shape
        if seat.held is not seat.parameter:
            seat.active.read(seat.parameter.detach(), out=held)
        # Fused optimizers walk memory, so the gradient must have the parameter's strides, not only its shape.
        room = torch.empty_like(held) if held.shape == shape else held.new_empty(shape)
        entries = released.copy_to(room, seat.span.start)
        return seat.spread(self._decayed(seat, entries) if self._decays(self._group(seat)) else entries)

    def _decays(self, group: Mapping[str, Any]) -> bool:
        """Whether weight decay is ours: the optimizer's own would shrink what coasts, too."""
        partial = self._support is not None and not self._support.is_full
        return self._coasts and partial and group.get("weight_decay", 0) != 0

    def _decayed(self, seat: _Seat, entries: Tensor) -> Tensor:
        """Do the weight decay of the active entries: of the weights themselves, or as a part of their gradient."""
        group, full = self._group(seat), seat.parameter.detach()
        values = seat.active.read(full)
        if isinstance(self._optimizer, optim.AdamW) or group.get("decoupled_weight_decay"):
            seat.active.write(full, values * (1 - group["lr"] * group["weight_decay"]))
            return entries
        decay: Tensor = values * group["weight_decay"]
        return entries - decay if group.get("maximize") else entries + decay

    @contextmanager
    def _without_decay(self) -> Iterator[None]:
        """Switch the optimizer's weight decay off for a step where it is ours."""
        kept = [(g, g["weight_decay"]) for g in self._optimizer.param_groups if self._decays(g)]
        try:
            for group, _ in kept:
                group["weight_decay"] = 0.0
            yield
        finally:
            for group, value in kept:
                group["weight_decay"] = value


def change_weights(model: nn.Module, layout: ParameterLayout, change: SupportChange) -> None:
    """Prune and shrink the weights of a model as a change of its support asks."""
    if change.prune:
        set_to_zero(model, layout, change.left)
    if change.shrinkage is not None:
        change.shrinkage.apply(layout, model)


@torch.no_grad()
def set_to_zero(model: nn.Module, layout: ParameterLayout, support: Support) -> None:
    """Set these coordinates of a model to exactly zero (AdaDPIGU's pruning, m * theta)."""
    split = support.split(layout)
    for slot, parameter in zip(layout, layout.parameters(model), strict=True):
        places = places_in(split[slot.name], slot.shape, parameter.device)
        places.write(parameter, parameter.new_zeros(places.shape))


def _check_optimizer(model: nn.Module, layout: ParameterLayout, optimizer: Optimizer, coasts: bool) -> None:
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
    decays = any(group.get("weight_decay", 0) != 0 for group in optimizer.param_groups)
    if coasts and (
        isinstance(optimizer, optim.ASGD) or (decays and not isinstance(optimizer, tuple(ELEMENTWISE)))
    ):
        raise SparseDPError(
            f"this method lets coordinates off the support coast by their velocity, and {name} would also decay "
            "them; use SGD, Adam or AdamW, or weight_decay=0"
        )
