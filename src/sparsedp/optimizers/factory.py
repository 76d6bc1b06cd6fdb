"""Optimizers by name, their default learning rates, and how a run resumes them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from sparsedp.errors import SparseDPError
from sparsedp.privacy.plan import Plan

MOMENTUM = 0.9
OptimizerChoice = Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer]
"""An optimizer over the model's parameters, or a function that makes one from them."""

Rate = float | Callable[[Plan], float]
"""A learning rate, or a rule that gives it for a plan."""

SchedulerChoice = LRScheduler | Callable[[Optimizer, int], LRScheduler] | None
"""A scheduler over the optimizer, or a function that makes one from it and the number of steps. Moves every step."""


def named_optimizer(name: str, lr: float | None) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    """The optimizer of that name in `torch.optim`, whatever its case, at rate `lr` or its own."""
    known = {
        one.lower(): kind
        for one, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    kind = known.get(name.lower())
    if kind is None:
        raise SparseDPError(f"optimizer: got {name!r}, expected one of {', '.join(sorted(known))}")
    rate: dict[str, Any] = {} if lr is None else {"lr": lr}
    return functools.partial(kind, **rate)


def make_optimizer(choice: OptimizerChoice, model: nn.Module) -> Optimizer:
    """The optimizer itself."""
    made = choice([p for p in model.parameters() if p.requires_grad]) if callable(choice) else choice
    if not isinstance(made, Optimizer):
        raise SparseDPError(
            f"optimizer: got {type(made).__name__}, expected a torch.optim optimizer or a function that makes one, "
            "such as lambda parameters: torch.optim.Adam(parameters, lr=1e-3)"
        )
    return made


def make_scheduler(choice: SchedulerChoice, optimizer: Optimizer, steps: int) -> LRScheduler | None:
    """The scheduler itself, if there is one."""
    if choice is None:
        return None
    made = choice if isinstance(choice, LRScheduler) else choice(optimizer, steps)
    if not isinstance(made, LRScheduler) or isinstance(made, ReduceLROnPlateau):
        raise SparseDPError(
            f"scheduler: got {type(made).__name__}, expected a torch.optim.lr_scheduler that needs no metric, or a "
            "function (optimizer, steps) that makes one"
        )
    if made.optimizer is not optimizer:
        raise SparseDPError("scheduler: it moves another optimizer; build it from the one given here")
    return made


def default_optimizer(lr: Rate | None, plan: Plan) -> OptimizerChoice:
    """SGD with momentum 0.9, at a rate of `0.2 sqrt(B / 128) / clip_norm` if none is given.

    Clipped updates scale with the clip norm, and their noise falls with the batch size. Found on digits (B = 128 and
    256) and MNIST (B = 1024) at epsilon 3.
    """
    last = plan.phases[-1]
    scale = math.sqrt(plan.expected_batch_size(last) / 128) / last.clip_norm
    given = 0.2 * scale if lr is None else lr(plan) if callable(lr) else lr
    if not isinstance(given, (int, float)) or not 0 <= given < math.inf:
        raise SparseDPError(
            f"lr: got {given!r}, expected a number >= 0, or a function of the plan that gives one"
        )
    return functools.partial(torch.optim.SGD, lr=given, momentum=MOMENTUM)


def optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's class and state, as plain values and tensors."""
    return {"class": type(optimizer).__name__, "state": optimizer.state_dict()}


def restore_optimizer(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Put back what `optimizer_state` took; another optimizer, or other parameter groups, are refused."""
    _check_class(optimizer, saved, "optimizer")
    try:
        optimizer.load_state_dict(saved["state"])
    except ValueError as error:
        raise SparseDPError(
            f"the checkpoint's optimizer has other parameter groups ({error}); build it as the run did"
        ) from error
    for parameter, entries in optimizer.state.items():
        for name, value in entries.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and name != "step":
                # Saved tensors are contiguous; fused optimizers need the parameter's own strides.
                entries[name] = torch.empty_like(parameter.detach(), dtype=value.dtype).copy_(value)


def scheduler_state(scheduler: LRScheduler | None) -> dict[str, Any] | None:
    """The scheduler's class and state, or None."""
    return None if scheduler is None else {"class": type(scheduler).__name__, "state": scheduler.state_dict()}


def restore_scheduler(scheduler: LRScheduler | None, saved: Mapping[str, Any] | None) -> None:
    """Put back what `scheduler_state` took; another scheduler, or none on one side, is refused."""
    if (scheduler is None) != (saved is None):
        there = "no scheduler" if saved is None else f"a {saved['class']}"
        here = "none" if scheduler is None else f"a {type(scheduler).__name__}"
        raise SparseDPError(f"the run has {there} in its checkpoint and got {here} now; resume with the same")
    if scheduler is not None and saved is not None:
        _check_class(scheduler, saved, "scheduler")
        scheduler.load_state_dict(saved["state"])


def _check_class(live: object, saved: Mapping[str, Any], what: str) -> None:
    if type(live).__name__ != saved["class"]:
        raise SparseDPError(
            f"the run was trained with the {what} {saved['class']} and got {type(live).__name__} now; "
            "resume with the one it began with"
        )


_SCALE = 0.0047
_STABLE = 30.0
"""Times the square of a record's length, the rate from which on momentum overshoots the loss's curvature."""
AVERAGED, SQUARED = 2.0, 0.25
"""Averages have less noise, so the rate may be larger; a squared loss is eight times as curved as a logistic one."""


def table_rate(plan: Plan, coordinates: int, length: float, factor: float = 1.0) -> float:
    """`0.0047 B / (C sqrt(s) R^(3/4))` with `s = z sqrt(d E / B)`, for SGD with momentum 0.9; at most `30 / (C R^2)`.

    B is the batch size, C the clip norm, z the noise multiplier of the last phase, d the number of coordinates, E the
    passes over the data, and `R^2 = 1 + length^2` the squared length of a typical record with its intercept. The
    rule's numbers were found by simulation on four public tables at epsilon 0.5, 1 and 3 (docs/tabular.md). `factor`
    is 1 where the last weights of a logistic regression are kept, `AVERAGED` where those of the whole run are
    averaged, `SQUARED` where they are and the loss is squared.

    Formal guarantees: Public numbers alone.
    """
    last = plan.phases[-1]
    batch, clip = plan.expected_batch_size(last), last.clip_norm
    passes = sum(phase.steps * phase.sampling_rate for phase in plan.phases if phase.trains)
    noise = max(last.noise_multiplier, 0.1) * math.sqrt(coordinates * passes / batch)
    record = math.sqrt(1 + length**2)
    rate = factor * _SCALE * batch / (math.sqrt(noise) * math.pow(record, 0.75))
    return min(rate, _STABLE / record**2) / clip
