"""Recurrent layers as the fast engine runs them: all steps without a graph, then a few nodes for what they did."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from sparsedp.grad_sample.recurrent.cells import GruRun, LstmRun, RnnRun, RunCell, States
from sparsedp.grad_sample.recurrent.nodes import Projection, Recurrence
from sparsedp.grad_sample.recurrent.steps import Steps, packed_rows

_CELLS: dict[Any, RunCell] = {
    torch.lstm: LstmRun.of,
    torch.gru: GruRun.of,
    torch.rnn_tanh: RnnRun.of,
    torch.rnn_relu: functools.partial(RnnRun.of, relu=True),
}


@contextmanager
def followed_recurrence(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Within this context the recurrent layers among `parts` leave a graph that can be followed, of any lengths."""
    layers = [part for part in parts if isinstance(part, nn.RNNBase) and "forward" not in vars(part)]
    if not layers:
        yield
        return
    followed = _Followed()
    for layer in layers:
        vars(layer)["forward"] = functools.partial(followed.call, layer)
    try:
        with followed:
            yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]


@final
class _Followed(TorchFunctionMode):
    """Takes the place of PyTorch's recurrent operations, and of its unpacking, whose graph depends on the lengths."""

    def __init__(self) -> None:
        super().__init__()
        self._order: Tensor | None = None

    def call(self, layer: nn.RNNBase, *args: Any, **kwargs: Any) -> Any:
        """A layer's own forward; where it is given packed rows, it is known whose they are."""
        given = next(iter((*args, *kwargs.values())), None)
        self._order = given.sorted_indices if isinstance(given, PackedSequence) else None
        return type(layer).forward(layer, *args, **kwargs)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch._VF._pad_packed_sequence:
            return _unpacked(*args, **(kwargs or {}))
        if func not in _CELLS or not torch.is_grad_enabled():
            return func(*args, **(kwargs or {}))
        packed = isinstance(args[1], Tensor) and isinstance(args[2], tuple | Tensor)
        data, *sizes = args[: 1 + packed]
        start, weights, biased, _, dropout, training, both_ways, *batch_first = args[1 + packed :]
        start = (start,) if isinstance(start, Tensor) else tuple(start)
        if not any(tensor.requires_grad for tensor in (data, *start, *weights)):
            return func(*args)
        if not _is_plain(data, start, weights, 4 if biased else 2):
            return _step_by_step(func, args)
        turned = bool(batch_first and batch_first[0])
        data = data.transpose(0, 1) if turned else data
        steps = Steps.of_packed(sizes[0], self._order) if packed else Steps((data.shape[1],) * len(data))
        dropped = functools.partial(torch.dropout, p=dropout, train=training)
        stack = _Stack(_CELLS[func], weights, 4 if biased else 2, 1 + both_ways)
        outputs, *last = stack.run(data, start, steps, dropped if dropout else None)
        return (outputs.transpose(0, 1) if turned else outputs, *last)


@final
class _Stack:
    """Layers on top of each other, each in one direction or both; weights in PyTorch's order."""

    def __init__(self, cell: RunCell, weights: Sequence[Tensor], each: int, directions: int) -> None:
        self._cell, self._directions = cell, directions
        self._weights = [weights[first : first + each] for first in range(0, len(weights), each)]

    def run(
        self, data: Tensor, start: States, steps: Steps, dropped: Callable[[Tensor], Tensor] | None
    ) -> tuple[Tensor, ...]:
        """The last layer's outputs, and the last states of all."""
        last: list[States] = []
        while len(last) < len(self._weights):
            if last and dropped is not None:
                data = dropped(data)
            found = []
            for direction in range(self._directions):
                first = tuple(state[len(last)] for state in start)
                outputs, *states = self._one(data, first, self._weights[len(last)], steps, direction == 1)
                found.append(outputs)
                last.append(tuple(states))
            data = found[0] if len(found) == 1 else torch.cat(found, -1)
        return (data, *(torch.stack(states) for states in zip(*last, strict=True)))

    def _one(
        self, data: Tensor, start: States, weights: Sequence[Tensor], steps: Steps, backwards: bool
    ) -> tuple[Tensor, ...]:
        of_input, of_state, *biases = weights
        of_input_bias, of_state_bias = biases or (None, None)
        with torch.no_grad():
            gates = torch.nn.functional.linear(steps.rows(data), of_input, of_input_bias)
            first = tuple(state.detach() for state in start)
            ran = self._cell(gates, first, of_state.detach(), of_state_bias, steps, backwards)
        project: Callable[..., Tensor] = Projection.apply
        recur: Callable[..., tuple[Tensor, ...]] = Recurrence.apply
        from_input = project(steps.by_sample(data), of_input, of_input_bias)
        from_state = project(steps.by_sample(ran.before), of_state, of_state_bias)
        return recur(from_input, from_state, *start, ran, steps)


def _is_plain(data: Tensor, start: States, weights: Sequence[Tensor], each: int) -> bool:
    """One dtype, no autocast, no projection of the states, and something to work on."""
    alike = len({(tensor.dtype, tensor.device) for tensor in (data, *start, *weights)}) == 1
    width = weights[1].shape[1]
    projected = len(weights) % each != 0 or any(state.shape[-1] != width for state in start)
    return alike and not projected and data.numel() > 0 and not torch.is_autocast_enabled(data.device.type)


def _step_by_step(func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """PyTorch's own, without the libraries that compute a whole sequence in one opaque operation."""
    fused = torch._C._get_mkldnn_enabled()
    with torch.backends.cudnn.flags(enabled=False):
        torch._C._set_mkldnn_enabled(False)
        try:
            return func(*args)
        finally:
            torch._C._set_mkldnn_enabled(fused)


def _unpacked(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, value: float, total: int
) -> tuple[Tensor, Tensor]:
    """`_pad_packed_sequence` with the same graph for any lengths."""
    step, row = packed_rows(batch_sizes)
    length, samples = max(len(batch_sizes), total), int(batch_sizes[0])
    room = data.new_full((length * samples, *data.shape[1:]), value)
    padded = room.index_copy(0, (step * samples + row).to(data.device), data)
    padded = padded.view(length, samples, *data.shape[1:])
    lengths = (batch_sizes.unsqueeze(1) > torch.arange(samples)).sum(0)
    return padded.transpose(0, 1) if batch_first else padded, lengths
