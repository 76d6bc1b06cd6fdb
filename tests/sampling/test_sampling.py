"""Poisson sampling: the exact rate, whole units, the same batches however they are loaded; how rows are fetched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, TensorDataset

from sparsedp.batch import MicroBatch
from sparsedp.clipping import FlatClip
from sparsedp.errors import DataError, PrivacyError
from sparsedp.grad_sample import ENGINES, ClippedSumQuery
from sparsedp.loading import DataConfig, ShapeValidator
from sparsedp.parameters import Support
from sparsedp.randomness import SeededRandomness, SystemRandomness
from sparsedp.sampling import PoissonSampler, UnitPartition, block_bits, split_microbatches
from sparsedp_experiments.data import Dense, Split

LIMIT = 9.0
"""In standard deviations: a fair coin passes it for one of two million pairs once in 10^12."""


def dependent_coins(draw: Callable[[int], np.ndarray], steps: int = 400) -> list[tuple[int, int]]:
    """Pairs of units whose coins go together (or against each other), of all pairs there are.

    `draw(step)` gives one coin per unit, at a rate of a half.
    """
    coins = np.stack([draw(step) for step in range(steps)]).astype(np.float32) * 2 - 1
    together = coins.T @ coins / np.sqrt(steps)
    return [(int(i), int(j)) for i, j in np.argwhere(np.abs(np.triu(together, 1)) > LIMIT)]


ALARM = 1e-9
"""False-alarm rate of each statistical test here; there are fewer than twenty."""


class Numbers(Dataset):
    """Row i is the number i, as a pair, a dict or a plain tensor."""

    def __init__(self, size: int, form: str = "tensor") -> None:
        self.size, self.form = size, form

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> object:
        row = torch.tensor([float(index)])
        return {"tensor": row, "tuple": (row, index), "dict": {"inputs": row, "labels": index}}[self.form]


def rows_of(batch: MicroBatch) -> list[int]:
    rows = batch.rows
    numbers = (
        rows["inputs"] if isinstance(rows, dict) else rows[0] if isinstance(rows, (tuple, list)) else rows
    )
    return [int(number) for number in numbers.flatten()]


def drawn(sampler: PoissonSampler, steps: int) -> Iterator[list[int]]:
    """Row numbers of every step."""
    for batch in sampler.batches(0, steps):
        yield [row for micro in batch for row in rows_of(micro)]


def sampler(
    size: int, rate: float, seed: int | None = 0, form: str = "tensor", **more: object
) -> PoissonSampler:
    randomness = SystemRandomness() if seed is None else SeededRandomness(seed)
    return PoissonSampler(
        Numbers(size, form), sampling_rate=rate, randomness=randomness, loading=DataConfig(**more)
    )


@pytest.mark.parametrize("seed", [None, 0], ids=["system", "seeded"])
@pytest.mark.parametrize("rate", [0.02, 0.5])
def test_every_row_joins_every_step_at_exactly_the_rate(rate, seed):
    counts = np.zeros(100, dtype=np.int64)
    sizes = []
    for rows in drawn(sampler(100, rate, seed), 600):
        assert len(set(rows)) == len(rows)
        counts[rows] += 1
        sizes.append(len(rows))
    assert stats.binomtest(int(counts.sum()), 60_000, rate).pvalue > ALARM
    per_row = (counts - 600 * rate) ** 2 / (600 * rate * (1 - rate))
    assert stats.chi2.sf(per_row.sum(), df=100) > ALARM
    # Independent rows: the size of a batch is binomial, so its variance is 100 q (1 - q).
    spread = 599 * np.var(sizes, ddof=1) / (100 * rate * (1 - rate))
    assert 2 * min(stats.chi2.sf(spread, 599), stats.chi2.cdf(spread, 599)) > ALARM


def test_rows_are_independent_of_each_other():
    together = sum({0, 1} <= set(rows) for rows in drawn(sampler(2, 0.5), 4000))
    assert stats.binomtest(together, 4000, 0.25).pvalue > ALARM


def test_empty_batches_are_yielded_as_steps():
    batches = list(sampler(3, 0.05).batches(0, 60))
    assert [batch.step for batch in batches] == list(range(60))
    sizes = [len(list(batch)) for batch in batches]
    assert 0 in sizes
    assert 1 in sizes


def test_steps_can_start_anywhere_and_replay():
    whole = list(drawn(sampler(50, 0.3), 6))
    tail = [[row for micro in batch for row in rows_of(micro)] for batch in sampler(50, 0.3).batches(4, 6)]
    assert tail == whole[4:]
    assert whole[0] != whole[1]


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict"])
@pytest.mark.parametrize("most", [None, 4])
def test_workers_load_the_batches_that_would_be_loaded_without_them(form, most):
    alone, helped = (
        sampler(40, 0.2, form=form, max_physical_batch=most, num_workers=workers).batches(0, 6)
        for workers in (0, 2)
    )
    for one, other in zip(alone, helped, strict=True):
        assert one.step == other.step
        for mine, theirs in zip(one, other, strict=True):
            assert rows_of(mine) == rows_of(theirs)


def test_workers_keep_in_step_when_a_batch_is_not_consumed():
    helped = sampler(40, 0.2, max_physical_batch=3, num_workers=1)
    seen = [rows_of(next(iter(batch))) for batch in helped.batches(0, 5)]
    expected = [rows_of(next(iter(batch))) for batch in sampler(40, 0.2, max_physical_batch=3).batches(0, 5)]
    assert seen == expected


def test_workers_survive_empty_batches():
    assert list(drawn(sampler(20, 0.02, num_workers=1), 12)) == list(drawn(sampler(20, 0.02), 12))


@given(st.integers(1, 9), st.integers(0, 50))
@settings(max_examples=20)
def test_physical_batches_keep_to_the_limit_and_together_are_the_logical_one(most, seed):
    whole = next(drawn(sampler(60, 0.3, seed), 1))
    parts = [rows_of(micro) for micro in next(sampler(60, 0.3, seed, max_physical_batch=most).batches(0, 1))]
    assert [row for part in parts for row in part] == whole
    assert all(0 < len(part) <= most for part in parts)


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("units", [None, [i // 3 for i in range(60)]], ids=["rows", "units"])
def test_the_physical_batch_size_changes_memory_and_not_the_sum(kind, units):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    engine = ENGINES[kind](model, lambda model, rows: model(rows.double() / 10).square().sum(1))
    query = ClippedSumQuery(Support.full(engine.layout.dimension), FlatClip(0.5))
    settings = {"unit_ids": units, "rows_per_unit": 1 if units is None else 2}
    whole, *others = (
        engine.clipped_sum(next(sampler(60, 0.5, max_physical_batch=most, **settings).batches(0, 1)), query)
        for most in (None, 2, 7, 100)
    )
    for other in others:
        torch.testing.assert_close(other, whole, rtol=1e-9, atol=1e-12)


UNITS = [5, 5, 5, 9, 2, 2, 7, 9, 9, 9, 2, 4]
"""Unit ids in any order: 5 has three rows, 9 four, 2 three, 7 and 4 one each."""


def by_units(rate: float, rows_per_unit: int, seed: int | None = 0, **more: object) -> PoissonSampler:
    return sampler(12, rate, seed, unit_ids=UNITS, rows_per_unit=rows_per_unit, **more)


def test_units_are_counted_not_rows():
    assert by_units(0.5, 1).unit_count == 5
    assert by_units(0.5, 1).expected_batch_size == 2.5
    assert sampler(12, 0.5).expected_batch_size == 6


@pytest.mark.parametrize("seed", [None, 0], ids=["system", "seeded"])
def test_a_sampled_unit_gives_one_row_each_as_often_as_the_others(seed):
    counts = np.zeros(12, dtype=np.int64)
    joined = {unit: 0 for unit in set(UNITS)}
    for rows in drawn(by_units(0.5, 1, seed), 3000):
        units = [UNITS[row] for row in rows]
        assert len(set(units)) == len(units)
        counts[rows] += 1
        for unit in units:
            joined[unit] += 1
    for unit, times in joined.items():
        assert stats.binomtest(times, 3000, 0.5).pvalue > ALARM
        mine = counts[np.equal(UNITS, unit)]
        assert len(mine) == 1 or stats.chisquare(mine).pvalue > ALARM


def test_several_rows_of_a_unit_are_distinct_and_all_equally_likely():
    counts = np.zeros(12, dtype=np.int64)
    for batch in by_units(1.0, 2).batches(0, 2000):
        (micro,) = batch
        rows = rows_of(micro)
        counts[rows] += 1
        for number in set(micro.units.tolist()):
            mine = [row for row, unit in zip(rows, micro.units.tolist(), strict=True) if unit == number]
            (unit,) = {UNITS[row] for row in mine}
            assert len(set(mine)) == len(mine) == min(2, UNITS.count(unit))
    for unit in (5, 9, 2):
        assert stats.chisquare(counts[np.equal(UNITS, unit)]).pvalue > ALARM


@given(st.integers(2, 4), st.integers(4, 9), st.integers(0, 100))
@settings(max_examples=30)
def test_a_unit_is_never_split_between_micro_batches(rows_per_unit, most, seed):
    batch = next(by_units(0.8, rows_per_unit, seed, max_physical_batch=most).batches(0, 1))
    seen: set[int] = set()
    for micro in batch:
        rows = rows_of(micro)
        assert len(rows) <= most
        units = {UNITS[row] for row in rows}
        assert not units & seen
        seen |= units
        assert int(micro.units[-1]) + 1 == len(units)


def test_unit_ids_may_be_a_tensor_or_text():
    as_text = sampler(12, 0.5, unit_ids=[f"patient {unit}" for unit in UNITS])
    as_tensor = sampler(12, 0.5, unit_ids=torch.tensor(UNITS))
    assert as_text.unit_count == as_tensor.unit_count == 5


@pytest.mark.parametrize(
    ("make", "error", "complaint"),
    [
        (lambda: sampler(0, 0.5), DataError, "empty"),
        (lambda: sampler(5, 0.0), PrivacyError, "sampling_rate"),
        (lambda: sampler(5, 1.5), PrivacyError, "sampling_rate"),
        (lambda: sampler(5, float("nan")), PrivacyError, "sampling_rate"),
        (lambda: sampler(5, 0.5, unit_ids=[0, 1]), DataError, "one id for each of 5 rows"),
        (lambda: sampler(2, 0.5, unit_ids=[0.0, float("nan")]), DataError, "NaN"),
        (lambda: sampler(5, 0.5, rows_per_unit=0), DataError, "rows_per_unit"),
        (lambda: sampler(5, 0.5, rows_per_unit=2), DataError, "each row is a unit"),
        (
            lambda: sampler(5, 0.5, unit_ids=[0] * 5, rows_per_unit=3, max_physical_batch=2),
            DataError,
            "max_physical",
        ),
        (lambda: sampler(5, 0.5, max_physical_batch=0), DataError, "max_physical"),
    ],
)
def test_misuse_is_refused_with_what_was_expected(make, error, complaint):
    with pytest.raises(error, match=complaint):
        make()


def test_a_logical_batch_does_not_show_its_size():
    batch = next(sampler(30, 0.5).batches(3, 4))
    assert repr(batch) == "LogicalBatch(step=3)"
    assert not hasattr(batch, "__len__")


def test_whole_units_come_with_all_their_rows_in_cuts_that_know_no_units_size():
    units = torch.cat([torch.zeros(500, dtype=torch.int64), torch.arange(1, 41).repeat(3)])
    sampler = PoissonSampler(
        Numbers(len(units)),
        sampling_rate=1.0,
        randomness=SeededRandomness(0),
        loading=DataConfig(unit_ids=units, max_physical_batch=1024),
        whole_units=True,
    )
    (batch,) = sampler.batches(0, 1)
    parts = list(batch)
    assert sorted(row for part in parts for row in rows_of(part)) == list(range(len(units)))
    assert sum(int(part.units[-1]) + 1 for part in parts) == 41
    few = PoissonSampler(
        Numbers(len(units)),
        sampling_rate=1.0,
        randomness=SeededRandomness(0),
        loading=DataConfig(unit_ids=torch.arange(len(units)) % 41, max_physical_batch=1024),
        whole_units=True,
    )
    (other,) = few.batches(0, 1)
    assert [int(p.units[-1]) + 1 for p in other] == [int(p.units[-1]) + 1 for p in parts]


COINS, STEPS = 2000, 400


def batches(randomness: object) -> np.ndarray:
    """Who is in each of the sampler's batches."""
    sampler = PoissonSampler(TensorDataset(torch.arange(COINS)), sampling_rate=0.5, randomness=randomness)
    taken = np.zeros((STEPS, COINS), dtype=bool)
    for batch in sampler.batches(0, STEPS):
        for micro in batch:
            taken[batch.step, micro.rows[0].numpy()] = True
    return taken


@pytest.mark.parametrize("randomness", [SystemRandomness(), SeededRandomness(3)], ids=["system", "seeded"])
def test_no_two_units_share_a_coin(randomness):
    taken = batches(randomness)
    assert dependent_coins(taken.__getitem__, STEPS) == []


def runs(units: set[int], most: int | None) -> set[frozenset[int]]:
    ordered = np.array(sorted(units), dtype=np.int64)
    return {frozenset(ordered[run].tolist()) for run in split_microbatches(ordered, most)}


def test_a_full_run_is_halved_by_numbers_not_by_places():
    assert runs({0, 1, 2, 8}, 4) == {frozenset({0, 1, 2, 8})}
    assert runs({0, 1, 2, 8, 9}, 4) == {frozenset({0, 1, 2}), frozenset({8, 9})}
    assert runs({4, 5, 6, 7}, 3) == {frozenset({4, 5}), frozenset({6, 7})}


def test_without_a_limit_there_is_one_run_and_of_nothing_none():
    assert runs(set(range(1000)), None) == {frozenset(range(1000))}
    assert runs(set(), None) == runs(set(), 3) == set()
    with pytest.raises(ValueError, match="most"):
        split_microbatches(np.array([1, 2]), 0)


SHARED = 700
PEOPLE = torch.arange(SHARED) % 230


def blocks_of(rank, ranks):
    return UnitPartition(rank, ranks, in_blocks=True)


def shard(rank, sizes):
    return UnitPartition(rank, len(sizes), in_blocks=True, shard_sizes=sizes)


def rank_sampler(
    partition, randomness, rate=0.5, units=None, rows_per_unit=1, rows=SHARED, first=0, most=None
):
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
    alone = micro_batches(rank_sampler(blocks_of(0, 1), SeededRandomness(5), **arguments), 6)
    shares = [
        micro_batches(rank_sampler(blocks_of(rank, ranks), SeededRandomness(5), **arguments), 6)
        for rank in range(ranks)
    ]
    assert [sum(parts, Counter()) for parts in zip(*shares, strict=True)] == alone
    assert all(any(part) for part in shares)
    rows = [sorted(row for micro in step.elements() for row in micro) for step in alone]
    whole = micro_batches(rank_sampler(UnitPartition(), SeededRandomness(5), **arguments), 6)
    assert rows == [sorted(row for micro in step.elements() for row in micro) for step in whole]


def taken_by(samplers: list[PoissonSampler], steps: int) -> np.ndarray:
    """How often each row was taken at each step, over all ranks."""
    taken = np.zeros((steps, SHARED), dtype=int)
    for one in samplers:
        for batch in one.batches(0, steps):
            for micro in batch:
                np.add.at(taken[batch.step], micro.rows[0].numpy(), 1)
    return taken


def blocks(ranks: int, rate: float) -> list[PoissonSampler]:
    return [rank_sampler(blocks_of(rank, ranks), SystemRandomness(), rate) for rank in range(ranks)]


def shards(rate: float) -> list[PoissonSampler]:
    sizes = (100, 400, 200)
    return [
        rank_sampler(shard(rank, sizes), SystemRandomness(), rate, rows=sizes[rank], first=sum(sizes[:rank]))
        for rank in range(3)
    ]


@pytest.mark.parametrize("make", [lambda q: blocks(3, q), lambda q: blocks(4, q), shards])
def test_the_union_over_ranks_is_poisson_without_a_seed(make):
    steps, rate = 400, 0.5
    taken = taken_by(make(rate), steps)
    assert taken.max() == 1  # nobody is owned twice
    counts = taken.sum(0)
    chi2 = float(((counts - steps * rate) ** 2 / (steps * rate * (1 - rate))).sum())
    assert 1e-6 < stats.chi2(SHARED).sf(chi2) < 1 - 1e-6
    sizes = taken.sum(1)  # binomial: independent units
    spread = float(((sizes - SHARED * rate) ** 2 / (SHARED * rate * (1 - rate))).sum())
    assert 1e-6 < stats.chi2(steps).sf(spread) < 1 - 1e-6
    assert dependent_coins(taken.__getitem__, steps) == []


def test_the_seeded_shards_of_one_run_throw_different_coins():
    sizes = (100, 100)
    drawn = [
        rank_sampler(shard(rank, sizes), SeededRandomness(1), rows=100).batches(0, 40) for rank in range(2)
    ]
    members = [[sorted(r for m in batch for r in m.rows[0].tolist()) for batch in one] for one in drawn]
    assert all(one != other for one, other in zip(*members, strict=True))


def test_a_shard_counts_the_units_of_all():
    one = rank_sampler(shard(1, (300, 50)), SystemRandomness(), rate=0.1, rows=50)
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


WORKERS = pytest.mark.parametrize("workers", [0, 1])


def first_rows(dataset: Dataset, **more: object) -> object:
    """The rows of a batch of everything."""
    sampler = PoissonSampler(
        dataset, sampling_rate=1.0, randomness=SeededRandomness(0), loading=DataConfig(**more)
    )
    (micro,) = next(sampler.batches(0, 1))
    return micro.rows


class Doubled(TensorDataset):
    """A subclass with items of its own."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(2 * tensor for tensor in super().__getitem__(index))


class Words(Dataset):
    """Row i is a sequence of length i + 1."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(index + 1)


def to_the_longest(items: list[Tensor]) -> Tensor:
    return pad_sequence(items, batch_first=True)


def to_twelve(items: list[Tensor]) -> Tensor:
    return torch.stack([torch.nn.functional.pad(item, (0, 12 - len(item))) for item in items])


@WORKERS
def test_a_subclass_of_a_tensor_data_set_keeps_its_own_items(workers):
    rows = first_rows(Doubled(torch.arange(5.0)), num_workers=workers)
    assert rows[0].tolist() == [0, 2, 4, 6, 8]


@WORKERS
@pytest.mark.parametrize(
    "dataset",
    [
        TensorDataset(torch.arange(6.0).reshape(6, 1), torch.arange(6)),
        Split(Dense(torch.eye(6)), torch.arange(6)),
    ],
    ids=["tensors", "rows_at"],
)
def test_a_collate_function_is_honoured_also_where_rows_could_be_gathered_at_once(dataset, workers):
    def collate(items: list[tuple[Tensor, Tensor]]) -> Tensor:
        return torch.stack([target for _, target in items]) + 100

    assert first_rows(dataset, collate_fn=collate, num_workers=workers).tolist() == [
        100,
        101,
        102,
        103,
        104,
        105,
    ]


@WORKERS
def test_padding_to_the_longest_row_of_a_batch_is_refused_without_telling_a_length(workers):
    sampler = PoissonSampler(
        Words(12),
        sampling_rate=0.3,
        randomness=SeededRandomness(0),
        loading=DataConfig(collate_fn=to_the_longest, num_workers=workers),
    )
    with pytest.raises(PrivacyError, match="one declared fixed length") as refusal:
        [list(batch) for batch in sampler.batches(0, 20)]
    assert not any(character.isdigit() for character in str(refusal.value))


@WORKERS
def test_padding_to_one_length_is_accepted(workers):
    sampler = PoissonSampler(
        Words(12),
        sampling_rate=0.3,
        randomness=SeededRandomness(0),
        loading=DataConfig(collate_fn=to_twelve, num_workers=workers),
    )
    shapes = {micro.rows.shape[1] for batch in sampler.batches(0, 20) for micro in batch}
    assert shapes == {12}


@pytest.mark.parametrize("times", [0, 2])
def test_a_batch_with_more_or_fewer_rows_than_items_is_refused(times):
    """Two rows of one record would be clipped one by one, and add twice what a record may."""
    with pytest.raises(DataError, match="exactly one row of each item"):
        first_rows(Words(1), collate_fn=lambda items: torch.ones(times * len(items), 2))


def test_a_plain_number_beside_the_tensors_may_not_change_either():
    shapes = ShapeValidator()
    shapes.check({"x": torch.zeros(2, 3), "longest": 3}, 2)
    shapes.check({"x": torch.zeros(4, 3), "longest": 3}, 4)
    with pytest.raises(PrivacyError, match="shape of a row"):
        shapes.check({"x": torch.zeros(2, 3), "longest": 2}, 2)
