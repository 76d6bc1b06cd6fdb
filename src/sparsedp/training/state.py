"""Optimizer and scheduler state in and out of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sparsedp.core.errors import SparseDPError


def optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's class and state, as plain values and tensors."""
    return {"class": type(optimizer).__name__, "state": optimizer.state_dict()}


def restore_optimizer(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Put back what `optimizer_state` took.

    Raises:
        SparseDPError: another optimizer, or other parameter groups.
    """
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
    """Put back what `scheduler_state` took.

    Raises:
        SparseDPError: another scheduler, or none on one side.
    """
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
