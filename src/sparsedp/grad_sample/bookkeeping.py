"""The fast engine: one forward, one backward to the layer outputs, norms and sums layer by layer.

No [batch, d] matrix exists. Chunks of samples small enough for the cache go through the network; a layer's per-sample
gradients live only inside a chunk, and only where no formula gives their norm directly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils import _pytree as pytree

from sparsedp.batch import MicroBatch, PerSampleLoss, check_losses, tensors_of, to_device
from sparsedp.core.geometry import Identity
from sparsedp.core.memory import give_back_freed_memory
from sparsedp.grad_sample import chunking
from sparsedp.grad_sample.blocks import Block, Metrics, make_blocks
from sparsedp.grad_sample.chances import Chances
from sparsedp.grad_sample.chunking import RowKind, chunk_bytes, chunk_rows
from sparsedp.grad_sample.clipping import Chunk, ClippedSum
from sparsedp.grad_sample.forward import Forward, calls_not_by_row, check_samples_apart
from sparsedp.grad_sample.graph import CannotBookError, Leaf, UnfitLayerError, graph_leaf
from sparsedp.grad_sample.hooks import standing_hooks
from sparsedp.grad_sample.keyed import drawing, keyed_draws, nothing_drawn
from sparsedp.grad_sample.layers.shared import Use, shared_sources
from sparsedp.grad_sample.layers.source import Source
from sparsedp.grad_sample.layers.table import family_of
from sparsedp.grad_sample.partition import Layer, droppable_axes, partition
from sparsedp.grad_sample.plain import plain_forward
from sparsedp.grad_sample.query import Query
from sparsedp.grad_sample.reading import Reading, read
from sparsedp.grad_sample.reference import ReferenceEngine
from sparsedp.grad_sample.tape import Tape
from sparsedp.grad_sample.workspace import Space, Workspace
from sparsedp.parameters import Layout, Support
from sparsedp.randomness import SEED_BYTES, Chance, StepSecret

LARGE_SUM = 1 << 23
"""Coordinates from which on a sum takes what the system has to give, and not freed memory beside it."""

logger = logging.getLogger("sparsedp")


@dataclass(frozen=True, slots=True)
class _Measured:
    """What two forwards of different length told about one kind of rows."""

    chunk_rows: int
    reading: Reading


@dataclass(slots=True, eq=False)
class _Prepared:
    """What depends on the support alone, kept while the support stays."""

    support: Support
    blocks: dict[str, Block]
    parameters: dict[str, nn.Parameter]
    leaves: dict[Node, Leaf]
    plain_metrics: Metrics
    measured: dict[RowKind, _Measured] = field(default_factory=dict)


class BookkeepingEngine:
    """Clipped sums at little more than the cost of an ordinary step.

    **Edge cases.** Models it does not understand are handed, with one log line, to the reference engine.
    """

    def __init__(self, model: nn.Module, loss: PerSampleLoss) -> None:
        self._model = model
        self._loss = loss
        self._layout = Layout.of(model)
        self._layers = partition(model, self._layout)
        self._axes = droppable_axes(self._layout, self._layers)
        self._loosened: set[str] = set()
        self._prepared: _Prepared | None = None
        self._reference = ReferenceEngine(model, loss)
        self._gave_way = False
        self._notes: dict[str, None] = {}
        self._chances = Chances(model, loss)
        self._workspace = Workspace()

    @property
    def layout(self) -> Layout:
        """The flat coordinates of the model's trainable parameters."""
        return self._layout

    @property
    def notes(self) -> tuple[str, ...]:
        """What was not on the fast path so far, and why, in words; empty where all was."""
        return tuple(self._notes)

    @property
    def gave_way(self) -> bool:
        """Whether the reference engine answers for this model."""
        return self._gave_way

    @property
    def largest_chunk(self) -> int | None:
        """Most rows that went or will go through the model at once; None before it has seen any."""
        sizes = [] if self._prepared is None else [m.chunk_rows for m in self._prepared.measured.values()]
        return max(sizes, default=None)

    def clipped_sum(self, batches: Iterable[MicroBatch], query: Query, see: object = None) -> Tensor:
        """The sum over all units of their clipped gradients on the support; `see` is shown every chunk."""
        prepared = self._prepare(query.support)
        if not self._gave_way and (reason := self._why_not()) is not None:
            self._give_way(reason)
        device = next(iter(prepared.parameters.values())).device
        metrics = prepared.plain_metrics
        if not isinstance(query.geometry, Identity):
            metrics = Metrics(prepared.blocks, query.geometry, self._dtype())
        running: ClippedSum | None = None
        by_reference: Tensor | None = None
        for batch in batches:
            if query.support.size == 0:
                continue
            with nothing_drawn(device):
                for rows in self._chunks(batch, query, prepared, device):
                    gradients = self._record(rows, prepared, query)
                    if gradients is None:
                        part = self._reference.clipped_sum([rows], query)
                        by_reference = part if by_reference is None else by_reference + part
                        continue
                    running = running or self._begin_sum(query, prepared, metrics, device)
                    norms = running.add(gradients)
                    if see is not None:
                        see(rows, _each_row(rows, gradients, prepared), norms if rows.units is None else None)
        total = (running or self._begin_sum(query, prepared, metrics, device)).total()
        return total if by_reference is None else total.add_(by_reference)

    def _begin_sum(
        self, query: Query, prepared: _Prepared, metrics: Metrics, device: torch.device
    ) -> ClippedSum:
        """Room for the sum, taken once the first backward pass has given up most of its own."""
        if query.support.size >= LARGE_SUM:
            give_back_freed_memory()
        return ClippedSum(prepared.blocks, metrics, query, chunk_bytes(device), device)

    def _why_not(self) -> str | None:
        """What the user has hung on the model that this engine's formulas would miss, in words."""
        if (reason := standing_hooks(self._model)) is not None:
            return reason
        for layer in self._layers:
            if family_of(layer.module) is not layer.family:
                return f"layer {layer.name!r} is no longer what it was"
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
            named = {s.name: p for s, p in zip(self._layout, parameters, strict=True)}
            metrics = Metrics(blocks, Identity(), self._dtype())
            owners = {name: frozenset(self._owners(name)) for name in named}
            leaves = {
                graph_leaf(p): Leaf(name, owners[name], active=name in blocks) for name, p in named.items()
            }
            self._prepared = _Prepared(support, blocks, named, leaves, metrics)
        return self._prepared

    def _owners(self, parameter: str) -> list[str]:
        return [layer.name for layer in self._layers if parameter in layer.parameters.values()]

    def _recorded(self, prepared: _Prepared) -> dict[str, Layer]:
        """The layers whose calls are recorded: those with an active coordinate and formulas that hold."""
        return {
            layer.name: layer
            for layer in self._layers
            if layer.name not in self._loosened
            and any(flat in prepared.blocks for flat in layer.parameters.values())
        }

    def _chunks(
        self, batch: MicroBatch, query: Query, prepared: _Prepared, device: torch.device
    ) -> Iterator[MicroBatch]:
        """Split a micro-batch so that a chunk fits the cache; a unit's rows stay together."""
        here = to_device(batch.rows, device)
        leaves, tree = pytree.tree_flatten(here)
        kind = RowKind.of(leaves, batch, query)

        def between(start: int, stop: int) -> MicroBatch:
            if (start, stop) == (0, count) and batch.units is None and here is batch.rows:
                return batch
            part = [leaf[start:stop] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            units = None if batch.units is None else (batch.units[start:stop] - batch.units[start]).to(device)
            chance = None if batch.chance is None else batch.chance.part(slice(start, stop))
            return MicroBatch(pytree.tree_unflatten(part, tree), units, chance)

        start, count = 0, batch.row_count
        if count and not self._gave_way and self._chances.of(batch.rows) is None:
            self._give_way("what it draws is not a fixed sequence of random numbers for each row")
        if count and not self._gave_way and kind not in prepared.measured:
            self._measure(leaves, tree, prepared, query, kind)
        while start < count:
            measured = prepared.measured.get(kind)
            rows = chunking.FIRST_CHUNK if measured is None else measured.chunk_rows
            stop = _unit_boundary(batch, start + rows)
            if stop == count - 1 and measured is not None and measured.reading.meetings:
                stop = count  # a single row is often computed in another way, and the graph would differ
            yield between(start, stop)
            start = stop

    def _measure(
        self,
        leaves: list[object],
        tree: pytree.TreeSpec,
        prepared: _Prepared,
        query: Query,
        kind: RowKind,
    ) -> None:
        """Learn what a kind of rows costs, and which arguments of which calls have the samples on their first axis.

        Apart from the sum, which so never depends on what this engine has seen before: a resumed run gives the same
        bits. Two numbers of rows, because an axis that is not the samples' may be as long as one of them, but not as
        both.
        """
        chunks = []
        for times in (2, 3):
            copies = [torch.cat([leaf[:1]] * times) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            trial = Chance(StepSecret(bytes(SEED_BYTES)), torch.arange(times))
            chunks.append(MicroBatch(pytree.tree_unflatten(copies, tree), chance=trial))
        try:
            three, reading, uses, sources = self._survey(chunks, prepared)
        except CannotBookError as reason:
            self._give_way(str(reason))
            return
        self._say_what_is_slow(uses, prepared)
        device = three.losses.device
        rows = chunk_rows(three, uses, sources, kind, prepared.plain_metrics, query, device)
        prepared.measured[kind] = _Measured(rows, reading)

    def _survey(
        self, chunks: list[MicroBatch], prepared: _Prepared
    ) -> tuple[Forward, Reading, list[Use], dict[str, list[Source]]]:
        """Read forwards of two and three rows, once every layer whose formulas do not hold is left to the graph."""
        while True:
            two, three = (self._forward(chunk, prepared, thorough=True) for chunk in chunks)
            unfit = two.claims.unfit | three.claims.unfit | calls_not_by_row(two.tape.calls, three.tape.calls)
            try:
                if not unfit:
                    reading = read(two.graph, three.graph, three.claims, prepared.leaves)
                    uses = three.uses(reading)
                    with drawing(three.tape.keyed):
                        return three, reading, uses, self._tried(three, uses, prepared)
            except UnfitLayerError as error:
                unfit = {error.layer: str(error)}
            self._loosened.update(unfit)
            prepared.measured.clear()

    def _tried(self, three: Forward, uses: list[Use], prepared: _Prepared) -> dict[str, list[Source]]:
        """The sources of three rows, once what was read of them has been put to the test."""
        check_samples_apart(three.losses, three.tape.calls, uses)
        three.tape.backward(three.losses, None, uses, keep_graph=True)
        for use in uses:
            use.check_formulas(three.samples, Space(self._workspace, "check"))
        return self._sources(three, uses, prepared)

    def _record(self, chunk: MicroBatch, prepared: _Prepared, query: Query) -> Chunk | None:
        """Forward and backward over one chunk; None if it needs the reference engine."""
        if self._gave_way:
            return None
        reading = prepared.measured[RowKind.of(tensors_of(chunk.rows), chunk, query)].reading
        try:
            forward = self._forward(chunk, prepared)
            uses = forward.uses(reading)
            with drawing(forward.tape.keyed):
                forward.tape.backward(forward.losses, _row_weights(chunk.units), uses)
            forward.tape.check_inputs_unchanged()
            sources = self._sources(forward, uses, prepared)
        except CannotBookError as reason:
            self._say(f"some rows go through the reference engine: {reason}")
            return None
        if any(use.may_have_spread for use in uses):
            return None  # without a word, which would tell of a record
        return Chunk(chunk.row_count, chunk.units, sources)

    def _give_way(self, reason: str) -> None:
        self._say(f"the fast engine gives way to the reference engine: {reason}")
        self._gave_way = True

    def _say_what_is_slow(self, uses: Sequence[Use], prepared: _Prepared) -> None:
        for use in uses:
            if not use.has_formula:
                names = ", ".join(repr(leaf.parameter) for leaf in use.leaves(prepared.leaves))
                self._say(
                    f"{names}: {use.node.name()} has no formula; its backward runs once for each sample"
                )

    def _say(self, what: str) -> None:
        if what not in self._notes:
            self._notes[what] = None
            logger.warning("%s", what)

    def _forward(self, chunk: MicroBatch, prepared: _Prepared, thorough: bool = False) -> Forward:
        """Forward over some rows, under random numbers of their own."""
        tape = Tape(keyed_draws(self._chances.of(chunk.rows) or (), chunk.chance))
        modules = {x.name: x.module for x in self._recorded(prepared).values()}
        recorded = tape.recording(modules)
        with torch.enable_grad(), drawing(tape.keyed), recorded, plain_forward(self._model):
            losses = check_losses(self._loss(self._model, chunk.rows), chunk.row_count)
        return Forward.of(tape, losses, prepared.leaves, thorough)

    def _sources(self, forward: Forward, uses: Sequence[Use], prepared: _Prepared) -> dict[str, list[Source]]:
        samples = forward.samples
        layers = self._recorded(prepared)
        sources: dict[str, list[Source]] = {}
        for number, call in enumerate(forward.tape.calls):
            if call.output_gradient is None:
                continue
            seen = call.input.shape[:1] + call.output_gradient.shape[:1]
            if seen != (samples, samples):
                raise CannotBookError(f"layer {call.name!r} saw {seen[0]} rows for {samples} samples")
            space, layer = Space(self._workspace, f"{call.name}#{number}"), layers[call.name]
            for local, flat in layer.parameters.items():
                if flat not in prepared.blocks:
                    continue
                try:
                    source = layer.family.source(call, local, prepared.blocks[flat], space)
                except CannotBookError as reason:
                    raise UnfitLayerError(call.name, reason) from reason
                sources.setdefault(flat, []).append(source)
        names = {node: leaf.parameter for node, leaf in prepared.leaves.items() if leaf.active}
        space = Space(self._workspace, "shared")
        for flat, source in shared_sources(uses, samples, names, prepared.parameters, prepared.blocks, space):
            sources.setdefault(flat, []).append(source)
        return sources


def _each_row(rows: MicroBatch, chunk: Chunk, prepared: _Prepared) -> Callable[[int], Tensor]:
    """Each row's own gradient on the support, whatever unit it belongs to."""
    weights = _row_weights(rows.units)
    by_row = Chunk(chunk.samples, None, chunk.sources)

    def gradient(place: int) -> Tensor:
        found = by_row.restricted(prepared.blocks, slice(place, place + 1))[0]
        return found if weights is None else found / weights[place]

    return gradient


def _unit_boundary(batch: MicroBatch, stop: int) -> int:
    """The first place at or after `stop` where no unit is cut in two."""
    if stop >= batch.row_count or batch.units is None:
        return min(stop, batch.row_count)
    later = (batch.units > batch.units[stop - 1]).nonzero()
    return int(later[0]) if len(later) else batch.row_count


def _row_weights(units: Tensor | None) -> Tensor | None:
    """One over the size of each row's unit, so that sums over rows are means over units."""
    return None if units is None else (1.0 / torch.bincount(units).to(torch.float64))[units]
