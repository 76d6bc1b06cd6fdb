"""Recurrent layers and cells one example at a time, vectorised: PyTorch has no batching rules for them.

They run step by step, so each step leaves ordinary nodes for the grad samplers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsedp.grad_sample.isolation import Rule, batching_rule, to_front


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
    cell: Cell,
    data: Tensor,
    start: Sequence[States],
    parameters: Sequence[Tensor],
    biased: bool,
    layers: int,
    dropout: float,
    train: bool,
    both_ways: bool,
) -> tuple[Tensor, list[States]]:
    """Run recurrent layers step by step over [..., t, f]: outputs [..., t, width], and every layer's last states."""
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
        data = to_front(data, axes[0], count)
        data = data if batch_first else data.transpose(1, 2)
        states = (
            to_front([start], [axes[1]], count)
            if isinstance(start, Tensor)
            else to_front(start, axes[1], count)
        )
        start = list(zip(*(state.unbind(1) for state in states), strict=True))
        shared = all(axis is None for axis in axes[2])
        inner = data.shape[1]
        if shared:  # rows of one axis, for plain matrix products
            data, start = data.flatten(0, 1), [tuple(s.flatten(0, 1) for s in layer) for layer in start]
        else:
            parameters = to_front(parameters, axes[2], count)
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
        data, states = to_front(data, axes[0], count), to_front(start, axes[1], count)
        axes = axes[2:]
        if any(axis is not None for axis in axes):
            pairs = zip(weights, axes, strict=True)
            weights = tuple(None if w is None else to_front(w, axis, count) for w, axis in pairs)
        of_input, of_state, b_input, b_state = (*weights, None, None)[:4]
        found = cell(
            _linear(data, of_input, b_input),
            (states,) if isinstance(start, Tensor) else states,
            (of_state, b_state),
        )
        return found[0] if isinstance(start, Tensor) else found

    return rule
