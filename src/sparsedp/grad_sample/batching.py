"""Rules for operators that PyTorch does not vectorise: recurrent layers and cells, bags, fused attention.

A rule is given all examples' operands and computes below vmap, so it is part of what keeps examples apart: tests
compare each with single examples. Recurrent layers run step by step, so each step leaves ordinary nodes for the grad
samplers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import _add_batch_dim
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch._functorch.vmap import unwrap_batched

_LIBRARY: Any = torch.library.Library("aten", "IMPL")

Rule = Callable[..., Tensor | tuple[Tensor, ...]]
"""From the number of examples, the operands' axes of examples and the operands to results with the examples first."""


def batching_rule(*names: str) -> Callable[[Callable[..., Rule]], Callable[..., Rule]]:
    """Register what a rule makes of the operands below the vectorised level."""

    def register(make: Callable[..., Rule]) -> Callable[..., Rule]:
        for name in names:
            _LIBRARY.impl(name, _kernel(make(name)), "FuncTorchBatched", with_keyset=True)
        return make

    return register


def _kernel(rule: Rule) -> Callable[..., Any]:
    below_vmap = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchBatched)

    def kernel(keys: Any, *operands: Any, attn_mask: Tensor | None = None, scale: float | None = None) -> Any:
        interpreter: Any = retrieve_current_functorch_interpreter()
        level, count = interpreter.level(), interpreter.batch_size()
        if rule.__name__ == "attention":  # its schema has a tensor that is given by name alone
            operands = (*operands, *[0.0, False][len(operands) - 3 :], attn_mask, scale)
        whole, axes = unwrap_batched(operands, level)
        with torch._C._ExcludeDispatchKeyGuard(below_vmap):
            found = rule(count, axes, *whole)
        if isinstance(found, Tensor):
            return _add_batch_dim(found, 0, level)
        return tuple(_add_batch_dim(result, 0, level) for result in found)

    return kernel


def _to_front(operand: Any, axis: Any, count: int) -> Any:
    if isinstance(operand, Tensor):
        return operand.expand(count, *operand.shape) if axis is None else operand.movedim(axis, 0)
    return tuple(_to_front(one, a, count) for one, a in zip(operand, axis, strict=True))


@batching_rule("embedding_bag.padding_idx", "embedding_bag")
def _bags(name: str) -> Rule:
    def rule(count: int, axes: Any, *operands: Any) -> Any:
        weight, indices, offsets, *given = operands
        settings = given + [False, 0, False, None, False, None][len(given) :]
        mode, weights, include_last, padding = (settings[place] for place in (1, 3, 4, 5))
        indices = _to_front(indices, axes[1], count)
        bags = len(offsets) - include_last if axes[2] is None else 0
        length = indices.shape[1] // max(bags, 1)
        even = bags and bool((offsets.diff() == length).all()) and length * bags == indices.shape[1]
        if not even or mode == 2:
            raise RuntimeError(
                "embedding_bag: bags of different lengths, or their largest, cannot be vectorised"
            )
        own = None if weights is None else _to_front(weights, axes[6], count).reshape(count, bags, length)
        table = indices.reshape(count, bags, length)
        kept = None if padding is None or padding < 0 else (table != padding).unsqueeze(-1)
        if axes[0] is not None:  # every example has a table of its own
            weight = _to_front(weight, axes[0], count)
            table = table + (torch.arange(count, device=table.device) * weight.shape[1]).view(-1, 1, 1)
            weight = weight.flatten(0, 1)
        vectors = F.embedding(table, weight)
        if own is not None:
            vectors = vectors * own.unsqueeze(-1)
        if kept is None:
            found = vectors.mean(-2) if mode == 1 else vectors.sum(-2)
        else:
            found = vectors.masked_fill(~kept, 0.0).sum(-2)
            found = found / kept.sum(-2).clamp(min=1) if mode == 1 else found
        unused = found.new_empty(count, 0)
        return found, unused, unused, unused

    return rule


@batching_rule("bincount", "repeat_interleave.Tensor", "_pack_padded_sequence")
def _refused(name: str) -> Rule:
    """PyTorch would run these in a loop, and fail in the step where examples come out in different sizes."""

    def rule(count: int, axes: Any, *operands: Any) -> Any:
        raise RuntimeError(f"the shape of what {name.split('.')[0]} gives depends on the example's values")

    return rule


@batching_rule("_scaled_dot_product_flash_attention_for_cpu")
def _attention(name: str) -> Rule:
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def attention(count: int, axes: Any, *operands: Any) -> tuple[Tensor, ...]:
        """Fused attention attends inside each entry of its first axis, so examples go there."""
        dropout, causal, mask, scale = operands[3:]
        query, *others = (
            _to_front(one, axis, count) for one, axis in zip(operands[:3], axes[:3], strict=True)
        )
        if mask is not None:
            mask = _to_front(mask, axes[5], count)
            mask = mask.reshape(count, *[1] * (query.dim() - mask.dim()), *mask.shape[1:])
            mask = mask.expand(*query.shape[:2], *mask.shape[2:]).flatten(0, 1)
        parts = (one.flatten(0, 1) for one in (query, *others))
        found = fused(*parts, dropout, causal, attn_mask=mask, scale=scale)
        return tuple(one.reshape(*query.shape[:2], *one.shape[1:]) for one in found)

    return attention


def _linear(data: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`, also where every example has a weight of its own."""
    if weight.dim() == 2:
        return F.linear(data, weight, bias)
    found = (data.flatten(1, -2) @ weight.mT).reshape(*data.shape[:-1], -1)
    return found if bias is None else found + bias.view(len(bias), *[1] * (found.dim() - 2), -1)


States = tuple[Tensor, ...]
Cell = Callable[[Tensor, States, Sequence[Tensor | None]], States]
"""From what came in from the input, the states before and the state's weight and bias to the states after."""


def _lstm_cell(gates: Tensor, states: States, weights: Sequence[Any]) -> States:
    hidden, cell = states
    i, f, g, o = (gates + _linear(hidden, *weights)).chunk(4, -1)
    cell = torch.addcmul(torch.sigmoid(f) * cell, torch.sigmoid(i), torch.tanh(g))
    return torch.sigmoid(o) * torch.tanh(cell), cell


def _gru_cell(gates: Tensor, states: States, weights: Sequence[Any]) -> States:
    r, z, n = gates.chunk(3, -1)
    of_r, of_z, of_n = _linear(states[0], *weights).chunk(3, -1)
    new = torch.tanh(n + torch.sigmoid(r + of_r) * of_n)
    return (new + torch.sigmoid(z + of_z) * (states[0] - new),)


def _rnn_cell(
    squash: Callable[[Tensor], Tensor], gates: Tensor, states: States, weights: Sequence[Any]
) -> States:
    return (squash(gates + _linear(states[0], *weights)),)


_CELLS: dict[str, Cell] = {
    "lstm": _lstm_cell,
    "gru": _gru_cell,
    "rnn_tanh": functools.partial(_rnn_cell, torch.tanh),
    "rnn_relu": functools.partial(_rnn_cell, torch.relu),
}


def _run_layers(
    cell: Cell, data: Tensor, start: Sequence[States], parameters: Sequence[Tensor], *settings: Any
) -> tuple[Tensor, list[States]]:
    """Run recurrent layers step by step over [..., t, f]: outputs [..., t, width], and every layer's last states."""
    biased, layers, dropout, train, both_ways = settings
    directions = 1 + both_ways
    each = len(parameters) // (layers * directions)
    last: list[States] = []
    for layer in range(layers):
        if layer and dropout:
            data = torch.dropout(data, dropout, train)
        found = []
        for direction in range(directions):
            of_input, of_state, *more = parameters[len(last) * each : (len(last) + 1) * each]
            biases, projection = (more[:2], more[2:]) if biased else ([None, None], more)
            steps = _linear(data, of_input, biases[0]).unbind(-2)
            states, outputs = start[len(last)], []
            for gates in reversed(steps) if direction else steps:
                states = cell(gates, states, (of_state, biases[1]))
                if projection:
                    states = (_linear(states[0], projection[0], None), *states[1:])
                outputs.append(states[0])
            found.append(torch.stack(outputs[::-1] if direction else outputs, -2))
            last.append(states)
        data = found[0] if len(found) == 1 else torch.cat(found, -1)
    return data, last


@batching_rule("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input")
def _recurrent(name: str) -> Rule:
    cell = _CELLS[name.split(".")[0]]

    def rule(count: int, axes: Any, data: Tensor, start: Any, parameters: Any, *settings: Any) -> Any:
        *settings, batch_first = settings  # type: ignore[assignment]
        data = _to_front(data, axes[0], count)
        data = data if batch_first else data.transpose(1, 2)
        states = [start] if isinstance(start, Tensor) else start
        states = _to_front(states, [axes[1]] if isinstance(start, Tensor) else axes[1], count)
        start = list(zip(*(state.unbind(1) for state in states), strict=True))
        shared = all(axis is None for axis in axes[2])
        inner = data.shape[1]
        if shared:  # rows of one axis, for plain matrix products
            data, start = data.flatten(0, 1), [tuple(s.flatten(0, 1) for s in layer) for layer in start]
        else:
            parameters = _to_front(parameters, axes[2], count)
        found, last = _run_layers(cell, data, start, parameters, *settings)
        if shared:
            found = found.reshape(count, inner, *found.shape[1:])
            last = [tuple(s.reshape(count, inner, *s.shape[1:]) for s in layer) for layer in last]
        ends = [torch.stack(layers, 1) for layers in zip(*last, strict=True)]
        return (found if batch_first else found.transpose(1, 2), *ends)

    return rule


@batching_rule("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def _one_step(name: str) -> Rule:
    cell = _CELLS[name.removesuffix("_cell")]

    def rule(count: int, axes: Any, data: Tensor, start: Any, *weights: Any) -> Any:
        data, states = _to_front(data, axes[0], count), _to_front(start, axes[1], count)
        axes = axes[2:]
        if any(axis is not None for axis in axes):
            pairs = zip(weights, axes, strict=True)
            weights = tuple(None if w is None else _to_front(w, axis, count) for w, axis in pairs)
        of_input, of_state, b_input, b_state = (*weights, None, None)[:4]
        states = (states,) if isinstance(start, Tensor) else states
        found = cell(_linear(data, of_input, b_input), states, (of_state, b_state))
        return found[0] if isinstance(start, Tensor) else found

    return rule
