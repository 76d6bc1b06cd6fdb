"""The setting in which per-sample gradients are vectorised: other values in a module's place, no graph, no noise."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


@contextmanager
def detached_and_quiet() -> Iterator[None]:
    """Around `vmap` of `grad`: results carry no graph, and a slow batching rule is no cause for alarm."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop", category=UserWarning)
        yield


def places(module: nn.Module) -> dict[str, nn.Parameter]:
    """Every place a parameter is held in, by name: a tied parameter has several, a module met twice counts once."""
    return {
        f"{prefix}.{name}" if prefix else name: parameter
        for prefix, part in module.named_modules()
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False)
    }


def call_with(
    module: nn.Module, values: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a module with other values in some of its `places`.

    PyTorch's own tying would swap a module that is met under two names twice, and leave the second value behind.
    """
    return functional_call(module, dict(values), args, kwargs, tie_weights=False)
