"""Cells run along their steps without a graph, and back: what every step's gates get as gradient.

What does not depend on the step before is computed for all steps at once. Rows are packed (see `Steps`); a state is
[n, width], and a step works on its first rows: those that take part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sparsedp.grad_sample.recurrent.steps import Steps

_sigmoid_slope = torch.ops.aten.sigmoid_backward
_tanh_slope = torch.ops.aten.tanh_backward
States = tuple[Tensor, ...]
"""Hidden states, and the cells' where there are any."""


class WayBack(Protocol):
    """What a cell that was run needs to go back. Private.

    It does not hold what it gave out: the graph that leads there holds the run.
    """

    def gradients(self, outputs: Tensor, last: States) -> tuple[Tensor, Tensor, States]:
        """Of what came in from the input [s, gates], of what came in from the state before, of the first states.

        `last` may be overwritten.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Ran:
    """What came out of a cell, the hidden state each step began with [s, width], and the way back. Private."""

    outputs: Tensor
    last: States
    before: Tensor
    run: WayBack


class _Walk:
    """The steps of a run in their order."""

    def __init__(self, steps: Steps, *, backwards: bool) -> None:
        self._sizes = list(steps.sizes)
        self._order = range(len(self._sizes))[:: -1 if backwards else 1]

    def along(self, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
        """The parts of packed tensors, one step after the other."""
        parts = list(zip(*(torch.split(tensor, self._sizes) for tensor in tensors), strict=True))
        return [parts[step] for step in self._order]

    def back(self, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
        """The same from the last step to the first."""
        return self.along(*tensors)[::-1]


class LstmRun:
    """i, f, g, o = gates; c' = f c + i g; h' = o tanh(c')."""

    def __init__(self, gates: Tensor, weight: Tensor, walk: _Walk) -> None:
        self._gates, self._weight, self._walk = gates, weight, walk
        self._cells_before, self._squashed = (gates.new_empty(len(gates), weight.shape[1]) for _ in "12")

    @classmethod
    def of(
        cls, gates: Tensor, start: States, weight: Tensor, bias: Tensor | None, steps: Steps, backwards: bool
    ) -> Ran:
        """Run it on what came in from the input, which is overwritten."""
        run = cls(gates if bias is None else gates.add_(bias), weight, _Walk(steps, backwards=backwards))
        hidden, cells = (state.clone() for state in start)
        width = hidden.shape[1]
        outputs, all_before = gates.new_empty(*steps.shape, width), gates.new_empty(len(gates), width)
        for now, before, cell_before, squashed, output in run._walk.along(
            gates, all_before, run._cells_before, run._squashed, outputs.view(-1, width)
        ):
            h, c = hidden[: len(now)], cells[: len(now)]
            cell_before.copy_(c)
            now.addmm_(before.copy_(h), weight.T)
            i_and_f, g, o = torch.split(now, [2 * width, width, width], 1)
            i_and_f.sigmoid_()
            c.mul_(i_and_f[:, width:]).addcmul_(i_and_f[:, :width], g.tanh_())
            h.copy_(torch.mul(o.sigmoid_(), torch.tanh(c, out=squashed), out=output))
        return Ran(outputs, (hidden, cells), all_before, run)

    def gradients(self, outputs: Tensor, last: States) -> tuple[Tensor, Tensor, States]:
        """The gates' are the slopes of the gates times the gradient of the cell, or of the output for o."""
        hidden, cells = last
        i, f, g, o = _by_gate(self._gates, 4).unbind(1)
        found = torch.empty_like(self._gates)
        slopes = _by_gate(found, 4)
        _sigmoid_slope(g, i, grad_input=slopes[:, 0])
        _sigmoid_slope(self._cells_before, f, grad_input=slopes[:, 1])
        _tanh_slope(i, g, grad_input=slopes[:, 2])
        _sigmoid_slope(self._squashed, o, grad_input=slopes[:, 3])
        to_cell = _tanh_slope(o, self._squashed)
        for now, slope, cell_slope, forget, output in self._walk.back(found, slopes, to_cell, f, outputs):
            h, c = hidden[: len(now)].add_(output), cells[: len(now)]
            c.addcmul_(h, cell_slope)
            slope[:, :3].mul_(c.unsqueeze(1))
            slope[:, 3].mul_(h)
            c.mul_(forget)
            torch.mm(now, self._weight, out=h)
        return found, found, (hidden, cells)


class GruRun:
    """r, z from both; n = tanh(input + r (W h + b)); h' = n + z (h - n)."""

    def __init__(self, gates: Tensor, weight: Tensor, walk: _Walk) -> None:
        self._gates, self._weight, self._walk = gates, weight, walk
        self._before, self._came = gates.new_empty(len(gates), weight.shape[1]), torch.empty_like(gates)

    @classmethod
    def of(
        cls, gates: Tensor, start: States, weight: Tensor, bias: Tensor | None, steps: Steps, backwards: bool
    ) -> Ran:
        """Run it on what came in from the input, which is overwritten."""
        run = cls(gates, weight, _Walk(steps, backwards=backwards))
        hidden = start[0].clone()
        width = hidden.shape[1]
        outputs = gates.new_empty(*steps.shape, width)
        for now, before, came, output in run._walk.along(
            gates, run._before, run._came, outputs.view(-1, width)
        ):
            h = hidden[: len(now)]
            torch.mm(before.copy_(h), weight.T, out=came)
            if bias is not None:
                came.add_(bias)
            r_and_z, n = torch.split(now, [2 * width, width], 1)
            r_and_z.add_(came[:, : 2 * width]).sigmoid_()
            n.addcmul_(r_and_z[:, :width], came[:, 2 * width :]).tanh_()
            h.copy_(torch.lerp(n, before, r_and_z[:, width:], out=output))
        return Ran(outputs, (hidden,), run._before, run)

    def gradients(self, outputs: Tensor, last: States) -> tuple[Tensor, Tensor, States]:
        """Both sides get the same, but for n, which the state before reaches through r."""
        hidden = last[0]
        r, z, n = _by_gate(self._gates, 3).unbind(1)
        to_n = _tanh_slope(1 - z, n)
        found, taken = torch.empty_like(self._gates), torch.empty_like(to_n)
        slopes = _by_gate(found, 3)
        _sigmoid_slope(to_n * _by_gate(self._came, 3)[:, 2], r, grad_input=slopes[:, 0])
        _sigmoid_slope(self._before - n, z, grad_input=slopes[:, 1])
        torch.mul(to_n, r, out=slopes[:, 2])
        for now, slope, keeps, takes, output in self._walk.back(found, slopes, z, taken, outputs):
            h = hidden[: len(now)].add_(output)
            slope.mul_(takes.copy_(h).unsqueeze(1))
            h.mul_(keeps).addmm_(now, self._weight)
        from_input = found.clone()
        torch.mul(to_n, taken, out=_by_gate(from_input, 3)[:, 2])
        return from_input, found, (hidden,)


class RnnRun:
    """h' = tanh(gates), or relu."""

    def __init__(self, reached: Tensor, weight: Tensor, walk: _Walk, relu: bool) -> None:
        self._reached, self._weight, self._walk, self._relu = reached, weight, walk, relu

    @classmethod
    def of(
        cls,
        gates: Tensor,
        start: States,
        weight: Tensor,
        bias: Tensor | None,
        steps: Steps,
        backwards: bool,
        relu: bool = False,
    ) -> Ran:
        """Run it on what came in from the input, which is overwritten."""
        walk = _Walk(steps, backwards=backwards)
        run = cls(gates if bias is None else gates.add_(bias), weight, walk, relu)
        hidden, all_before = start[0].clone(), torch.empty_like(gates)
        for now, before in walk.along(gates, all_before):
            h = hidden[: len(now)]
            now.addmm_(before.copy_(h), weight.T)
            h.copy_(now.relu_() if relu else now.tanh_())
        outputs = gates.new_empty(*steps.shape, gates.shape[1])
        outputs.view(-1, gates.shape[1]).copy_(gates)
        return Ran(outputs, (hidden,), all_before, run)

    def gradients(self, outputs: Tensor, last: States) -> tuple[Tensor, Tensor, States]:
        """The slope of the squashing times the gradient of the output."""
        hidden, reached = last[0], self._reached
        found = (reached > 0).to(reached.dtype) if self._relu else 1 - reached * reached
        for now, output in self._walk.back(found, outputs):
            h = hidden[: len(now)].add_(output)
            torch.mm(now.mul_(h), self._weight, out=h)
        return found, found, (hidden,)


def _by_gate(gates: Tensor, count: int) -> Tensor:
    return gates.view(len(gates), count, -1)


RunCell = Callable[[Tensor, States, Tensor, Tensor | None, Steps, bool], Ran]
