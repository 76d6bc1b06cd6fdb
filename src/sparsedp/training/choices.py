"""What a user may give for an optimizer and a scheduler, and what is made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from sparsedp.core.errors import SparseDPError

OptimizerChoice = Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer]
"""An optimizer over the model's parameters, or a function that makes one from them."""

SchedulerChoice = LRScheduler | Callable[[Optimizer, int], LRScheduler] | None
"""A scheduler over the optimizer, or a function that makes one from it and the number of steps. Moves every step."""


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """How releases move the weights.

    Attributes:
        optimizer: moves them.
        scheduler: moves its learning rate, every step.
        ema_decay: of a running average of the weights, if one is kept.
    """

    optimizer: OptimizerChoice
    scheduler: SchedulerChoice = None
    ema_decay: float | None = None


def make_optimizer(choice: OptimizerChoice, model: nn.Module) -> Optimizer:
    """The optimizer itself."""
    made = (
        choice
        if isinstance(choice, Optimizer)
        else choice([p for p in model.parameters() if p.requires_grad])
    )
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
