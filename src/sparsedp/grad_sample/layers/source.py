"""What a layer family gives the engine: the per-sample gradients of one parameter, without forming them all."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from sparsedp.grad_sample.blocks import Block, Metric
from sparsedp.grad_sample.tape import Call
from sparsedp.grad_sample.workspace import Space


class Source(Protocol):
    """Per-sample gradients of one parameter's block over one chunk of samples. Private.

    Explicit gradients come in planes, [planes, samples, scalars], whatever order is cheapest to produce; `to_planes`
    and `from_planes` translate a tensor of the block's shape to [planes, scalars] and back.
    """

    @property
    def block_size(self) -> int:
        """Scalars per sample in explicit form."""
        ...

    def explicit(self, span: slice) -> Tensor:
        """The gradients of some samples, [planes, samples, scalars]; the caller may overwrite them."""
        ...

    def to_planes(self, block: Tensor) -> Tensor:
        """A block-shaped tensor in plane order."""
        ...

    def from_planes(self, planes: Tensor) -> Tensor:
        """A tensor in plane order back in block order (flat or shaped)."""
        ...


@runtime_checkable
class Closed(Protocol):
    """A source with formulas for its norms and sums, so that explicit gradients are not formed where they hold."""

    def holds(self, metric: Metric) -> bool:
        """Whether the formulas serve this metric and cost less than explicit gradients; by shapes alone."""
        ...

    def squared_norms(self, metric: Metric) -> Tensor:
        """Squared norms in the metric, one per sample.

        Not finite where the sample's gradient is not finite, or too extreme to measure in its dtype.
        """
        ...

    def add_weighted_sum(self, factors: Tensor, total: Tensor, metric: Metric) -> None:
        """Add the factor-weighted sum over samples of the raw gradients to a flat float64 total.

        A zero factor silences even a NaN. Where the metric has a centre, it will be subtracted: the sum must then be
        exact enough to survive the cancellation.
        """
        ...


@runtime_checkable
class Mergeable(Closed, Protocol):
    """A closed source that stays closed when a parameter's calls are joined and when samples are added up by unit."""

    def joined(self, others: Sequence[Any]) -> Mergeable:
        """With what the same parameter's other calls contribute, of the same kind."""
        ...

    def merged(self, units: Tensor | None, count: int) -> Mergeable:
        """By unit, given each sample's unit; as it is without units."""
        ...


@functools.cache
def is_closed(kind: type) -> bool:
    """Whether sources of this kind have formulas; asked once for a kind, as to look through a protocol takes long."""
    return issubclass(kind, Closed)


@functools.cache
def is_mergeable(kind: type) -> bool:
    """Whether sources of this kind keep their formulas when they are joined and added up by unit."""
    return issubclass(kind, Mergeable)


STRETCH = 1024
"""Scalars summed in float32 before the sum goes on in float64."""
MOST_SUMMED = 1024
"""Samples summed in float32 before the sum goes on in float64."""

AT_ONCE = 1 << 18
"""Scalars that are turned into float64 at a time."""

MakeSource = Callable[[Call, str, Block, Space], Source]


@dataclass(frozen=True, slots=True)
class Family:
    """A layer family: which parameters it has and how to get their per-sample gradients.

    `droppable_axes` says along how many leading axes of a parameter inactive slices can be left out.
    """

    parameters: frozenset[str]
    source: MakeSource
    droppable_axes: Callable[[torch.nn.Module, str], int]
    refuse: Callable[[torch.nn.Module], str | None]


def never(module: torch.nn.Module) -> str | None:
    """No configuration of the layer is refused."""
    return None


def no_axes(module: torch.nn.Module, parameter: str) -> int:
    """No slices of the layer's parameters can be left out."""
    return 0


def one_plane(block: Tensor) -> Tensor:
    """A block-shaped tensor as a single plane."""
    return block.reshape(1, -1)


def as_it_is(planes: Tensor) -> Tensor:
    """A single plane is already in block order."""
    return planes


@dataclass(frozen=True, slots=True, eq=False)
class Explicit:
    """Small parameters (biases, norm weights): the gradients themselves, [samples, *block shape]."""

    values: Tensor

    to_planes = staticmethod(one_plane)
    from_planes = staticmethod(as_it_is)

    @property
    def block_size(self) -> int:
        """Scalars per sample."""
        return self.values[0].numel()

    def explicit(self, span: slice) -> Tensor:
        """The gradients of some samples, never in half precision: norms, factors and sums are made of them."""
        return working(self.values[span]).reshape(1, -1, self.block_size).clone()


def silence(factors: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    """Zero the samples whose factor is zero, so that 0 * NaN cannot appear; free when there are none."""
    quiet = factors == 0
    if not bool(quiet.any()):
        return values
    return tuple(each.masked_fill(quiet.reshape(-1, *[1] * (each.dim() - 1)), 0) for each in values)


def squared_norms_of(rows: Tensor) -> Tensor:
    """Squared norms along the last axis, in float64.

    Long float32 sums fall short of the truth by more than the clip's margin, so only short stretches are summed so.
    """
    stretches = rows.shape[-1] // STRETCH
    if not stretches:
        alone: Tensor = torch.linalg.vector_norm(rows, dim=-1).double().square()
        return alone
    whole = stretches * STRETCH
    tail = torch.linalg.vector_norm(rows[..., whole:], dim=-1)
    head = torch.linalg.vector_norm(rows[..., :whole].reshape(*rows.shape[:-1], stretches, STRETCH), dim=-1)
    squared: Tensor = head.double().square().sum(-1) + tail.double().square()
    return squared


def add_to(total: Tensor, values: Tensor) -> None:
    """Add to a flat total, a few values at a time: PyTorch copies narrow ones in the total's type first."""
    pairs = zip(torch.split(total, AT_ONCE), torch.split(values.reshape(-1), AT_ONCE), strict=True)
    for part, more in pairs:
        part += more


def in_block_order(source: Source, span: slice) -> Tensor:
    """Explicit gradients as one plane in the block's own order."""
    planes = source.explicit(span)
    if planes.shape[0] == 1:
        return planes
    rows = [source.from_planes(planes[:, i]).reshape(-1) for i in range(planes.shape[1])]
    return torch.stack(rows).unsqueeze(0)


def keep(tensor: Tensor, axis: int, indices: Tensor | None) -> Tensor:
    """Some slices along an axis (None: all): a view where they stand side by side, else a copy."""
    if indices is None:
        return tensor
    first, count = int(indices[0]), indices.numel()
    if int(indices[-1]) - first + 1 == count:
        return tensor.narrow(axis, first, count)
    return tensor.index_select(axis, indices)


def working(tensor: Tensor) -> Tensor:
    """Half-precision values in float32, all else as it is."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
