"""Ranks that share a batch: every unit has one owner and one coin; micro-batches do not know how many share."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from coin_checks import dependent_coins
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch.utils.data import TensorDataset

from sparsedp.loading import DataConfig
from sparsedp.randomness import SeededRandomness, SystemRandomness
from sparsedp.sampling import PoissonSampler, UnitPartition, block_bits

UNITS = 700
PEOPLE = torch.arange(UNITS) % 230


def blocks_of(rank, ranks):
    return UnitPartition(rank, ranks, in_blocks=True)


def shard(rank, sizes):
    return UnitPartition(rank, len(sizes), in_blocks=True, shard_sizes=sizes)


def sampler(partition, randomness, rate=0.5, units=None, rows_per_unit=1, rows=UNITS, first=0, most=None):
    return PoissonSampler(
        TensorDataset(torch.arange(first, first + rows)),
        sampling_rate=rate,
        randomness=randomness,
        partition=partition,
        loading=DataConfig(unit_ids=units, rows_per_unit=rows_per_unit, max_physical_batch=most),
    )


def micro_batches(one: PoissonSampler, steps: int) -> list[Counter]:
    """The micro-batches of every step, as the rows that are in them."""
    return [Counter(tuple(micro.rows[0].tolist()) for micro in batch) for batch in one.batches(0, steps)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("most", [None, 12])
@pytest.mark.parametrize(("units", "each"), [(None, 1), (PEOPLE, 1), (PEOPLE, 2)])
def test_with_a_seed_the_ranks_have_the_micro_batches_of_one_between_them(ranks, most, units, each):
    arguments = {"rate": 0.3, "units": units, "rows_per_unit": each, "most": most}
    alone = micro_batches(sampler(blocks_of(0, 1), SeededRandomness(5), **arguments), 6)
    shares = [
        micro_batches(sampler(blocks_of(rank, ranks), SeededRandomness(5), **arguments), 6)
        for rank in range(ranks)
    ]
    assert [sum(parts, Counter()) for parts in zip(*shares, strict=True)] == alone
    assert all(any(part) for part in shares)
    rows = [sorted(row for micro in step.elements() for row in micro) for step in alone]
    whole = micro_batches(sampler(UnitPartition(), SeededRandomness(5), **arguments), 6)
    assert rows == [sorted(row for micro in step.elements() for row in micro) for step in whole]


def taken_by(samplers: list[PoissonSampler], steps: int) -> np.ndarray:
    """How often each row was taken at each step, over all ranks."""
    taken = np.zeros((steps, UNITS), dtype=int)
    for one in samplers:
        for batch in one.batches(0, steps):
            for micro in batch:
                np.add.at(taken[batch.step], micro.rows[0].numpy(), 1)
    return taken


def blocks(ranks: int, rate: float) -> list[PoissonSampler]:
    return [sampler(blocks_of(rank, ranks), SystemRandomness(), rate) for rank in range(ranks)]


def shards(rate: float) -> list[PoissonSampler]:
    sizes = (100, 400, 200)
    return [
        sampler(shard(rank, sizes), SystemRandomness(), rate, rows=sizes[rank], first=sum(sizes[:rank]))
        for rank in range(3)
    ]


@pytest.mark.parametrize("make", [lambda q: blocks(3, q), lambda q: blocks(4, q), shards])
def test_the_union_over_ranks_is_poisson_without_a_seed(make):
    steps, rate = 400, 0.5
    taken = taken_by(make(rate), steps)
    assert taken.max() == 1  # nobody is owned twice
    counts = taken.sum(0)
    chi2 = float(((counts - steps * rate) ** 2 / (steps * rate * (1 - rate))).sum())
    assert 1e-6 < stats.chi2(UNITS).sf(chi2) < 1 - 1e-6
    sizes = taken.sum(1)  # binomial: independent units
    spread = float(((sizes - UNITS * rate) ** 2 / (UNITS * rate * (1 - rate))).sum())
    assert 1e-6 < stats.chi2(steps).sf(spread) < 1 - 1e-6
    assert dependent_coins(taken.__getitem__, steps) == []


def test_the_seeded_shards_of_one_run_throw_different_coins():
    sizes = (100, 100)
    drawn = [sampler(shard(rank, sizes), SeededRandomness(1), rows=100).batches(0, 40) for rank in range(2)]
    members = [[sorted(r for m in batch for r in m.rows[0].tolist()) for batch in one] for one in drawn]
    assert all(one != other for one, other in zip(*members, strict=True))


def test_a_shard_counts_the_units_of_all():
    one = sampler(shard(1, (300, 50)), SystemRandomness(), rate=0.1, rows=50)
    assert one.unit_count == 350
    assert one.expected_batch_size == 35


@given(
    st.sets(st.integers(0, 900), max_size=80),
    st.integers(0, 900),
    st.none() | st.integers(1, 12),
    st.integers(1, 7),
)
def test_one_more_unit_disturbs_one_micro_batch_at_most(units, newcomer, most, bits):
    def runs(members: set[int]) -> set[frozenset[int]]:
        ordered = np.array(sorted(members), dtype=np.int64)
        return {frozenset(ordered[run].tolist()) for run in blocks_of(0, 1).split(ordered, bits, most)}

    before, after = runs(units - {newcomer}), runs(units | {newcomer})
    assert len(before - after) <= 1
    assert 1 <= len(after - before) <= 2
    assert frozenset().union(*(after - before)) == frozenset().union({newcomer}, *(before - after))
    assert all(len({unit >> bits for unit in run}) == 1 for run in after)


@pytest.mark.parametrize(
    ("rate", "units", "most", "bits"),
    [
        (0.5, 700, None, 6),  # few units: 16 to 32 of them are worth a turn
        (0.01, 100_000, None, 13),  # a batch of 1,000: 8 to 16 turns
        (1.0, 10**6, None, 9),  # many: 256 to 512 at a time
        (0.01, 100_000, 40, 11),  # no more than fit into memory
        (1.0, 20, 1, 0),
    ],
)
def test_a_block_is_large_enough_to_be_worth_a_turn(rate, units, most, bits):
    assert block_bits(rate, units, most) == bits
    given = rate * (1 << bits)
    assert given <= (most or 512)
    assert given > min(16, (most or 16) / 2)
