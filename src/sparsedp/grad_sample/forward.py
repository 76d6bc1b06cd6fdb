"""One forward pass with its graph, and whether its samples are where they should be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import Node

from sparsedp.grad_sample.graph import CannotBookError, Claims, Graph, Leaf, claims
from sparsedp.grad_sample.layers.shared import Use
from sparsedp.grad_sample.reading import Reading
from sparsedp.grad_sample.rowaxis import RowAxis
from sparsedp.grad_sample.tape import Call, Tape, output_gradients


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """The recorded calls, the losses, their graph, and what of it the calls account for. Private."""

    tape: Tape
    losses: Tensor
    graph: Graph
    claims: Claims

    @classmethod
    def of(cls, tape: Tape, losses: Tensor, leaves: Mapping[Node, Leaf], thorough: bool) -> Forward:
        """Look at what a forward pass left behind."""
        graph = tape.graph(losses, thorough)
        return cls(tape, losses, graph, claims(graph, [call.ends for call in tape.calls], leaves))

    @property
    def samples(self) -> int:
        """The number of rows."""
        return self.losses.shape[0]

    def uses(self, reading: Reading) -> list[Use]:
        """The uses of parameters outside recorded calls, if this forward has the form they were read from.

        Raises:
            CannotBookError: it has not.
        """
        if self.claims.unfit:
            layer, reason = next(iter(self.claims.unfit.items()))
            raise CannotBookError(f"layer {layer!r}: {reason}, which it did not at first")
        if not reading.meetings:
            if self.claims.outside:
                raise CannotBookError("a parameter is used outside its layer, which it was not at first")
            return []
        if not reading.fits(self.graph, self.claims):
            raise CannotBookError("what the model computes depends on the rows it is given")
        uses = [Use.of(self.graph, meeting) for meeting in reading.meetings]
        for use in uses:
            use.check_rows(self.samples)
        return uses


def calls_not_by_row(two: Sequence[Call], three: Sequence[Call]) -> dict[str, str]:
    """Layers some call of which does not have the samples on the first axis of its input and output.

    Raises:
        CannotBookError: other layers are called for two rows than for three.
    """
    if [call.name for call in two] != [call.name for call in three]:
        raise CannotBookError("which layers are called depends on the number of rows")
    found = {}
    for small, large in zip(two, three, strict=True):
        if small.edge is None or large.edge is None:
            continue
        for a, b in zip(small.shapes, large.shapes, strict=True):
            if a[:1] != (2,) or b[:1] != (3,) or a[1:] != b[1:]:
                found[large.name] = f"it was given {b} for 3 rows"
    return found


def check_samples_apart(losses: Tensor, calls: Sequence[Call], uses: Sequence[Use]) -> None:
    """The loss of one sample may have a gradient only where that sample was found to lie.

    Raises:
        CannotBookError: it has one elsewhere, so samples are mixed, or in another order.
    """
    outputs = [(call.name, RowAxis(0)) for call in calls if call.edge is not None]
    outputs += [(use.node.name(), rows) for use in uses for _, rows in use.meeting.outputs]
    samples = losses.shape[0]
    for sample in range(samples):
        start = torch.zeros_like(losses)
        start[sample] = 1
        found = output_gradients(losses, start, calls, uses, keep_graph=True)
        for (name, rows), gradient in zip(outputs, found, strict=True):
            if gradient is None:
                continue
            by_sample = rows.to_front(gradient, samples)
            others = torch.cat([by_sample[:sample], by_sample[sample + 1 :]])
            if bool((others.isfinite() & (others != 0)).any()):
                raise CannotBookError(f"the samples are mixed, or lie in another order, in {name!r}")
