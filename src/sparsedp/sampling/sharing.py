"""Whose units are whose when several processes draw one batch: a public rule, so that every unit has one owner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Protocol, final

import numpy as np
import numpy.typing as npt

from sparsedp.randomness import PrivateRandomness
from sparsedp.sampling.cutting import cut

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
        mine = _numbers(self.rank, self.ranks, bits, units)
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
def _numbers(rank: int, ranks: int, bits: int, units: int) -> Numbers:
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
