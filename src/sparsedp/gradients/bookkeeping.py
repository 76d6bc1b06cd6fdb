"""The fast engine: one forward, one backward to the layer outputs, norms and sums layer by layer.

No [batch, d] matrix exists. Chunks of samples small enough for the cache go through the network; a layer's per-sample
gradients live only inside a chunk, and only where no formula gives their norm directly.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils import _pytree as pytree

from sparsedp.core.batch import MicroBatch, PerSampleLoss, check_losses, to_device
from sparsedp.core.geometry import Identity
from sparsedp.core.layout import Layout
from sparsedp.core.support import Support
from sparsedp.gradients.blocks import Block, Metrics, make_blocks
from sparsedp.gradients.clipping import Chunk, ClippedSum
from sparsedp.gradients.graph import CannotBookError, Leaf, graph_leaf
from sparsedp.gradients.hooks import standing_hooks
from sparsedp.gradients.layers.fallback import module_gradients
from sparsedp.gradients.layers.source import Closed, Source
from sparsedp.gradients.layers.table import family_of
from sparsedp.gradients.partition import Layer, droppable_axes, overlap, partition
from sparsedp.gradients.query import Query
from sparsedp.gradients.reference import ReferenceEngine
from sparsedp.gradients.skinny import quick_forward
from sparsedp.gradients.tape import Call, Tape, batched_arguments
from sparsedp.gradients.workspace import Space, Workspace

logger = logging.getLogger("sparsedp")

CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 1 << 30}
"""Activations and explicit gradients of one chunk aim at this size: the last-level cache, or a share of a GPU."""
CALLS_PER_CHUNK = 3
"""Every so many layer calls a chunk grows by its size again: with many small layers, overhead outweighs the cache."""
FIRST_CHUNK, LEAST_CHUNK, MOST_CHUNK = 16, 16, 4096
"""Samples in the measuring chunk, and the bounds on all others."""


@dataclass(frozen=True, slots=True)
class _Measured:
    """What two forwards of different length told about one kind of rows.

    `batched` says of every tensor among each call's arguments whether its first axis is the samples.
    """

    chunk_rows: int
    batched: tuple[tuple[bool, ...], ...]


@dataclass(slots=True, eq=False)
class _Prepared:
    """What depends on the support alone, kept while the support stays."""

    support: Support
    blocks: dict[str, Block]
    layers: dict[str, Layer]
    parameters: dict[str, nn.Parameter]
    leaves: dict[Node, Leaf]
    plain_metrics: Metrics
    measured: dict[object, _Measured] = field(default_factory=dict)


class BookkeepingEngine:
    """Clipped sums at little more than the cost of an ordinary step.

    **Edge cases.** Models it does not understand are handed, with one log line, to the reference engine.
    """

    def __init__(self, model: nn.Module, loss: PerSampleLoss) -> None:
        self._model = model
        self._loss = loss
        self._layout = Layout.of(model)
        self._layers = partition(model, self._layout)
        self._axes = droppable_axes(self._layers)
        self._prepared: _Prepared | None = None
        self._reference: ReferenceEngine | None = None
        self._workspace = Workspace()
        if (shared := overlap(self._layers)) is not None:
            self._give_way(f"layer {shared!r} is used inside and outside a module without a fast path")

    @property
    def layout(self) -> Layout:
        """The flat coordinates of the model's trainable parameters."""
        return self._layout

    def clipped_sum(self, batches: Iterable[MicroBatch], query: Query) -> Tensor:
        """The sum over all units of their clipped gradients on the support."""
        prepared = self._prepare(query.support)
        if self._reference is None and (reason := self._why_not()) is not None:
            self._give_way(reason)
        device = next(iter(self._layout.parameters(self._model))).device
        metrics = prepared.plain_metrics
        if not isinstance(query.geometry, Identity):
            metrics = Metrics(prepared.blocks, query.geometry, self._dtype())
        running = ClippedSum(prepared.blocks, metrics, query, _chunk_bytes(device))
        by_reference: Tensor | None = None
        for batch in batches:
            if query.support.size == 0:
                continue
            for rows in self._chunks(batch, query, prepared, device):
                gradients = self._record(rows, prepared, query)
                if gradients is not None:
                    running.add(gradients)
                else:
                    assert self._reference is not None
                    part = self._reference.clipped_sum([rows], query)
                    by_reference = part if by_reference is None else by_reference + part
        total = running.total(device)
        return total if by_reference is None else total + by_reference

    def _why_not(self) -> str | None:
        """What the user has hung on the model that this engine's formulas would miss, in words."""
        if (reason := standing_hooks(self._model)) is not None:
            return reason
        for layer in self._layers:
            part = layer.module
            if layer.family is not None and family_of(part) is not layer.family:
                return f"layer {layer.name!r} is no longer what it was"
            if layer.family is None and (part._forward_hooks or part._forward_pre_hooks):
                return f"layer {layer.name!r} has a forward hook, and no fast path"
        return None

    def _dtype(self) -> torch.dtype:
        dtype = torch.float32
        for parameter in self._layout.parameters(self._model):
            dtype = torch.promote_types(dtype, parameter.dtype)
        return dtype

    def _prepare(self, support: Support) -> _Prepared:
        parameters = self._layout.parameters(self._model)
        if self._prepared is None or self._prepared.support is not support:
            blocks = make_blocks(self._layout, support, self._axes, parameters[0].device)
            layers = {
                x.name: x for x in self._layers if any(flat in blocks for flat in x.parameters.values())
            }
            named = {s.name: p for s, p in zip(self._layout, parameters, strict=True) if s.name in blocks}
            metrics = Metrics(blocks, Identity(), self._dtype())
            leaves = {
                graph_leaf(p): Leaf(
                    name, frozenset(x.name for x in self._layers if name in x.parameters.values())
                )
                for name, p in named.items()
            }
            self._prepared = _Prepared(support, blocks, layers, named, leaves, metrics)
        return self._prepared

    def _chunks(
        self, batch: MicroBatch, query: Query, prepared: _Prepared, device: torch.device
    ) -> Iterator[MicroBatch]:
        """Split a micro-batch so that a chunk fits the cache; a unit's rows stay together."""
        leaves, tree = pytree.tree_flatten(to_device(batch.rows, device))
        kind = _kind(leaves, query)

        def between(start: int, stop: int) -> MicroBatch:
            part = [leaf[start:stop] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            units = None if batch.units is None else (batch.units[start:stop] - batch.units[start]).to(device)
            return MicroBatch(pytree.tree_unflatten(part, tree), units)

        start, count = 0, batch.row_count
        if count and self._reference is None and kind not in prepared.measured:
            self._measure(leaves, tree, prepared, query, device)
        while start < count:
            measured = prepared.measured.get(kind)
            rows = FIRST_CHUNK if measured is None else measured.chunk_rows
            stop = _unit_boundary(batch, start + rows)
            yield between(start, stop)
            start = stop

    def _measure(
        self,
        leaves: list[object],
        tree: pytree.TreeSpec,
        prepared: _Prepared,
        query: Query,
        device: torch.device,
    ) -> None:
        """Learn what a kind of rows costs, and which arguments of which calls have the samples on their first axis.

        Apart from the sum, which so never depends on what this engine has seen before: a resumed run gives the same
        bits. The generator is put back for the same reason. Two numbers of rows, because an axis that is not the
        samples' may be as long as one of them, but not as both.
        """
        chunks = []
        for times in (2, 3):
            copies = [torch.cat([leaf[:1]] * times) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            chunks.append(MicroBatch(pytree.tree_unflatten(copies, tree)))
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            try:
                two, three = (self._tape(chunk, prepared, thorough=True) for chunk in chunks)
                batched = batched_arguments(two.calls, three.calls)
                self._sources(two, 2, prepared, batched)
                sources = self._sources(three, 3, prepared, batched)
            except CannotBookError as reason:
                self._give_way(str(reason))
                return
        each = _bytes_per_sample(three.calls, sources, 3, query)
        room = _chunk_bytes(device) * max(1, len(three.calls) // CALLS_PER_CHUNK)
        rows = min(max(room // max(each, 1), LEAST_CHUNK), MOST_CHUNK)
        measured = _Measured(1 << (rows.bit_length() - 1), batched)
        prepared.measured[_kind(leaves, query)] = measured

    def _record(self, chunk: MicroBatch, prepared: _Prepared, query: Query) -> Chunk | None:
        """Forward and backward over one chunk; None, from now on, if the model needs the reference engine."""
        if self._reference is not None:
            return None
        measured = prepared.measured[_kind(pytree.tree_leaves(chunk.rows), query)]
        try:
            tape = self._tape(chunk, prepared)
            sources = self._sources(tape, chunk.row_count, prepared, measured.batched)
        except CannotBookError as reason:
            self._give_way(str(reason))
            return None
        return Chunk(chunk.row_count, chunk.units, sources)

    def _give_way(self, reason: str) -> None:
        logger.warning("the fast engine gives way to the reference engine: %s", reason)
        self._reference = ReferenceEngine(self._model, self._loss)

    def _tape(self, chunk: MicroBatch, prepared: _Prepared, thorough: bool = False) -> Tape:
        """Forward and backward over some rows."""
        tape = Tape()
        modules = {x.name: x.module for x in prepared.layers.values()}
        with torch.enable_grad(), tape.recording(modules), quick_forward(modules.values()):
            losses = check_losses(self._loss(self._model, chunk.rows), chunk.row_count)
        tape.check_graph(losses, prepared.leaves, thorough)
        tape.backward(losses, _row_weights(chunk.units))
        tape.check_inputs_unchanged()
        return tape

    def _sources(
        self, tape: Tape, samples: int, prepared: _Prepared, batched: tuple[tuple[bool, ...], ...]
    ) -> dict[str, list[Source]]:
        if len(tape.calls) != len(batched):
            raise CannotBookError(f"its layers were called {len(tape.calls)} times, at first {len(batched)}")
        sources: dict[str, list[Source]] = {}
        for number, call in enumerate(tape.calls):
            if call.gradients:
                space = Space(self._workspace, f"{call.name}#{number}")
                for flat, source in _sources_of(call, prepared, samples, batched[number], space):
                    sources.setdefault(flat, []).append(source)
        return sources


def _sources_of(
    call: Call, prepared: _Prepared, samples: int, batched: tuple[bool, ...], space: Space
) -> Iterator[tuple[str, Source]]:
    layer = prepared.layers[call.name]
    active = {local: flat for local, flat in layer.parameters.items() if flat in prepared.blocks}
    if layer.family is None:
        weights = {local: prepared.parameters[flat] for local, flat in active.items()}
        gradients = module_gradients(call, weights, samples, batched)
        for local, flat in active.items():
            yield flat, gradients.source(local)
        return
    seen = call.input.shape[:1] + next(iter(call.gradients.values())).shape[:1]
    if seen != (samples, samples):
        raise CannotBookError(f"layer {call.name!r} saw {seen[0]} rows for {samples} samples")
    for local, flat in active.items():
        yield flat, layer.family.source(call, local, prepared.blocks[flat], space)


def _kind(leaves: list[object], query: Query) -> object:
    """What the cost of a sample depends on, besides the support."""
    shapes = tuple(leaf.shape[1:] for leaf in leaves if isinstance(leaf, Tensor))
    return shapes, query.kept_per_unit < query.support.size


def _bytes_per_sample(calls: list[Call], sources: dict[str, list[Source]], samples: int, query: Query) -> int:
    """Activations, their gradients and explicit per-sample gradients. Depends on shapes alone, never on values."""
    seen = sum(
        sum(t.numel() for t in call.tensors) + sum(g.numel() for g in call.gradients.values())
        for call in calls
    )
    explicit = sum(
        source.block_size for many in sources.values() for source in many if not isinstance(source, Closed)
    )
    if query.kept_per_unit < query.support.size:
        explicit += 4 * query.support.size
    return 4 * (seen // samples + explicit)


def _chunk_bytes(device: torch.device) -> int:
    return CHUNK_BYTES.get(device.type, CHUNK_BYTES["cuda"])


def _unit_boundary(batch: MicroBatch, stop: int) -> int:
    """The first place at or after `stop` where no unit is cut in two."""
    if stop >= batch.row_count or batch.units is None:
        return min(stop, batch.row_count)
    later = (batch.units > batch.units[stop - 1]).nonzero()
    return int(later[0]) if len(later) else batch.row_count


def _row_weights(units: Tensor | None) -> Tensor | None:
    """One over the size of each row's unit, so that sums over rows are means over units."""
    return None if units is None else (1.0 / torch.bincount(units).to(torch.float64))[units]
