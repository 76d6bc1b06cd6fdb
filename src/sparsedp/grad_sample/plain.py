"""A model's forward as ordinary eager operations: nothing fused or compiled that hides what a parameter does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from sparsedp.grad_sample.recurrent.follow import followed_recurrence
from sparsedp.grad_sample.wide_products import quick_forward


@contextmanager
def plain_forward(model: nn.Module) -> Iterator[None]:
    """Within this context recurrent layers can be followed, compiled models run as written, wide inputs quicker."""
    parts = list(model.modules())
    with ExitStack() as stack:
        stack.enter_context(followed_recurrence(parts))
        stack.enter_context(quick_forward(parts))
        if any(map(_is_compiled, parts)):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _is_compiled(part: nn.Module) -> bool:
    """Whether it came out of `torch.compile` or was compiled in place."""
    return part._compiled_call_impl is not None or type(part).__name__ == "OptimizedModule"
