"""Code of the user's that runs in the backward pass: hooks and custom functions, which may look at all rows at once.

The fast engine's formulas never see it, or it sees a whole chunk. So it is found, and the model then goes row by row
through plain autograd, where one row's backward has nothing of another's to look at.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.nn.modules import module as torch_module

from sparsedp.errors import ModelError

_GLOBAL = [f"_global_{when}_hooks" for when in ("forward", "forward_pre", "backward", "backward_pre")]


def standing_hooks(model: nn.Module) -> str | None:
    """What stands between a model and the engines' own backward passes, in words; None where nothing does.

    Raises:
        ModelError: a hook that runs after gradients were accumulated, which private training never does.
    """
    for name in _GLOBAL:
        if getattr(torch_module, name):
            return "hooks are registered for all modules"
    for name, part in model.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            return f"module {name!r} has a backward hook"
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ModelError(
                f"parameter {name!r} has a hook that runs after its gradient was accumulated, but private training "
                "accumulates none; remove the hook"
            )
        if parameter.requires_grad and parameter._backward_hooks:
            return f"parameter {name!r} has a hook"
    return None


@contextmanager
def tensor_hooks_noted() -> Iterator[list[str]]:
    """The list fills as hooks are registered on tensors; the autograd graph itself keeps them out of sight."""
    noted: list[str] = []
    original: Callable[[Tensor, Any], Any] = Tensor.register_hook

    def register(tensor: Tensor, hook: Any) -> Any:
        noted.append("a hook is registered on a tensor in the forward pass")
        return original(tensor, hook)

    Tensor.register_hook = register  # type: ignore[method-assign]
    try:
        yield noted
    finally:
        Tensor.register_hook = original  # type: ignore[method-assign]


def custom_backward(nodes: Iterable[Node], node_hooks: bool) -> str | None:
    """A backward written in Python, or (if asked) a hook on a node, in words; None where there is none."""
    for node in nodes:
        if isinstance(node, BackwardCFunction):
            return f"its graph holds a backward of its own ({node.name()})"
        if node_hooks and node.next_functions and _has_node_hooks(node):
            return f"its graph has a hook on {node.name()}"
    return None


def _has_node_hooks(node: Node) -> bool:
    """The dictionary a new hook joins tells of those already there."""
    for register in (node.register_hook, node.register_prehook):
        handle = register(lambda *_: None)
        others = len(handle.hooks_dict_ref() or ()) > 1
        handle.remove()
        if others:
            return True
    return False


def refuse_inside_a_function(name: str) -> None:
    """Called from a layer's call: refuse one inside the forward of an `autograd.Function`, whose graph is hidden.

    There the gradient is off, and whether the function makes up for it in its backward cannot be seen. Reentrant
    checkpointing does, unless no input requires a gradient: then the layer is silently never trained.
    """
    if torch.is_grad_enabled():
        return
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and isinstance(frame.f_locals.get(code.co_varnames[0]), BackwardCFunction):
            raise ModelError(
                f"layer {name!r} is called inside an autograd.Function (reentrant checkpointing?), which hides its "
                "gradient; for checkpointing use checkpoint(..., use_reentrant=False)"
            )
        frame = frame.f_back  # type: ignore[assignment]
