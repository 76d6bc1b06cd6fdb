"""Poisson sampling over rows or units: every unit joins each step by its own coin, of exactly the planned rate."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, pairwise
from typing import Any, Protocol, cast, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from sparsedp.batch import MicroBatch, Rows
from sparsedp.errors import DataError, PrivacyError
from sparsedp.loading import Fetcher, FixedShapes, Indices, Loading
from sparsedp.randomness import PrivateRandomness, StepSecret


def cut(units: npt.NDArray[np.int64], most: int | None) -> list[slice]:
    """Cut increasing unit numbers into runs of at most `most`; without a limit, one run. No run is empty.

    Ranges of numbers with the same first binary digits are halved until no more than `most` units are in one.

    **Privacy.** A unit that is added joins one run, or makes two of it; no other run changes. So each micro-batch's
    sum may be rounded by itself (`privacy.mechanism.Grid`). The rule knows neither N nor how many machines share
    the work.
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


Numbers = npt.NDArray[np.int64]

BLOCKS, FEWEST, MOST = 8, 32, 512
"""A batch has 8 to 16 blocks on average; more if they had over 512 units each, fewer if they had less than 32."""


class Share(Protocol):
    """The part of a step's units that this process draws and works on; `bits` is that of `block_bits`."""

    def total(self, units: int) -> int:
        """N, over all processes, where this one holds so many."""
        ...

    def key(self, step: int) -> tuple[int, ...]:
        """What names a step's draws here; where two processes draw for different units, they have different names."""
        ...

    def draw(self, randomness: PrivateRandomness, rate: float, units: int, bits: int, step: int) -> Numbers:
        """The units that take part, as far as this process has thrown their coins: its own, maybe others'."""
        ...

    def own(self, units: Numbers, bits: int) -> npt.NDArray[np.bool_]:
        """Which of these units are this process's to work on."""
        ...

    def cut(self, units: Numbers, bits: int, most: int | None) -> list[slice]:
        """Its own units as micro-batches."""
        ...


@final
class Everything:
    """One process has all units, and cuts its batches as coarsely as memory allows."""

    def total(self, units: int) -> int:
        """All it holds."""
        return units

    def key(self, step: int) -> tuple[int, ...]:
        """The step."""
        return (step,)

    def draw(self, randomness: PrivateRandomness, rate: float, units: int, bits: int, step: int) -> Numbers:
        """Everybody's coin."""
        return np.flatnonzero(randomness.bernoulli(rate, units, key=(step,)))

    def own(self, units: Numbers, bits: int) -> npt.NDArray[np.bool_]:
        """All."""
        return np.ones(len(units), dtype=np.bool_)

    def cut(self, units: Numbers, bits: int, most: int | None) -> list[slice]:
        """As `cutting.cut` says."""
        return cut(units, most)


@final
@dataclass(frozen=True, slots=True)
class Blocks:
    """Every process holds all units, and takes every so-manieth block of unit numbers.

    A block is 2^b consecutive numbers, b from sampling rate and N (`block_bits`). No micro-batch crosses a block, so
    the micro-batches of all processes together are the same however many processes there are.

    **Privacy.** A unit's coin is thrown by its owner. With a seed, all throw the same coins for everybody and keep
    their own units; without one, a process throws coins for its own units and for nobody else.
    """

    rank: int
    ranks: int

    def total(self, units: int) -> int:
        """All it holds."""
        return units

    def key(self, step: int) -> tuple[int, ...]:
        """The step: seeded draws are everybody's."""
        return (step,)

    def draw(self, randomness: PrivateRandomness, rate: float, units: int, bits: int, step: int) -> Numbers:
        """Its own units' coins; with a seed, everybody's."""
        if not randomness.for_release:
            return np.flatnonzero(randomness.bernoulli(rate, units, key=(step,)))
        mine = _own_numbers(self.rank, self.ranks, bits, units)
        return mine[randomness.bernoulli(rate, len(mine), key=(step,))]

    def own(self, units: Numbers, bits: int) -> npt.NDArray[np.bool_]:
        """Those in its blocks."""
        mine: npt.NDArray[np.bool_] = (units >> bits) % self.ranks == self.rank
        return mine

    def cut(self, units: Numbers, bits: int, most: int | None) -> list[slice]:
        """Block by block, each as `cutting.cut` says."""
        return _by_block(units, bits, most)


@final
@dataclass(frozen=True, slots=True)
class Shard:
    """Every process holds units that no other has; they are numbered through, process by process.

    Attributes:
        rank: whose shard this is.
        sizes: how many units each process holds.
    """

    rank: int
    sizes: tuple[int, ...]

    def total(self, units: int) -> int:
        """All shards together."""
        return sum(self.sizes)

    def key(self, step: int) -> tuple[int, ...]:
        """Step and shard: rows of the same number in two shards are not the same."""
        return (step, _SHARD_DRAWS, self.rank)

    def draw(self, randomness: PrivateRandomness, rate: float, units: int, bits: int, step: int) -> Numbers:
        """The coins of what it holds."""
        return np.flatnonzero(randomness.bernoulli(rate, units, key=self.key(step)))

    def own(self, units: Numbers, bits: int) -> npt.NDArray[np.bool_]:
        """All that it holds."""
        return np.ones(len(units), dtype=np.bool_)

    def cut(self, units: Numbers, bits: int, most: int | None) -> list[slice]:
        """Block by block of its own numbers."""
        return _by_block(units, bits, most)


_SHARD_DRAWS = 11
"""Keeps the draws of shards apart from others of a seeded run."""

EVERYTHING = Everything()


def block_bits(rate: float, total: int, most: int | None) -> int:
    """b, where blocks of 2^b unit numbers share the work: a public rule that does not know how many processes do.

    `most` units at once are all that fits into memory; then a block gives no more on average.
    """
    units = max(FEWEST, min(rate * total / BLOCKS, MOST))
    return int(min(units, most or units) / rate).bit_length() - 1


@cache
def _own_numbers(rank: int, ranks: int, bits: int, units: int) -> Numbers:
    starts: Sequence[int] = range(rank << bits, units, ranks << bits)
    parts = [np.arange(start, min(start + (1 << bits), units)) for start in starts]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def _by_block(units: Numbers, bits: int, most: int | None) -> list[slice]:
    edges = np.flatnonzero(np.diff(units >> bits)) + 1
    bounds = [0, *edges.tolist(), len(units)] if len(units) else []
    runs = []
    for start, stop in pairwise(bounds):
        runs += [slice(start + run.start, start + run.stop) for run in cut(units[start:stop], most)]
    return runs


_Asked = tuple[Indices, StepSecret]


@dataclass(frozen=True, slots=True)
class LogicalBatch:
    """One step's batch, as the micro-batches it is processed in; may be empty. Size and secret are private."""

    step: int
    secret: StepSecret = field(repr=False)
    micro_batches: Iterator[MicroBatch] = field(repr=False)
    _ahead: deque[MicroBatch] = field(default_factory=deque, repr=False, init=False)

    def __iter__(self) -> Iterator[MicroBatch]:
        return chain(self._loaded(), self.micro_batches)

    def load_ahead(self) -> tuple[MicroBatch, ...]:
        """Load all of it now, and keep it for the step."""
        self._ahead.extend(self.micro_batches)
        return tuple(self._ahead)

    def _loaded(self) -> Iterator[MicroBatch]:
        while self._ahead:
            yield self._ahead.popleft()


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Row indices of one micro-batch, and the unit each belongs to when a unit may have several."""

    rows: Indices
    units: Indices | None


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Who takes part in a step, and the secret that their random numbers come from."""

    step: int
    secret: StepSecret
    chunks: list[_Chunk]


ROWS_OF_A_WHOLE_UNIT = 32
"""Rows that a unit is taken to have where memory is planned for whole ones."""


class PoissonSampler:
    """Draws each step's batch from a map-style data set.

    **Privacy.** Each unit is included independently with probability `sampling_rate`. A unit is a row unless `units`
    in `loading` names one for every row; then `rows_per_unit` rows of a sampled unit are drawn at random without
    replacement (all of them if it has fewer), and the engine clips their mean gradient once. A row is loaded the same
    whatever else is in its batch: `FixedShapes` refuses padding to the longest row of a batch, and random numbers
    drawn while a row is loaded come from the step's secret and the row's index. Where several processes share the
    units, each is drawn by its one owner (`sampling.sharing`).
    **Edge cases.** A batch may be empty; it still is a step. With `whole_units` all rows of a sampled unit are taken,
    for counts that look at a unit once and bound it as a whole.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        sampling_rate: float,
        randomness: PrivateRandomness,
        loading: Loading = Loading(),  # noqa: B008
        shapes: FixedShapes | None = None,
        share: Share = EVERYTHING,
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
        if rows_per_unit > 1 and loading.units is None:
            raise DataError(
                f"rows_per_unit: got {rows_per_unit}, but each row is a unit of its own; give units, or drop it"
            )
        if most is not None and most < rows_per_unit:
            raise DataError(
                f"max_physical_batch: got {most}, expected at least rows_per_unit={rows_per_unit}"
            )
        self._fetch = Fetcher(dataset, loading.collate)
        self._rate = sampling_rate
        self._randomness = randomness
        self._index = None if loading.units is None else _UnitIndex.of(loading.units, rows)
        self._rows = rows
        self._rows_per_unit = rows_per_unit
        self._whole_units = whole_units and self._index is not None
        self._max_physical = most
        self._workers = loading.workers
        self._shapes = shapes or FixedShapes()
        self._share = share
        self._bits = block_bits(sampling_rate, self.unit_count, self._most_units)

    @property
    def unit_count(self) -> int:
        """The number N of units, over all processes that share them."""
        return self._share.total(self._held)

    @property
    def _held(self) -> int:
        return self._rows if self._index is None else self._index.count

    @property
    def _most_units(self) -> int | None:
        """Most units at once. Public, so that no unit's size decides how the others are cut."""
        if self._max_physical is None:
            return None
        if self._whole_units:
            return max(1, self._max_physical // max(self._rows_per_unit, ROWS_OF_A_WHOLE_UNIT))
        return self._max_physical // self._rows_per_unit

    @property
    def expected_batch_size(self) -> float:
        """Units a batch holds on average: rate times N. Public."""
        return self._rate * self.unit_count

    def batches(self, first_step: int, stop_step: int) -> Iterator[LogicalBatch]:
        """The batches of steps first_step, ..., stop_step - 1, loaded as they are consumed."""
        if self._workers == 0:
            for step in range(first_step, stop_step):
                drawn = self._draw(step)
                yield LogicalBatch(step, drawn.secret, self._load(drawn))
        else:
            yield from self._batches_from_workers(first_step, stop_step)

    def _draw(self, step: int) -> _Drawn:
        secret = self._randomness.secret(key=self._share.key(step))
        return _Drawn(step, secret, self._draw_chunks(step))

    def _draw_chunks(self, step: int) -> list[_Chunk]:
        known = self._share.draw(self._randomness, self._rate, self._held, self._bits, step)
        mine = self._share.own(known, self._bits)
        chosen = known[mine]
        if self._index is None:
            return [_Chunk(chosen[run], None) for run in self._cut(chosen)]
        if self._rows_per_unit == 1 and not self._whole_units:
            offsets = self._randomness.below(self._index.sizes[known], key=self._share.key(step))[mine]
            rows = self._index.order[self._index.starts[chosen] + offsets]
            return [_Chunk(rows[run], None) for run in self._cut(chosen)]
        return self._draw_several(known, mine, step)

    def _cut(self, chosen: Indices) -> list[slice]:
        return self._share.cut(chosen, self._bits, self._most_units)

    def _draw_several(self, known: Indices, mine: npt.NDArray[np.bool_], step: int) -> list[_Chunk]:
        """Up to m rows of every chosen unit; a unit never crosses a micro-batch, and the cuts change no draw."""
        assert self._index is not None
        sizes = self._index.sizes[known]
        owner = np.repeat(np.arange(len(known)), sizes)
        within = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        rows = self._index.order[np.repeat(self._index.starts[known], sizes) + within]
        lottery = self._randomness.below(np.full(len(rows), 2**52), key=self._share.key(step))
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

    def _load(self, drawn: _Drawn) -> Iterator[MicroBatch]:
        for chunk in drawn.chunks:
            yield self._micro_batch(self._fetch(chunk.rows, drawn.secret), chunk, drawn.secret)

    def _micro_batch(self, rows: Rows, chunk: _Chunk, secret: StepSecret) -> MicroBatch:
        self._shapes.check(rows, len(chunk.rows))
        units = None if chunk.units is None else torch.from_numpy(chunk.units)
        seed = secret.model_seed(int(chunk.rows[0]) if len(chunk.rows) else None)
        return MicroBatch(rows, units, seed)

    def _batches_from_workers(self, first_step: int, stop_step: int) -> Iterator[LogicalBatch]:
        schedule = _Schedule(self, first_step, stop_step)
        loader: DataLoader[Any] = DataLoader(
            _Fetching(self._fetch),
            batch_size=None,
            sampler=schedule,
            num_workers=self._workers,
            collate_fn=_as_it_is,
        )
        loaded = iter(loader)

        def load(drawn: _Drawn) -> Iterator[MicroBatch]:
            for chunk in drawn.chunks:
                yield self._micro_batch(next(loaded), chunk, drawn.secret)

        for _ in range(first_step, stop_step):
            drawn = schedule.take()
            micro_batches = load(drawn)
            yield LogicalBatch(drawn.step, drawn.secret, micro_batches)
            for _ in micro_batches:
                pass


@dataclass(frozen=True, slots=True)
class _Fetching(Dataset[Any]):
    """What a worker runs: row indices of a micro-batch and the secret in, rows out, exactly as without workers."""

    fetch: Fetcher

    def __getitem__(self, asked: _Asked) -> Rows:
        return self.fetch(*asked)


def _as_it_is(rows: Rows) -> Rows:
    return rows


class _Schedule(Sampler[_Asked]):
    """Hands row indices to the workers, running ahead, and remembers which steps they belong to."""

    def __init__(self, sampler: PoissonSampler, first_step: int, stop_step: int) -> None:
        self._draws = (sampler._draw(step) for step in range(first_step, stop_step))
        self._pending: deque[_Drawn] = deque()

    def __iter__(self) -> Iterator[_Asked]:
        for drawn in self._draws:
            self._pending.append(drawn)
            for chunk in drawn.chunks:
                yield chunk.rows, drawn.secret

    def take(self) -> _Drawn:
        """What the next step drew. The loader asks for indices ahead of the steps, so they were drawn already."""
        if not self._pending:
            raise RuntimeError("the workers' schedule is behind the steps; this is a bug in sparsedp")
        return self._pending.popleft()


@dataclass(frozen=True, slots=True)
class _UnitIndex:
    """Rows grouped by unit: unit u owns order[starts[u] : starts[u] + sizes[u]]."""

    order: Indices
    starts: Indices
    sizes: Indices

    @property
    def count(self) -> int:
        return len(self.sizes)

    @classmethod
    def of(cls, units: Tensor | Sequence[int], rows: int) -> _UnitIndex:
        ids = np.asarray(units)
        if ids.shape != (rows,):
            raise DataError(f"units: got shape {ids.shape}, expected one id for each of {rows} rows")
        if ids.dtype.kind == "f" and np.isnan(ids).any():
            raise DataError("units: an id is NaN; every row needs a unit id (give each unknown its own)")
        _, inverse, sizes = np.unique(ids, return_inverse=True, return_counts=True)
        order = np.argsort(inverse, kind="stable").astype(np.int64)
        sizes = sizes.astype(np.int64)
        return cls(order, np.cumsum(sizes) - sizes, sizes)
