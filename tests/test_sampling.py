"""Poisson sampling: the exact rate, whole units, the same batches however they are loaded and by whom."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from torch.utils.data import TensorDataset

from sparsedp.errors import DataError, PrivacyError
from sparsedp.loading import DataConfig, ShapeValidator
from sparsedp.randomness import SeededRandomness, SystemRandomness
from sparsedp.sampling import PoissonSampler, UnitPartition, split_microbatches
from sparsedp_experiments.data import Dense, Split

ALARM = 1e-9
"""False-alarm rate of each statistical test here; there are fewer than twenty."""
LIMIT = 9.0
"""In standard deviations: a fair coin passes it for one of two million pairs once in 10^12."""
SOURCES = pytest.mark.parametrize("seed", [None, 0], ids=["system", "seeded"])


def sampler(
    size: int,
    rate: float,
    seed: int | None = 0,
    *,
    first: int = 0,
    partition: UnitPartition = UnitPartition(),  # noqa: B008
    whole_units: bool = False,
    **loading: object,
) -> PoissonSampler:
    """Of rows that are their numbers."""
    return PoissonSampler(
        TensorDataset(torch.arange(first, first + size)),
        sampling_rate=rate,
        randomness=SystemRandomness() if seed is None else SeededRandomness(seed),
        loading=DataConfig(**loading),
        partition=partition,
        whole_units=whole_units,
    )


def micro_batches(one: PoissonSampler, steps: int, first: int = 0) -> list[list[tuple[int, ...]]]:
    """The rows of every micro-batch of every step."""
    return [[tuple(micro.rows[0].tolist()) for micro in batch] for batch in one.batches(first, first + steps)]


def drawn(one: PoissonSampler, steps: int, first: int = 0) -> list[list[int]]:
    """The rows of every step."""
    return [[row for micro in step for row in micro] for step in micro_batches(one, steps, first)]


def assert_poisson(taken: np.ndarray, rate: float) -> None:
    """Coins [steps, rows] of one rate, independent of each other."""
    steps, rows = taken.shape
    assert taken.max() == 1  # nobody is taken twice
    assert stats.binomtest(int(taken.sum()), taken.size, rate).pvalue > ALARM
    for axis, freedom in ((0, rows), (1, steps)):  # every row's count and every batch's size are binomial
        spread = taken.sum(axis) - taken.shape[axis] * rate
        chi2 = float((spread**2).sum()) / (taken.shape[axis] * rate * (1 - rate))
        assert 2 * min(stats.chi2.sf(chi2, freedom), stats.chi2.cdf(chi2, freedom)) > ALARM
    coins = taken.astype(np.float32) * 2 - 1
    if rate == 0.5:
        together = np.triu(coins.T @ coins / np.sqrt(steps), 1)
        assert float(np.abs(together).max()) < LIMIT


def taken_by(samplers: list[PoissonSampler], steps: int, rows: int) -> np.ndarray:
    """How often each row was taken at each step, over all samplers."""
    taken = np.zeros((steps, rows), dtype=int)
    for one in samplers:
        for step, members in enumerate(drawn(one, steps)):
            np.add.at(taken[step], members, 1)
    return taken


@SOURCES
@pytest.mark.parametrize(("rate", "steps", "rows"), [(0.02, 600, 300), (0.5, 400, 2000)])
def test_every_row_joins_every_step_at_exactly_the_rate_whatever_others_do(rate, steps, rows, seed):
    assert_poisson(taken_by([sampler(rows, rate, seed)], steps, rows), rate)


def test_steps_may_be_empty_can_start_anywhere_and_replay():
    whole = drawn(sampler(3, 0.05), 60)
    assert {0, 1} <= {len(rows) for rows in whole}
    assert drawn(sampler(3, 0.05), 20, first=40) == whole[40:]


@pytest.mark.parametrize(("rate", "most"), [(0.2, None), (0.2, 4), (0.02, None)])
def test_workers_load_the_batches_that_would_be_loaded_without_them(rate, most):
    alone, helped = (sampler(40, rate, max_physical_batch=most, num_workers=workers) for workers in (0, 2))
    assert micro_batches(alone, 8) == micro_batches(helped, 8)


def test_workers_keep_in_step_when_a_batch_is_not_consumed():
    alone, helped = (
        [
            next(iter(batch)).rows[0].tolist()
            for batch in sampler(40, 0.2, max_physical_batch=3, num_workers=workers).batches(0, 5)
        ]
        for workers in (0, 1)
    )
    assert alone == helped


@given(st.integers(1, 9), st.integers(0, 50))
@settings(max_examples=20)
def test_physical_batches_keep_to_the_limit_and_together_are_the_logical_one(most, seed):
    (whole,) = drawn(sampler(60, 0.3, seed), 1)
    (parts,) = micro_batches(sampler(60, 0.3, seed, max_physical_batch=most), 1)
    assert [row for part in parts for row in part] == whole
    assert all(0 < len(part) <= most for part in parts)


UNITS = np.array([5, 5, 5, 9, 2, 2, 7, 9, 9, 9, 2, 4])
"""Unit ids in any order: 5 has three rows, 9 four, 2 three, 7 and 4 one each."""


def by_units(rate: float, rows_per_unit: int, seed: int | None = 0, **more: object) -> PoissonSampler:
    return sampler(12, rate, seed, unit_ids=UNITS, rows_per_unit=rows_per_unit, **more)


@pytest.mark.parametrize("ids", [UNITS, torch.tensor(UNITS), [f"patient {unit}" for unit in UNITS]])
def test_units_are_counted_not_rows(ids):
    one = sampler(12, 0.5, unit_ids=ids)
    assert one.unit_count == 5
    assert one.expected_batch_size == 2.5


@SOURCES
@pytest.mark.parametrize(("rows_per_unit", "rate"), [(1, 0.5), (2, 1.0)])
def test_several_rows_of_a_unit_are_distinct_and_all_equally_likely(rows_per_unit, rate, seed):
    counts = np.zeros(12, dtype=np.int64)
    joined: Counter[int] = Counter()
    for rows in drawn(by_units(rate, rows_per_unit, seed), 3000):
        units = Counter(UNITS[rows].tolist())
        assert len(set(rows)) == len(rows)
        assert all(count == min(rows_per_unit, (unit == UNITS).sum()) for unit, count in units.items())
        counts[rows] += 1
        joined.update(units.keys())
    for unit, times in joined.items():
        assert stats.binomtest(times, 3000, rate).pvalue > ALARM
        mine = counts[unit == UNITS]
        assert len(mine) == 1 or stats.chisquare(mine).pvalue > ALARM


@given(st.integers(2, 4), st.integers(4, 9), st.integers(0, 100))
@settings(max_examples=30)
def test_a_unit_is_never_split_between_micro_batches(rows_per_unit, most, seed):
    batch = next(by_units(0.8, rows_per_unit, seed, max_physical_batch=most).batches(0, 1))
    seen: set[int] = set()
    for micro in batch:
        rows = micro.rows[0].tolist()
        assert len(rows) <= most
        units = set(UNITS[rows].tolist())
        assert not units & seen
        seen |= units
        assert int(micro.units[-1]) + 1 == len(units)


def test_whole_units_come_with_all_their_rows_in_cuts_that_know_no_units_size():
    uneven = torch.cat([torch.zeros(500, dtype=torch.int64), torch.arange(1, 41).repeat(3)])
    cuts = []
    for units in (uneven, torch.arange(len(uneven)) % 41):
        one = sampler(len(units), 1.0, unit_ids=units, max_physical_batch=1024, whole_units=True)
        (batch,) = one.batches(0, 1)
        parts = list(batch)
        assert sorted(row for part in parts for row in part.rows[0].tolist()) == list(range(len(units)))
        cuts.append([int(part.units[-1]) + 1 for part in parts])
    assert cuts[0] == cuts[1]
    assert sum(cuts[0]) == 41


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"size": 0, "rate": 0.5}, "empty"),
        ({"size": 5, "rate": 0.0}, "sampling_rate"),
        ({"size": 5, "rate": float("nan")}, "sampling_rate"),
        ({"size": 5, "rate": 0.5, "unit_ids": [0, 1]}, "one id for each of 5 rows"),
        ({"size": 2, "rate": 0.5, "unit_ids": [0.0, float("nan")]}, "missing"),
        ({"size": 5, "rate": 0.5, "rows_per_unit": 0}, "rows_per_unit"),
        ({"size": 5, "rate": 0.5, "rows_per_unit": 2}, "each row is a unit"),
        ({"size": 5, "rate": 0.5, "max_physical_batch": 0}, "max_physical"),
    ],
)
def test_misuse_is_refused_with_what_was_expected(given, complaint):
    with pytest.raises((DataError, PrivacyError), match=complaint):
        sampler(**given)


def test_a_logical_batch_does_not_show_its_size():
    batch = next(sampler(30, 0.5).batches(3, 4))
    assert repr(batch) == "LogicalBatch(step=3)"
    assert not hasattr(batch, "__len__")


# Shares of several ranks.


def runs(units: set[int], most: int | None) -> set[frozenset[int]]:
    ordered = np.array(sorted(units), dtype=np.int64)
    return {frozenset(ordered[run].tolist()) for run in split_microbatches(ordered, most)}


def test_a_full_run_is_halved_by_numbers_not_by_places():
    assert runs({0, 1, 2, 8}, 4) == {frozenset({0, 1, 2, 8})}
    assert runs({0, 1, 2, 8, 9}, 4) == {frozenset({0, 1, 2}), frozenset({8, 9})}
    assert runs({4, 5, 6, 7}, 3) == {frozenset({4, 5}), frozenset({6, 7})}
    assert runs(set(range(1000)), None) == {frozenset(range(1000))}
    assert runs(set(), None) == runs(set(), 3) == set()


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


SHARED = 700
PEOPLE = torch.arange(SHARED) % 230


def blocks_of(rank: int, ranks: int) -> UnitPartition:
    return UnitPartition(rank, ranks, in_blocks=True)


def shards(sizes: tuple[int, ...], rate: float, seed: int | None) -> list[PoissonSampler]:
    return [
        sampler(
            sizes[rank],
            rate,
            seed,
            first=sum(sizes[:rank]),
            partition=UnitPartition(rank, len(sizes), in_blocks=True, shard_sizes=sizes),
        )
        for rank in range(len(sizes))
    ]


def blocks(ranks: int, rate: float, seed: int | None, **more: object) -> list[PoissonSampler]:
    return [sampler(SHARED, rate, seed, partition=blocks_of(rank, ranks), **more) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("most", [None, 12])
@pytest.mark.parametrize(("units", "each"), [(None, 1), (PEOPLE, 1), (PEOPLE, 2)])
def test_with_a_seed_the_ranks_have_the_micro_batches_of_one_between_them(ranks, most, units, each):
    more = {"unit_ids": units, "rows_per_unit": each, "max_physical_batch": most}
    (alone,) = (micro_batches(one, 6) for one in blocks(1, 0.3, 5, **more))
    shares = [micro_batches(one, 6) for one in blocks(ranks, 0.3, 5, **more)]
    assert [Counter(chain.from_iterable(parts)) for parts in zip(*shares, strict=True)] == [
        *map(Counter, alone)
    ]
    assert all(any(step) for share in shares for step in share)
    whole = drawn(sampler(SHARED, 0.3, 5, **more), 6)
    assert [sorted(rows) for rows in whole] == [sorted(chain.from_iterable(step)) for step in alone]


@pytest.mark.parametrize(
    "make", [lambda: blocks(3, 0.5, None), lambda: blocks(4, 0.5, None), lambda: shards((100, 400, 200), 0.5, None)]
)  # fmt: skip
def test_the_union_over_ranks_is_poisson_without_a_seed(make):
    assert_poisson(taken_by(make(), 400, SHARED), 0.5)


def test_the_seeded_shards_of_one_run_throw_different_coins():
    one, other = (taken_by([shard], 40, 200) for shard in shards((100, 100), 0.5, 1))
    assert not (one[:, :100] == other[:, 100:]).all(1).any()


# How rows are fetched. What mixes them is refused: tests/validation/test_data.py.


class Doubled(TensorDataset):
    """A subclass with items of its own."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(2 * tensor for tensor in super().__getitem__(index))


PAIRS = TensorDataset(torch.arange(6.0).reshape(6, 1), torch.arange(6))


def targets(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor]:
    return (torch.stack([target for _, target in items]) + 100,)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("dataset", "collate", "expected"),
    [
        (Doubled(torch.arange(5.0)), None, [0, 2, 4, 6, 8]),
        (PAIRS, targets, list(range(100, 106))),
        (Split(Dense(torch.eye(6)), torch.arange(6)), targets, list(range(100, 106))),
    ],
    ids=["items of a subclass", "tensors with a collate", "rows_at with a collate"],
)
def test_what_could_be_gathered_at_once_goes_through_items_and_collate(dataset, collate, expected, workers):
    loading = DataConfig(collate_fn=collate, num_workers=workers)
    one = PoissonSampler(dataset, sampling_rate=1.0, randomness=SeededRandomness(0), loading=loading)
    (micro,) = next(one.batches(0, 1))
    assert micro.rows[0].tolist() == expected


@pytest.mark.parametrize("times", [0, 2])
def test_a_batch_with_more_or_fewer_rows_than_items_is_refused(times):
    """Two rows of one record would be clipped one by one, and add twice what a record may."""
    with pytest.raises(DataError, match="exactly one row of each item"):
        drawn(sampler(1, 1.0, collate_fn=lambda items: (torch.ones(times * len(items), 2),)), 1)


def test_a_plain_number_beside_the_tensors_may_not_change_either():
    shapes = ShapeValidator()
    shapes.check({"x": torch.zeros(2, 3), "longest": 3}, 2)
    shapes.check({"x": torch.zeros(4, 3), "longest": 3}, 4)
    with pytest.raises(PrivacyError, match="shape of a row"):
        shapes.check({"x": torch.zeros(2, 3), "longest": 2}, 2)
