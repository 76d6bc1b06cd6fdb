"""An optimizer that holds every coordinate: for coasting velocity, and for state that coordinates share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsedp.errors import SparseDPError
from sparsedp.optimizers.compact import PER_PARAMETER_STATE, first_value
from sparsedp.optimizers.noise_aware import AdamBC
from sparsedp.optimizers.rule import optimizer_state, restore_optimizer
from sparsedp.parameters import Layout, Support
from sparsedp.privacy.mechanism import Released

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
class MaskedOptimizer:
    """Moves the support by a torch optimizer that holds every coordinate, and nothing else but for coasting velocity.

    Off the support a coordinate either *stays* (its value does not change by one bit and its optimizer state is
    made fresh when it leaves and kept so) or, with `coasts=True`, gets a zero gradient and goes on moving by its
    velocity alone (RS Sec. 4). Weight decay acts on the support only, in both cases.

    A step costs d in time and memory: needed where velocity lives off the support, and for optimizers whose state
    ties coordinates together.

    **Privacy.** Post-processing of a release.
    **Edge cases.** State that an optimizer shares between coordinates (step counts, Adafactor's rows and columns) is
    left to it. A coordinate that comes back starts with fresh state but the parameter's old step count.
    """

    def __init__(self, model: nn.Module, layout: Layout, optimizer: Optimizer, *, coasts: bool) -> None:
        self._parameters = layout.parameters(model)
        self._layout = layout
        self._optimizer = optimizer
        self._coasts = coasts
        self._support: Support | None = None
        self._parts: list[_Part] = []

    def apply(self, released: Released) -> None:
        """One optimizer step with the released gradient; the parameters' `grad` is None afterwards."""
        self.enter(released.support)
        gradient = None if released.support.is_full else released.dense()
        for part in self._parts:
            part.parameter.grad = self._gradient(part, released, gradient)
        if isinstance(self._optimizer, AdamBC):
            variance = released.support.scatter(released.noise_scale.square_())
            for part in (part for part in self._parts if part.parameter.grad is not None):
                self._optimizer.hear(part.parameter, variance[part.span].view(part.parameter.shape))
        if self._coasts:
            with self._decay_on_support_only():
                self._optimizer.step()
        else:
            self._step_keeping_the_rest()
        for part in self._parts:
            part.parameter.grad = None

    def hand_back(self) -> None:
        """Nothing to give back: the optimizer holds the parameters themselves."""

    def state(self) -> dict[str, Any]:
        """The optimizer's state, for every coordinate."""
        return optimizer_state(self._optimizer)

    def restore(self, saved: Mapping[str, Any], support: Support) -> None:
        """Go on from `state`."""
        restore_optimizer(self._optimizer, saved)

    def _gradient(self, part: _Part, released: Released, dense: Tensor | None) -> Tensor | None:
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
                _part(parameter, slot.span, masks[slot.name])
                for parameter, slot in zip(self._parameters, self._layout, strict=True)
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
                if part.frozen is None:
                    value.fill_(first_value(name, groups[p]))
                else:
                    value.masked_fill_(part.frozen, first_value(name, groups[p]))

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
                        (_decay_parameter if decoupled else _decay_gradient)(parts[p], group)
                group["weight_decay"] = 0.0
            yield
        finally:
            for group, value in zip(groups, kept, strict=True):
                group["weight_decay"] = value


def _part(parameter: nn.Parameter, span: slice, mask: Tensor) -> _Part:
    everything, something = bool(mask.all()), bool(mask.any())
    return _Part(parameter, span, something, None if everything or not something else ~mask)


@torch.no_grad()
def _decay_gradient(part: _Part, group: dict[str, Any]) -> None:
    p = part.parameter
    assert p.grad is not None
    decay = p * group["weight_decay"]
    if part.frozen is not None:
        decay.masked_fill_(part.frozen, 0)
    p.grad = p.grad - decay if group.get("maximize") else p.grad + decay


@torch.no_grad()
def _decay_parameter(part: _Part, group: dict[str, Any]) -> None:
    p = part.parameter
    shrunk = p * (1 - group["lr"] * group["weight_decay"])
    p.copy_(shrunk if part.frozen is None else torch.where(part.frozen, p, shrunk))
