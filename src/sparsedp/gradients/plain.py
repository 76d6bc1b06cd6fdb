"""A model's forward as ordinary eager operations: nothing fused or compiled that hides what a parameter does."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from sparsedp.gradients.wide_products import quick_forward


@contextmanager
def plain_forward(model: nn.Module) -> Iterator[None]:
    """Within this context recurrent layers run step by step, compiled models as written, wide inputs quicker."""
    parts = list(model.modules())
    recurrent = [part for part in parts if isinstance(part, nn.RNNBase) and "forward" not in vars(part)]
    for part in recurrent:
        vars(part)["forward"] = functools.partial(_step_by_step, part)
    try:
        with ExitStack() as stack:
            stack.enter_context(quick_forward(parts))
            if any(map(_is_compiled, parts)):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield
    finally:
        for part in recurrent:
            del vars(part)["forward"]


def _is_compiled(part: nn.Module) -> bool:
    """Whether it came out of `torch.compile` or was compiled in place."""
    return part._compiled_call_impl is not None or type(part).__name__ == "OptimizedModule"


def _step_by_step(layer: nn.RNNBase, *args: Any, **kwargs: Any) -> Any:
    """The layer's own forward, without the libraries that compute a whole sequence in one opaque operation."""
    fused = torch._C._get_mkldnn_enabled()
    with ExitStack() as stack:
        if layer.weight_ih_l0.device.type == "cuda":
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        torch._C._set_mkldnn_enabled(False)
        try:
            return type(layer).forward(layer, *args, **kwargs)
        finally:
            torch._C._set_mkldnn_enabled(fused)
