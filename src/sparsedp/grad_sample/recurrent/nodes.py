"""What a recurrent layer leaves in the graph: two projections and one recurrence for each layer and direction.

With h_t the state before step t, a cell's gates are W x_t + V h_t. Once all states are known, V's gradient is that of
one product over all steps: the sum of the gates' gradients times h_t. So the states enter the second projection as
constants, and the recurrence answers for all that goes from step to step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from sparsedp.grad_sample.graph import CannotBookError
from sparsedp.grad_sample.recurrent.cells import WayBack
from sparsedp.grad_sample.recurrent.steps import Steps


class Projection(torch.autograd.Function):
    """x W^T + b at every step, [t, n, f] to [t, n, gates]. Its value is made elsewhere, and not read from here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Something of the right shape."""
        ctx.save_for_backward(x, weight)
        return x.new_zeros(()).expand(*x.shape[:2], len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The input's; those of what the samples share only when asked by itself, as no backward pass needs them."""
        _refuse_to_be_differentiated()
        x, weight = ctx.saved_tensors
        to_x = gradient @ weight if ctx.needs_input_grad[0] else None
        if torch._C._current_graph_task_id() >= 0:
            return to_x, None, None
        return to_x, gradient.flatten(0, 1).T @ x.flatten(0, 1), gradient.sum((0, 1))


class Recurrence(torch.autograd.Function):
    """A cell's outputs and last states from its projections and first states."""

    @staticmethod
    def forward(ctx: Any, from_input: Tensor, from_state: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        """What was found when the cell was run; `rest` are its first states, what came out, and its steps."""
        *_, ran, steps = rest
        ctx.run, ctx.steps = ran.run, steps
        return ran.outputs, *ran.last

    @staticmethod
    def backward(ctx: Any, outputs: Tensor, *last: Tensor) -> tuple[Tensor | None, ...]:
        """One walk back."""
        _refuse_to_be_differentiated()
        run: WayBack = ctx.run
        steps: Steps = ctx.steps
        states = tuple(state.clone() for state in last)
        from_input, from_state, first = run.gradients(steps.rows(outputs), states)
        spread = steps.by_sample(from_input)
        same = spread if from_state is from_input else steps.by_sample(from_state)
        return spread, same, *first, None, None


def _refuse_to_be_differentiated() -> None:
    """Called from a backward pass: refuse one that is recorded for another, as what is done here leaves no graph."""
    if torch.is_grad_enabled():
        raise CannotBookError("a gradient is taken inside the loss through a recurrent layer")


_OURS = (Projection._backward_cls, Recurrence._backward_cls)


def is_ours(node: Node) -> bool:
    """Whether a backward written in Python is one of these."""
    return isinstance(node, _OURS)


def input_of(node: Node) -> Tensor:
    """What a projection was given, unless it was modified since, which is an error."""
    saved: tuple[Tensor, ...] = node.saved_tensors  # type: ignore[attr-defined]
    return saved[0]
