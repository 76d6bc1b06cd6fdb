"""An optimizer that holds the active entries alone: its step, its state and its memory cost k, not d."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsedp.optimizers.noise_aware import OWN_OPTIMIZERS, AdamBC
from sparsedp.optimizers.places import Places, moved, places_in
from sparsedp.optimizers.rule import optimizer_state, restore_optimizer
from sparsedp.parameters import Layout, Support
from sparsedp.privacy.mechanism import Released

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
        *OWN_OPTIMIZERS.values(),
    }
)
"""Optimizers that move each coordinate by its own gradient and state alone, so that the others need not be there."""

PER_PARAMETER_STATE = frozenset({"step", "mu_product", "eta", "mu"})
"""Names of optimizer state that belongs to a whole parameter even when the parameter is a single scalar."""


def first_value(state: str, group: Mapping[str, Any]) -> float:
    """What a fresh optimizer puts into that state of a coordinate: Adagrad's `sum`, Rprop's steps are not zero."""
    if state == "step_size":
        return float(group["lr"])
    return float(group.get("initial_accumulator_value", 0.0)) if state == "sum" else 0.0


@dataclass(slots=True, eq=False)
class _Seat:
    """One parameter's place in the optimizer, and what sits there.

    That is the parameter itself when all of it is active, else a tensor of its active entries, which may be none.
    """

    parameter: nn.Parameter
    group: list[nn.Parameter]
    place: int
    held: nn.Parameter
    active: Places | None
    span: slice


@final
class CompactOptimizer:
    """Moves the support by a torch optimizer that never sees the other coordinates.

    Each parameter's place in the optimizer's groups is taken by a tensor of its active entries, read from the weights
    before a step and written back after it. State follows its coordinate from support to support; that of a
    coordinate that leaves is forgotten.

    **Privacy.** Post-processing of a release.
    **Edge cases.** A coordinate that comes back starts with fresh state but the parameter's old step count. The
    weights are the truth: whoever changes them between steps is followed.
    """

    def __init__(self, model: nn.Module, layout: Layout, optimizer: Optimizer) -> None:
        self._layout = layout
        self._optimizer = optimizer
        self._support: Support | None = None
        spans = {p: slot.span for slot, p in zip(layout, layout.parameters(model), strict=True)}
        seats = {
            p: _Seat(p, group["params"], place, p, None, spans[p])
            for group in optimizer.param_groups
            for place, p in enumerate(group["params"])
            if p in spans
        }
        self._seats = [seats[p] for p in spans]

    def apply(self, released: Released) -> None:
        """One optimizer step with the released gradient; no `grad` is left afterwards."""
        self.enter(released.support)
        for seat in self._seats:
            seat.held.grad = _gradient(seat, released)
        if isinstance(self._optimizer, AdamBC):
            variance = released.noise_scale.square_()
            for seat in (seat for seat in self._seats if seat.held.grad is not None):
                own = variance[seat.span.start : seat.span.start + seat.held.numel()]
                self._optimizer.hear(seat.held, own.view(seat.held.shape))
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
        self._support = None

    def state(self) -> dict[str, Any]:
        """The optimizer's state, k numbers for each it keeps of a coordinate."""
        return {**optimizer_state(self._optimizer), "compact": True}

    def restore(self, saved: Mapping[str, Any], support: Support) -> None:
        """Go on from `state` on the support it was taken on; or from one with state for every coordinate."""
        if saved.get("compact"):
            self.enter(support)
            restore_optimizer(self._optimizer, saved)
        else:
            restore_optimizer(self._optimizer, saved)
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


def _gradient(seat: _Seat, released: Released) -> Tensor | None:
    """The release on one seat, in its type and strides; the entries are read anew from the weights."""
    held = seat.held.detach()
    if held.numel() == 0:
        return None
    if seat.active is not None:
        seat.active.read(seat.parameter.detach(), out=held)
    # Fused optimizers walk memory, so the gradient must have the parameter's strides, not only its shape.
    return released.copy_to(torch.empty_like(held), seat.span.start)
