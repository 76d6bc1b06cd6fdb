"""Poisson sampling over rows or units: every unit joins each step by its own coin, of exactly the planned rate."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, repeat, tee
from typing import Any, NamedTuple, cast, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from sparsedp._validate import refuse_missing_ids
from sparsedp.batch import Batch, MicroBatch
from sparsedp.errors import DataError, PrivacyError
from sparsedp.loading import DataConfig, Indices, RowLoader, ShapeValidator
from sparsedp.randomness import PrivateRandomness, StepKey


def split_microbatches(units: npt.NDArray[np.int64], most: int | None) -> list[slice]:
    """Cut increasing unit numbers into runs of at most `most`, none empty; without a limit, one run.

    Ranges of numbers with the same first binary digits are halved until no more than `most` units are in one.

    Formal guarantees:
        A unit that is added joins one run, or makes two of it; no other run changes. So each micro-batch's sum may
        be rounded by itself (`privacy.mechanism.Grid`). The rule knows neither N nor how many machines share the
        work.
    """
    if most is not None and most < 1:
        raise ValueError(f"most: got {most}, expected a whole number >= 1")
    return list(_halve(units, 0, len(units), len(units) if most is None else most))


def _halve(units: npt.NDArray[np.int64], start: int, stop: int, most: int) -> Iterator[slice]:
    if start == stop:
        return
    if stop - start <= most:
        yield slice(start, stop)
        return
    first, last = int(units[start]), int(units[stop - 1])
    digit = (first ^ last).bit_length() - 1
    middle = start + int(np.searchsorted(units[start:stop], last >> digit << digit))
    yield from _halve(units, start, middle, most)
    yield from _halve(units, middle, stop, most)


BLOCKS, FEWEST, MOST = 8, 32, 512
"""A batch has 8 to 16 blocks on average; more if they had over 512 units each, fewer if they had less than 32."""


@final
@dataclass(frozen=True, slots=True)
class UnitPartition:
    """Which units this rank works on, and how its part of a batch is cut into micro-batches.

    In a process by itself all units are its own, and batches are cut as coarsely as memory allows. Ranks that all
    hold the whole data set take blocks of 2^b consecutive unit numbers (`block_bits`) in turn. No micro-batch crosses
    a block, so all ranks' micro-batches together are the same for any number of ranks. With `shard_sizes` every rank
    holds units that no other has.

    Formal guarantees: Every rank throws the coins of all units it holds and keeps those of its own, so a unit takes
    part by the one coin that its owner throws. With a seed all ranks throw the same coins.
    """

    rank: int = 0
    world_size: int = 1
    in_blocks: bool = False
    """Whether batches are cut for several ranks."""
    shard_sizes: tuple[int, ...] | None = None
    """How many units each rank holds, if each holds its own."""

    def key(self, step: int) -> tuple[int, ...]:
        """What a seeded run's draws of a step are drawn by: rows of one number in two shards are not the same."""
        return (step,) if self.shard_sizes is None else (step, _SHARD_DRAWS, self.rank)

    def is_own(self, units: Indices, bits: int) -> npt.NDArray[np.bool_]:
        """Which of these units are this rank's."""
        if self.world_size == 1 or self.shard_sizes is not None:
            return np.ones(len(units), dtype=np.bool_)
        return np.asarray((units >> bits) % self.world_size == self.rank)

    def split(self, units: Indices, bits: int, most: int | None) -> list[slice]:
        """Its own units as micro-batches of at most `most`."""
        if not self.in_blocks:
            return split_microbatches(units, most)
        edges = np.flatnonzero(np.diff(units >> bits)) + 1
        bounds = [0, *edges.tolist(), len(units)] if len(units) else []
        return [
            slice(start + run.start, start + run.stop)
            for start, stop in pairwise(bounds)
            for run in split_microbatches(units[start:stop], most)
        ]


_SHARD_DRAWS = 11
"""Keeps the draws of shards apart from others of a seeded run."""


def block_bits(rate: float, total: int, most: int | None) -> int:
    """b, where blocks of 2^b unit numbers share the work: a public rule that does not know how many processes do.

    `most` units at once are all that fits into memory; then a block gives no more on average.
    """
    units = max(FEWEST, min(rate * total / BLOCKS, MOST))
    return int(min(units, most or units) / rate).bit_length() - 1


@dataclass(frozen=True, slots=True)
class LogicalBatch:
    """One step's batch, as the micro-batches it is processed in; may be empty. Size and secret are private."""

    step: int
    secret: StepKey = field(repr=False)
    micro_batches: Iterator[MicroBatch] = field(repr=False)
    _ahead: deque[MicroBatch] = field(default_factory=deque, repr=False, init=False)

    def __iter__(self) -> Iterator[MicroBatch]:
        while self._ahead:
            yield self._ahead.popleft()
        yield from self.micro_batches

    def load_ahead(self) -> tuple[MicroBatch, ...]:
        """Load all of it now, and keep it for the step."""
        self._ahead.extend(self.micro_batches)
        return tuple(self._ahead)


class _Chunk(NamedTuple):
    """Row indices of one micro-batch, and the unit each belongs to when a unit may have several."""

    rows: Indices
    units: Indices | None


ROWS_OF_A_WHOLE_UNIT = 32
"""Rows that a unit is taken to have where memory is planned for whole ones."""


class PoissonSampler:
    """Draws each step's batch from a map-style data set.

    Formal guarantees:
        Each unit is included independently with probability `sampling_rate`. A unit is a row unless `units` in
        `loading` names one for every row; then `rows_per_unit` rows of a sampled unit are drawn at random without
        replacement (all of them if it has fewer), and the engine clips their mean gradient once. A row is loaded the
        same whatever else is in its batch: `ShapeValidator` refuses padding to the longest row of a batch, and
        random numbers drawn while a row is loaded come from the step's secret and the row's index. Where several
        processes share the units, each is drawn by its one owner (`UnitPartition`).

    Edge cases:
        A batch may be empty; it still is a step. With `whole_units` all rows of a sampled unit are taken, for counts
        that look at a unit once and bound it as a whole.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        sampling_rate: float,
        randomness: PrivateRandomness,
        loading: DataConfig = DataConfig(),  # noqa: B008
        shapes: ShapeValidator | None = None,
        partition: UnitPartition = UnitPartition(),  # noqa: B008
        whole_units: bool = False,
    ) -> None:
        rows = len(cast("Any", dataset))
        rows_per_unit, most = loading.rows_per_unit, loading.max_physical_batch
        if rows == 0:
            raise DataError("the data set is empty; give at least one row")
        if not 0 < sampling_rate <= 1:
            raise PrivacyError(f"sampling_rate: got {sampling_rate}, expected a number in (0, 1]")
        if rows_per_unit < 1:
            raise DataError(f"rows_per_unit: got {rows_per_unit}, expected a whole number >= 1")
        if rows_per_unit > 1 and loading.unit_ids is None:
            raise DataError(
                f"rows_per_unit: got {rows_per_unit}, but each row is a unit of its own; give units, or drop it"
            )
        if most is not None and most < rows_per_unit:
            raise DataError(
                f"max_physical_batch: got {most}, expected at least rows_per_unit={rows_per_unit}"
            )
        self._fetch = RowLoader(dataset, loading.collate_fn)
        self._rate = sampling_rate
        self._randomness = randomness
        self._index = None if loading.unit_ids is None else _UnitIndex.of(loading.unit_ids, rows)
        self._held = rows if self._index is None else len(self._index.sizes)
        self._rows_per_unit = rows_per_unit
        self._whole_units = whole_units and self._index is not None
        # public, so that no unit's size decides how the others are cut
        rows_at_most = max(rows_per_unit, ROWS_OF_A_WHOLE_UNIT if self._whole_units else 1)
        self._most_units = None if most is None else max(1, most // rows_at_most)
        self._workers = loading.num_workers
        self._shapes = shapes or ShapeValidator()
        self._partition = partition
        self._bits = block_bits(sampling_rate, self.unit_count, self._most_units)

    @property
    def unit_count(self) -> int:
        """The number N of units, over all processes that share them."""
        sizes = self._partition.shard_sizes
        return self._held if sizes is None else sum(sizes)

    @property
    def expected_batch_size(self) -> float:
        """Units a batch holds on average: rate times N. Public."""
        return self._rate * self.unit_count

    def batches(self, first_step: int, stop_step: int) -> Iterator[LogicalBatch]:
        """The batches of steps first_step, ..., stop_step - 1, loaded as they are consumed."""
        keys = ((step, self._partition.key(step)) for step in range(first_step, stop_step))
        steps: Iterator[tuple[int, StepKey, list[_Chunk]]] = (
            (step, self._randomness.secret(key), self._draw_chunks(key)) for step, key in keys
        )
        loaded: Iterator[Batch] | None = None
        if self._workers:
            steps, ahead = tee(steps)
            asked = ((chunk.rows, secret) for _, secret, chunks in ahead for chunk in chunks)
            loader: DataLoader[Any] = DataLoader(
                self._fetch, batch_size=None, sampler=asked, num_workers=self._workers, collate_fn=_as_it_is
            )
            loaded = (rows for rows in loader)
        for step, secret, chunks in steps:
            rows = loaded or map(self._fetch, [chunk.rows for chunk in chunks], repeat(secret))
            micro_batches = map(self._micro_batch, chunks, rows, repeat(secret))
            yield LogicalBatch(step, secret, micro_batches)
            if loaded:
                deque(micro_batches, maxlen=0)  # what was not consumed, so that workers keep in step

    def _draw_chunks(self, key: tuple[int, ...]) -> list[_Chunk]:
        coins = self._randomness.bernoulli(self._rate, self._held, key)
        known = np.flatnonzero(coins)
        mine = self._partition.is_own(known, self._bits)
        chosen = known[mine]
        if self._index is None:
            return [_Chunk(chosen[run], None) for run in self._cut(chosen)]
        if self._rows_per_unit == 1 and not self._whole_units:
            offsets = self._randomness.below(self._index.sizes[known], key)[mine]
            rows = self._index.order[self._index.starts[chosen] + offsets]
            return [_Chunk(rows[run], None) for run in self._cut(chosen)]
        return self._draw_several(known, mine, key)

    def _cut(self, chosen: Indices) -> list[slice]:
        return self._partition.split(chosen, self._bits, self._most_units)

    def _draw_several(
        self, known: Indices, mine: npt.NDArray[np.bool_], key: tuple[int, ...]
    ) -> list[_Chunk]:
        """Up to m rows of every chosen unit; a unit never crosses a micro-batch, and the cuts change no draw."""
        assert self._index is not None
        sizes = self._index.sizes[known]
        owner = np.repeat(np.arange(len(known)), sizes)
        within = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        rows = self._index.order[np.repeat(self._index.starts[known], sizes) + within]
        lottery = self._randomness.below(np.full(len(rows), 2**52), key)
        kept = np.lexsort((lottery, owner))
        if not self._whole_units:
            kept = kept[within < self._rows_per_unit]
        kept = kept[mine[owner[kept]]]
        rows, owner = rows[kept], (np.cumsum(mine) - 1)[owner[kept]]
        chunks = []
        for run in self._cut(known[mine]):
            span = slice(*np.searchsorted(owner, [run.start, run.stop]))
            chunks.append(_Chunk(rows[span], owner[span] - run.start))
        return chunks

    def _micro_batch(self, chunk: _Chunk, rows: Batch, secret: StepKey) -> MicroBatch:
        self._shapes.check(rows, len(chunk.rows))
        units = None if chunk.units is None else torch.from_numpy(chunk.units)
        seed = secret.model_seed(int(chunk.rows[0]) if len(chunk.rows) else None)
        return MicroBatch(rows, units, seed)


def _as_it_is(rows: Batch) -> Batch:
    return rows


@dataclass(frozen=True, slots=True)
class _UnitIndex:
    """Rows grouped by unit: unit u owns order[starts[u] : starts[u] + sizes[u]]."""

    order: Indices
    starts: Indices
    sizes: Indices

    @classmethod
    def of(cls, units: Tensor | Sequence[int], rows: int) -> _UnitIndex:
        ids = np.asarray(units)
        if ids.shape != (rows,):
            raise DataError(f"units: got shape {ids.shape}, expected one id for each of {rows} rows")
        refuse_missing_ids(ids, "units")
        _, inverse, sizes = np.unique(ids, return_inverse=True, return_counts=True)
        order = np.argsort(inverse, kind="stable").astype(np.int64)
        sizes = sizes.astype(np.int64)
        return cls(order, np.cumsum(sizes) - sizes, sizes)
