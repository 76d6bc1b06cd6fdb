"""The fast engine: one forward, one backward to where parameters meet examples, norms and sums by formulas.

The model runs one example at a time, vectorised (`isolation`). No [batch, d] matrix exists: chunks of examples small
enough for the cache go through the network, and a parameter's per-example gradients live only inside a chunk, and
only where no formula gives their norm directly.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils import _pytree as pytree

from sparsedp.batch import Batch, LossFunction, MicroBatch, tensors_of, to_device
from sparsedp.clipping import Identity
from sparsedp.errors import ModelError, SparseDPError
from sparsedp.grad_sample.accumulate import Chunk, ClippedSum
from sparsedp.grad_sample.embedding import TokenRows, refuse_embedding
from sparsedp.grad_sample.isolation import (
    fork_draws,
    isolated_losses,
    made_up,
    modes_of,
    on_made_up,
    why_not_isolated,
)
from sparsedp.grad_sample.linear import Outer
from sparsedp.grad_sample.query import ClippedSumQuery
from sparsedp.grad_sample.reference import ReferenceEngine
from sparsedp.grad_sample.sampler import Block, GradSampler, Metric, Workspace, make_blocks, make_metrics
from sparsedp.grad_sample.trace import FallbackError, Graph, Trace, graph_leaf, trace
from sparsedp.grad_sample.uses import Use, grad_samplers
from sparsedp.parameters import ParameterLayout, Support, widest_dtype

LARGE_SUM = 1 << 23
"""Coordinates from which on a sum takes what the system has to give, and not freed memory beside it."""
CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 1 << 30}
"""Activations and explicit gradients of one chunk aim at this size: the last-level cache, or a share of a GPU."""
USES_PER_CHUNK = 5
"""Every so many uses of parameters a chunk grows by its size again: overhead then outweighs the cache."""
MOST_GROWTH = 8
"""Times a chunk grows so at most: beyond the cache, larger chunks cost memory and win little."""
LEAST_CHUNK, MOST_CHUNK = 8, 4096
"""Examples in a chunk, at least and at most."""

logger = logging.getLogger("sparsedp")


class _Kind(NamedTuple):
    """What the cost of an example depends on, besides the support."""

    modes: tuple[bool, ...]
    shapes: tuple[torch.Size, ...]
    keeps_largest: bool
    by_unit: bool
    as_it_is: bool


class _Surveyed(NamedTuple):
    chunk_size: int
    trace: Trace


@dataclass(slots=True, eq=False)
class _Prepared:
    """What depends on the support alone, kept while the support stays."""

    support: Support
    blocks: dict[str, Block]
    parameters: dict[str, nn.Parameter]
    leaves: dict[Node, str]
    plain_metrics: dict[str, Metric]
    surveyed: dict[_Kind, _Surveyed] = field(default_factory=dict)


class BookKeepingEngine:
    """Clipped sums at little more than the cost of an ordinary step.

    Edge cases: a model it has no formulas for falls back to the reference engine as a whole, with one log line. That
    is decided on made-up examples, so it does not depend on data.
    """

    def __init__(self, model: nn.Module, loss: LossFunction) -> None:
        for name, module in model.named_modules():
            if (reason := refuse_embedding(module)) is not None:
                raise ModelError(f"layer {name!r}: {reason}")
        self._model, self._loss = model, loss
        self.layout = ParameterLayout.of(model)
        self._prepared: _Prepared | None = None
        self._reference = ReferenceEngine(model, loss)
        self._falls_back = False
        self._notes: dict[str, None] = {}
        self._known: set[tuple[Any, ...]] = set()
        self._workspace = Workspace()

    @property
    def notes(self) -> tuple[str, ...]:
        """What was not on the fast path so far, and why, in words; empty where all was."""
        return tuple(self._notes)

    @property
    def falls_back(self) -> bool:
        """Whether the reference engine answers for this model."""
        return self._falls_back

    def clipped_sum(self, batches: Iterable[MicroBatch], query: ClippedSumQuery) -> Tensor:
        prepared = self._prepare(query.support)
        device = next(iter(prepared.parameters.values())).device
        metrics = prepared.plain_metrics
        if not isinstance(query.geometry, Identity):
            dtype = widest_dtype(prepared.parameters.values())
            metrics = make_metrics(prepared.blocks, query.geometry, dtype)
        running: ClippedSum | None = None
        by_reference: Tensor | None = None
        for batch in batches:
            if query.support.size == 0 or batch.example_count == 0:
                continue
            surveyed = self._survey_once(batch, prepared, query)
            with fork_draws(batch.seed, device):
                for part in _chunks(batch, None if surveyed is None else surveyed.chunk_size, device):
                    chunk = None if surveyed is None else self._record(part, prepared, surveyed.trace)
                    if chunk is None:
                        more = self._reference.sum_of(part.rows, part.units, query)
                        by_reference = more if by_reference is None else by_reference + more
                    else:
                        running = running or _begin_sum(query, prepared, metrics, device)
                        running.add(chunk)
        total = (running or _begin_sum(query, prepared, metrics, device)).total()
        return total if by_reference is None else total.add_(by_reference)

    def _prepare(self, support: Support) -> _Prepared:
        parameters = self.layout.parameters(self._model)
        if self._prepared is None or self._prepared.support is not support:
            blocks = make_blocks(self.layout, support, parameters[0].device)
            named = {slot.name: p for slot, p in zip(self.layout, parameters, strict=True)}
            leaves = {graph_leaf(p): name for name, p in named.items() if name in blocks}
            metrics = make_metrics(blocks, Identity(), widest_dtype(parameters))
            self._prepared = _Prepared(support, blocks, named, leaves, metrics)
        return self._prepared

    def _survey_once(
        self, batch: MicroBatch, prepared: _Prepared, query: ClippedSumQuery
    ) -> _Surveyed | None:
        kind = _Kind(
            modes_of(self._model),
            tuple(leaf.shape[1:] for leaf in tensors_of(batch.rows)),
            query.kept_per_unit < query.support.size,
            batch.units is not None,
            isinstance(query.geometry, Identity),
        )
        if not self._falls_back and kind not in prepared.surveyed:
            try:
                prepared.surveyed[kind] = self._survey(batch.rows, kind, prepared, query)
            except Exception as reason:  # an error of the model's own comes up again below
                if isinstance(reason, SparseDPError) and not isinstance(reason, FallbackError):
                    raise
                self._say(f"the book-keeping engine falls back to the reference engine: {reason}")
                self._falls_back = True
        return None if self._falls_back else prepared.surveyed[kind]

    def _survey(self, rows: Batch, kind: _Kind, prepared: _Prepared, query: ClippedSumQuery) -> _Surveyed:
        """Learn a kind's cost and meetings from made-up examples, apart from the sum: resumed runs are bit-equal."""
        device = next(iter(prepared.parameters.values())).device
        rows = to_device(rows, device)
        known = (kind.modes, kind.shapes, *sorted(prepared.leaves.values()))
        is_new = known not in self._known
        # Asked for once: it costs d, and a support may be new in every step.
        if is_new and (reason := why_not_isolated(self._model, self._loss, rows)) is not None:
            raise FallbackError(reason)
        with fork_draws(None, device):
            two, three = on_made_up(lambda kind: [self._losses(made_up(rows, n, kind)) for n in (2, 3)])
            traced = trace(Graph.of(two), Graph.of(three), prepared.leaves)
            uses = _uses(three, traced)
            _backward(three, None, uses, keep_graph=True)
            if is_new:
                for use in uses:
                    use.check_formulas(3)
                self._known.add(known)
            samplers = self._samplers(uses, 3, prepared)
        for use in uses:
            if not use.has_formula:
                names = ", ".join(map(repr, use.parameters(prepared.leaves)))
                what = f"{use.node.name()} has no formula; its backward runs once for each example"
                self._say(f"{names}: {what}")
        return _Surveyed(_chunk_size(three, uses, samplers, kind, prepared.plain_metrics, query), traced)

    def _record(self, part: MicroBatch, prepared: _Prepared, traced: Trace) -> Chunk | None:
        """Forward and backward over one chunk; None, with no message (it could tell of an example), to fall back."""
        losses = self._losses(part.rows)
        try:
            uses = _uses(losses, traced)
            _backward(losses, _weights(part.units), uses)
            samplers = self._samplers(uses, part.example_count, prepared)
        except FallbackError:
            return None
        if any(use.may_have_spread for use in uses):
            return None
        return Chunk(part.example_count, part.units, samplers)

    def _losses(self, rows: Batch) -> Tensor:
        with torch.enable_grad():
            return isolated_losses(self._model, self._loss, rows)

    def _samplers(self, uses: Sequence[Use], examples: int, of: _Prepared) -> dict[str, list[GradSampler]]:
        found: dict[str, list[GradSampler]] = {}
        given = (of.leaves, of.parameters, of.blocks, self._workspace)
        for name, sampler in grad_samplers(uses, examples, *given):
            found.setdefault(name, []).append(sampler)
        return found

    def _say(self, what: str) -> None:
        if what not in self._notes:
            self._notes[what] = None
            logger.warning("%s", what)


def _begin_sum(
    query: ClippedSumQuery, prepared: _Prepared, metrics: dict[str, Metric], device: torch.device
) -> ClippedSum:
    """Room for the sum, taken once the first backward pass has given up most of its own."""
    if query.support.size >= LARGE_SUM:
        with contextlib.suppress(OSError, AttributeError, TypeError):  # not every C library can
            ctypes.CDLL(None).malloc_trim(0)
    return ClippedSum(prepared.blocks, metrics, query, _chunk_bytes(device), device)


def _uses(losses: Tensor, traced: Trace) -> list[Use]:
    """The uses of parameters in the graph of some losses, if it has the form they were traced in."""
    graph = Graph.of(losses)
    if not traced.fits(graph):
        raise FallbackError("what the model computes has changed")
    uses = [Use.of(graph, meeting) for meeting in traced.meetings]
    for use in uses:
        use.check_examples(len(losses))
    return uses


def _backward(losses: Tensor, weights: Tensor | None, uses: Sequence[Use], keep_graph: bool = False) -> None:
    """Fill in the output gradients of all uses, computing no weight gradient at all."""
    edges = [edge for use in uses for edge in use.edges]
    if not edges:
        return
    start = torch.ones_like(losses) if weights is None else weights.to(losses)
    again = keep_graph or not all(use.has_formula for use in uses)
    found = iter(torch.autograd.grad(losses, edges, start, allow_unused=True, retain_graph=again))
    for use in uses:
        taken = {place: next(found) for place, _ in use.meeting.outputs}
        use.gradients = {place: g for place, g in taken.items() if g is not None}


def _chunks(batch: MicroBatch, size: int | None, device: torch.device) -> Iterator[MicroBatch]:
    """Split a micro-batch into chunks of about so many examples (None: all); a unit's examples stay together."""
    leaves, tree = pytree.tree_flatten(to_device(batch.rows, device))
    start, count = 0, batch.example_count
    while start < count:
        stop = min(start + (size or count), count)
        if stop < count and batch.units is not None:  # on to where no unit is cut in two
            stop += int((batch.units[stop:] == batch.units[stop - 1]).sum())
        if stop == count - 1:
            stop = count  # a single example is often computed in another way, and the graph would differ
        part = [leaf[start:stop] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        units = None if batch.units is None else (batch.units[start:stop] - batch.units[start]).to(device)
        yield MicroBatch(pytree.tree_unflatten(part, tree), units)
        start = stop


def _weights(units: Tensor | None) -> Tensor | None:
    """One over the size of each example's unit, so that sums over examples are means over units."""
    return None if units is None else (1.0 / torch.bincount(units).to(torch.float64))[units]


def _chunk_bytes(device: torch.device) -> int:
    return CHUNK_BYTES.get(device.type, CHUNK_BYTES["cuda"])


def _chunk_size(
    losses: Tensor,
    uses: Sequence[Use],
    samplers: dict[str, list[GradSampler]],
    kind: _Kind,
    plain: dict[str, Metric],
    query: ClippedSumQuery,
) -> int:
    """Examples of a chunk, a power of two; by shapes alone, so that a seeded run is the same everywhere."""
    seen = 2 * sum(gradient.numel() for use in uses for gradient in use.gradients.values())
    formed = kind.by_unit or not kind.as_it_is
    explicit = sum(
        sampler.block_size
        for name, many in samplers.items()
        for sampler in many
        # Of single outer products and look-ups none is counted, even where units or other uses have them formed.
        if not isinstance(sampler, Outer | TokenRows)
        and (formed or len(many) > 1 or not sampler.has_ghost_norm(plain[name]))
    )
    if kind.keeps_largest:
        explicit += 4 * query.support.size
    each = 4 * (seen // len(losses) + explicit)
    room = _chunk_bytes(losses.device) * min(max(1, len(uses) // USES_PER_CHUNK), MOST_GROWTH)
    size = min(max(room // max(each, 1), LEAST_CHUNK), MOST_CHUNK)
    return 1 << (size.bit_length() - 1)
