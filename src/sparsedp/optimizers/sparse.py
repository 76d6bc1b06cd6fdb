"""torch.optim behind a support: state of size k (d where coasting needs it), updates of active coordinates."""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
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


ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.Adamax,
        torch.optim.Rprop,
        torch.optim.ASGD,
    }
)
"""Optimizers that move each coordinate by its own gradient and state alone, so that the others need not be there."""

PER_PARAMETER_STATE = frozenset({"step", "mu_product", "eta", "mu"})
"""Names of optimizer state that belongs to a whole parameter even when the parameter is a single scalar."""


def first_value(state: str, group: Mapping[str, Any]) -> float:
    """What a fresh optimizer puts into that state of a coordinate: Adagrad's `sum`, Rprop's steps are not zero."""
    return float(
        {"step_size": group["lr"], "sum": group.get("initial_accumulator_value", 0.0)}.get(state, 0.0)
    )


@dataclass(slots=True, eq=False)
class _Seat:
    """One parameter's place in the optimizer: held by itself if it is active whole, else by its active entries."""

    parameter: nn.Parameter
    group: list[nn.Parameter]
    place: int
    held: nn.Parameter
    active: Places | None
    span: slice


class SupportOptimizer(ABC):
    """A torch optimizer behind a support.

    Formal guarantees: Post-processing of a release.
    Edge cases: A coordinate that comes back starts with fresh state but the parameter's old step count.
    """

    def __init__(self, layout: ParameterLayout, optimizer: Optimizer) -> None:
        self._layout, self._optimizer = layout, optimizer
        self._support: Support | None = None

    @abstractmethod
    def apply(self, released: Release) -> None:
        """One optimizer step with the released gradient; no `grad` is left afterwards."""

    @abstractmethod
    def enter(self, support: Support) -> None:
        """Be on this support from now on: `apply` does so itself."""

    def hand_back(self) -> None:
        """Leave the optimizer over the model's own parameters, as it was given."""
        self._support = None

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: the optimizer's state."""
        return optimizer_state(self._optimizer)

    def restore(self, saved: Mapping[str, Any], support: Support) -> None:
        """Go on from a checkpoint taken on this support."""
        restore_optimizer(self._optimizer, saved)


@final
class CompactOptimizer(SupportOptimizer):
    """Moves the support by a torch optimizer that never sees the other coordinates.

    Each parameter's place in the optimizer's groups is taken by a tensor of its active entries, read from the weights
    before a step and written back after it. State follows its coordinate from support to support; that of a
    coordinate that leaves is forgotten.

    Edge cases: The weights are the truth: whoever changes them between steps is followed.
    """

    def __init__(self, model: nn.Module, layout: ParameterLayout, optimizer: Optimizer) -> None:
        super().__init__(layout, optimizer)
        spans = {p: slot.span for slot, p in zip(layout, layout.parameters(model), strict=True)}
        seats = {
            p: _Seat(p, group["params"], place, p, None, spans[p])
            for group in optimizer.param_groups
            for place, p in enumerate(group["params"])
            if p in spans
        }
        self._seats = [seats[p] for p in spans]

    def apply(self, released: Release) -> None:
        """One optimizer step with the released gradient; no `grad` is left afterwards."""
        self.enter(released.support)
        for seat in self._seats:
            seat.held.grad = _gradient(seat, released)
        if isinstance(self._optimizer, ElementwiseOptimizer):
            variance = released.noise_scale.square_()
            for seat in (seat for seat in self._seats if seat.held.grad is not None):
                own = variance[seat.span.start : seat.span.start + seat.held.numel()]
                self._optimizer.observe_noise(seat.held, own.view(seat.held.shape))
        self._optimizer.step()
        for seat in self._seats:
            seat.held.grad = None
            if seat.active is not None and seat.held.numel():
                seat.active.write(seat.parameter.detach(), seat.held.detach())

    def enter(self, support: Support) -> None:
        """Hold the entries of this support from now on."""
        if support is self._support:
            return
        if support.is_full and support.dimension == self._layout.dimension:
            for seat, slot in zip(self._seats, self._layout, strict=True):
                self._seat(seat, None)
                seat.span = slot.span
        elif support != self._support:
            split = support.split(self._layout)
            filled = 0
            for seat, slot in zip(self._seats, self._layout, strict=True):
                flat = split[slot.name]
                self._seat(seat, places_in(flat, slot.shape, seat.parameter.device))
                seat.span = slice(filled, filled + flat.numel())
                filled += flat.numel()
        self._support = support

    def hand_back(self) -> None:
        """Give the optimizer its parameters back, with their state as far as it was kept."""
        for seat in self._seats:
            self._seat(seat, None)
        super().hand_back()

    def state(self) -> dict[str, Any]:
        """The optimizer's state, k numbers for each it keeps of a coordinate."""
        return {**super().state(), "compact": True}

    def restore(self, saved: Mapping[str, Any], support: Support) -> None:
        """Go on from `state` on the support it was taken on; or from one with state for every coordinate."""
        if saved.get("compact"):
            self.enter(support)
        super().restore(saved, support)
        self.enter(support)

    def _seat(self, seat: _Seat, active: Places | None) -> None:
        """Put another tensor on a seat, and bring the state along."""
        before, old = seat.held, seat.active
        if active is None:
            seat.held = seat.parameter
        else:
            seat.held = nn.Parameter(active.read(seat.parameter.detach()))
        seat.active = active
        seat.group[seat.place] = seat.held
        state = self._optimizer.state.pop(before, None)
        if state is not None:
            group = next(group for group in self._optimizer.param_groups if group["params"] is seat.group)
            self._optimizer.state[seat.held] = {
                name: moved(value, old, active, seat.parameter.detach(), first_value(name, group))
                if isinstance(value, Tensor)
                and value.shape == before.shape
                and name not in PER_PARAMETER_STATE
                else value
                for name, value in state.items()
            }


def _gradient(seat: _Seat, released: Release) -> Tensor | None:
    """The release on one seat, in its type and strides; the entries are read anew from the weights."""
    held = seat.held.detach()
    if held.numel() == 0:
        return None
    if seat.active is not None:
        seat.active.read(seat.parameter.detach(), out=held)
    # Fused optimizers walk memory, so the gradient must have the parameter's strides, not only its shape.
    return released.copy_to(torch.empty_like(held), seat.span.start)


WEIGHT_DECAY: tuple[type[Optimizer], ...] = tuple(
    getattr(torch.optim, name) for name in ("AdamW", "Adafactor", "Muon") if hasattr(torch.optim, name)
)
"""Optimizers whose weight decay shrinks the parameter itself."""


@dataclass(frozen=True, slots=True)
class _Part:
    """One parameter and where in it the support is not; no mask when all of it or nothing of it is active."""

    parameter: nn.Parameter
    span: slice
    active: bool
    frozen: Tensor | None


@final
class MaskedOptimizer(SupportOptimizer):
    """Moves the support by a torch optimizer that holds every coordinate, and nothing else but for coasting velocity.

    Off the support a coordinate either *stays* (its value does not change by one bit and its optimizer state is
    made fresh when it leaves and kept so) or, with `coasts=True`, gets a zero gradient and goes on moving by its
    velocity alone (RS Sec. 4). Weight decay acts on the support only, in both cases.

    A step costs d: needed where velocity lives off the support, or where state ties coordinates together.

    Edge cases: State that an optimizer shares between coordinates (step counts, Adafactor's rows and columns) is
    left to it.
    """

    def __init__(
        self, model: nn.Module, layout: ParameterLayout, optimizer: Optimizer, *, coasts: bool
    ) -> None:
        super().__init__(layout, optimizer)
        self._parameters = layout.parameters(model)
        self._coasts = coasts
        self._parts: list[_Part] = []

    def apply(self, released: Release) -> None:
        """One optimizer step with the released gradient; the parameters' `grad` is None afterwards."""
        self.enter(released.support)
        gradient = None if released.support.is_full else released.dense()
        for part in self._parts:
            part.parameter.grad = self._gradient(part, released, gradient)
        if isinstance(self._optimizer, ElementwiseOptimizer):
            variance = released.support.scatter(released.noise_scale.square_())
            for part in (part for part in self._parts if part.parameter.grad is not None):
                self._optimizer.observe_noise(part.parameter, variance[part.span].view(part.parameter.shape))
        if self._coasts:
            with self._decay_on_support_only():
                self._optimizer.step()
        else:
            self._step_keeping_the_rest()
        for part in self._parts:
            part.parameter.grad = None

    def _gradient(self, part: _Part, released: Release, dense: Tensor | None) -> Tensor | None:
        if not part.active and not self._coasts:
            return None
        p = part.parameter.detach()
        # Fused optimizers walk memory, so the gradient must have the parameter's strides, not only its shape.
        room = torch.empty_like(p)
        if dense is None:
            return released.copy_to(room, part.span.start)
        return room.copy_(dense[part.span].reshape(p.shape))

    def _step_keeping_the_rest(self) -> None:
        mixed = [(part, part.frozen) for part in self._parts if part.frozen is not None]
        before = [part.parameter.detach().clone() for part, _ in mixed]
        self._optimizer.step()
        for (part, frozen), old in zip(mixed, before, strict=True):
            moved = part.parameter.detach()
            torch.where(frozen, old, moved, out=moved)
        self._forget([part for part, _ in mixed])

    def enter(self, support: Support) -> None:
        """Split a new support by parameter, and forget the state of what is not on it."""
        if support is self._support:
            return
        if support.dimension != self._layout.dimension:
            raise SparseDPError(
                f"the release has d={support.dimension}, the model d={self._layout.dimension}; "
                "apply a release to the model it was computed for"
            )
        if support != self._support:
            device = self._parameters[0].device
            masks = support.per_parameter(self._layout, device)
            self._parts = [
                _Part(
                    parameter, slot.span, bool(mask.any()), ~mask if mask.any() and not mask.all() else None
                )
                for parameter, slot in zip(self._parameters, self._layout, strict=True)
                for mask in (masks[slot.name],)
            ]
            if not self._coasts:
                self._forget(self._parts)
        self._support = support

    def _forget(self, parts: Sequence[_Part]) -> None:
        """Make the optimizer's state of some parameters fresh off the support."""
        groups = {p: group for group in self._optimizer.param_groups for p in group["params"]}
        for part in (part for part in parts if not part.active or part.frozen is not None):
            p = part.parameter
            for name, value in self._optimizer.state.get(p, {}).items():
                if not isinstance(value, Tensor) or value.shape != p.shape or name in PER_PARAMETER_STATE:
                    continue
                frozen = value.new_ones((), dtype=torch.bool) if part.frozen is None else part.frozen
                value.masked_fill_(frozen, first_value(name, groups[p]))

    @contextmanager
    def _decay_on_support_only(self) -> Iterator[None]:
        """Do the optimizer's weight decay ourselves, on the support, and switch its own off for one step."""
        parts = {part.parameter: part for part in self._parts}
        groups = [g for g in self._optimizer.param_groups if g.get("weight_decay", 0) != 0]
        if not groups or (self._support is not None and self._support.is_full):
            yield
            return
        kept = [group["weight_decay"] for group in groups]
        try:
            for group in groups:
                decoupled = isinstance(self._optimizer, WEIGHT_DECAY) or group.get("decoupled_weight_decay")
                for p in group["params"]:
                    if p in parts and parts[p].active:
                        _decay(parts[p], group, decoupled=bool(decoupled))
                group["weight_decay"] = 0.0
            yield
        finally:
            for group, value in zip(groups, kept, strict=True):
                group["weight_decay"] = value


@torch.no_grad()
def _decay(part: _Part, group: dict[str, Any], *, decoupled: bool) -> None:
    """Weight decay of the active entries: of the parameter itself, or as a part of its gradient."""
    p = part.parameter
    if decoupled:
        shrunk = p * (1 - group["lr"] * group["weight_decay"])
        p.copy_(shrunk if part.frozen is None else torch.where(part.frozen, p, shrunk))
        return
    assert p.grad is not None
    decay = p * group["weight_decay"]
    if part.frozen is not None:
        decay.masked_fill_(part.frozen, 0)
    p.grad = p.grad - decay if group.get("maximize") else p.grad + decay


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


def support_optimizer(
    model: nn.Module, layout: ParameterLayout, optimizer: Optimizer, *, coasts: bool
) -> SupportOptimizer:
    """The optimizer that moves a support only: over the active entries alone wherever that gives the same.

    Raises:
        SparseDPError: the optimizer cannot honour a support, and why.
        ModelError: it holds other parameters than the model's that it could move.
    """
    _check_optimizer(model, layout, optimizer, coasts)
    if coasts or not (type(optimizer) in ELEMENTWISE or isinstance(optimizer, ElementwiseOptimizer)):
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
        if places is None:
            parameter.zero_()
        else:
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
    unknown = decays and not isinstance(optimizer, _GRADIENT_DECAY + WEIGHT_DECAY)
    if coasts and (isinstance(optimizer, torch.optim.ASGD) or unknown):
        raise SparseDPError(
            f"this method lets coordinates off the support coast by their velocity, and {name} would also decay "
            "them; use SGD, Adam or AdamW, or weight_decay=0"
        )
