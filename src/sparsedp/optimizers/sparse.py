"""torch.optim behind a support: state of size k (d where coasting needs it), updates of active coordinates."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsedp.errors import ModelError, SparseDPError
from sparsedp.methods.support_scheduler import SupportChange
from sparsedp.optimizers.factory import optimizer_state, restore_optimizer
from sparsedp.parameters import ParameterLayout, Support
from sparsedp.privacy.mechanism import Release

_IN_NUMPY = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True, eq=False)
class WholeRows:
    """Entries that fill whole slices along the first axis."""

    rows: Tensor
    row_shape: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the active entries as one tensor."""
        return (self.rows.numel(), *self.row_shape)

    @property
    def flat(self) -> Tensor:
        """Their sorted flat positions in the parameter."""
        width = math.prod(self.row_shape)
        return (self.rows.unsqueeze(1) * width + torch.arange(width, device=self.rows.device)).reshape(-1)

    def read(self, full: Tensor, out: Tensor | None = None) -> Tensor:
        """The active entries of a tensor of the parameter's shape, in `out` if there is one."""
        return torch.index_select(full, 0, self.rows, out=out)

    def write(self, full: Tensor, values: Tensor) -> None:
        """Put values into the active entries, and leave every other bit alone."""
        in_numpy = full.device.type == "cpu" and full.dtype == values.dtype and full.dtype in _IN_NUMPY
        if in_numpy and full.is_contiguous() and values.is_contiguous():
            _as_items(full)[self.rows.numpy()] = _as_items(values)
            full.index_copy_(0, self.rows[:0], values[:0])  # so that PyTorch counts it as a change
        else:
            full.index_copy_(0, self.rows, values)


@dataclass(frozen=True, slots=True, eq=False)
class Scattered:
    """Entries anywhere, by sorted flat position."""

    flat: Tensor
    full_shape: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the active entries as one tensor."""
        return (self.flat.numel(),)

    def read(self, full: Tensor, out: Tensor | None = None) -> Tensor:
        """The active entries of a tensor of the parameter's shape, in `out` if there is one."""
        if full.is_contiguous():
            return torch.index_select(full.view(-1), 0, self.flat, out=out)
        found = full[torch.unravel_index(self.flat, self.full_shape)]
        return found if out is None else out.copy_(found)

    def write(self, full: Tensor, values: Tensor) -> None:
        """Put values into the active entries, and leave every other bit alone."""
        if full.is_contiguous():
            full.view(-1).index_copy_(0, self.flat, values)
        else:
            full.index_put_(torch.unravel_index(self.flat, self.full_shape), values)


Places = WholeRows | Scattered


def _as_items(rows: Tensor) -> npt.NDArray[np.void]:
    """The same memory as one item a row: NumPy then copies row by row, where PyTorch does number by number."""
    flat = rows.detach().numpy().reshape(len(rows), -1)
    return flat.view(f"V{flat.shape[1] * flat.itemsize}").reshape(-1)


def places_in(flat: Tensor, shape: tuple[int, ...], device: torch.device) -> Places | None:
    """The places of sorted flat positions in a parameter; None when they are all of it."""
    if flat.numel() == math.prod(shape):
        return None
    width = math.prod(shape[1:])
    if flat.numel() and width > 1 and flat.numel() % width == 0:
        rows = flat[::width] // width
        whole = WholeRows(rows, shape[1:])
        if torch.equal(whole.flat, flat):
            return WholeRows(rows.to(device), shape[1:])
    return Scattered(flat.to(device), shape)


def moved(values: Tensor, old: Places | None, new: Places | None, full: Tensor, fill: float = 0.0) -> Tensor:
    """Values held for the old places, for the new ones: kept where both have them, `fill` where only the new do.

    `full` gives the parameter's shape and strides.
    """
    if old is None and new is None:
        return values
    if old is None:
        assert new is not None
        return new.read(values)
    if new is None:
        whole = torch.full_like(full, fill, dtype=values.dtype)
        old.write(whole, values)
        return whole
    out = torch.full(new.shape, fill, dtype=values.dtype, device=values.device)
    carry(values, old, out, new)
    return out


def carry(values: Tensor, old: Places, out: Tensor, new: Places) -> None:
    """Put values held for the old places into those for the new ones, where both have them; costs k."""
    before, after = old.flat, new.flat
    if not before.numel() or not after.numel():
        return
    place = torch.searchsorted(after, before).clamp_(max=after.numel() - 1)
    kept = after[place] == before
    out.view(-1)[place[kept]] = values.reshape(-1)[kept]


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

    Formal guarantees: Post-processing of a release.
    Edge cases: A coordinate that comes back starts with fresh state but the parameter's old step count. The
    weights are the truth: whoever changes them between steps is followed.
    """

    def __init__(self, model: nn.Module, layout: ParameterLayout, optimizer: Optimizer) -> None:
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
class MaskedOptimizer:
    """Moves the support by a torch optimizer that holds every coordinate, and nothing else but for coasting velocity.

    Off the support a coordinate either *stays* (its value does not change by one bit and its optimizer state is
    made fresh when it leaves and kept so) or, with `coasts=True`, gets a zero gradient and goes on moving by its
    velocity alone (RS Sec. 4). Weight decay acts on the support only, in both cases.

    A step costs d in time and memory: needed where velocity lives off the support, and for optimizers whose state
    ties coordinates together.

    Formal guarantees: Post-processing of a release.
    Edge cases: State that an optimizer shares between coordinates (step counts, Adafactor's rows and columns) is
    left to it. A coordinate that comes back starts with fresh state but the parameter's old step count.
    """

    def __init__(
        self, model: nn.Module, layout: ParameterLayout, optimizer: Optimizer, *, coasts: bool
    ) -> None:
        self._parameters = layout.parameters(model)
        self._layout = layout
        self._optimizer = optimizer
        self._coasts = coasts
        self._support: Support | None = None
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

    def hand_back(self) -> None:
        """The optimizer holds the parameters themselves; the next support is entered anew."""
        self._support = None

    def state(self) -> dict[str, Any]:
        """The optimizer's state, for every coordinate."""
        return optimizer_state(self._optimizer)

    def restore(self, saved: Mapping[str, Any], support: Support) -> None:
        """Go on from `state`."""
        restore_optimizer(self._optimizer, saved)

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

    Formal guarantees: Post-processing of a release.
    """

    def apply(self, released: Release) -> None:
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
