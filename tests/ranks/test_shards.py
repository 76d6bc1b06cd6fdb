"""Shards must be apart: what two ranks hold would be drawn twice, and each of its copies bounded by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from sparsedp.errors import DataError
from sparsedp.loading import DataConfig
from sparsedp.ranks import shards
from sparsedp.ranks.one import OneRank
from sparsedp.sampling import Shard
from sparsedp.training.recorder import share_of


class Told:
    """A rank that hears what another, with a data set of its own, has to say."""

    count = 2

    def __init__(self, other: Dataset[Any]) -> None:
        self._other = other
        self._key = b""

    def from_leader(self, make):
        self._key = make()
        return self._key

    def jointly(self, make):
        return make()

    def gather(self, value):
        return [value, shards._digests(self._other, None, self._key)]

    def share(self, units, *, sharded):
        return Shard(0, (units, units))


class OneByOne(Dataset):
    """Items that cannot be gathered at once, with random numbers in them."""

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int):
        return {"x": torch.full((3,), float(self.rows[i])) + torch.rand(3), "y": torch.tensor(i % 2)}


def rows(*numbers: int) -> TensorDataset:
    inputs = torch.tensor(numbers, dtype=torch.float32)[:, None] * torch.ones(2)
    return TensorDataset(inputs, torch.tensor(numbers) % 3)


def share(one, other):
    return share_of(Told(other), one, DataConfig(sharded=True), None)


WHOLE = range(40)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (rows(*WHOLE), rows(*WHOLE)),
        (rows(*WHOLE), rows(*reversed(WHOLE))),
        (rows(*WHOLE), rows(*range(15))),
        (rows(*range(20)), rows(*range(5, 25))),
        (rows(*[0] * 64), rows(*[0] * 64)),
        (OneByOne(range(300)), OneByOne(range(300))),
    ],
    ids=[
        "all rows twice",
        "in another order",
        "a part again",
        "mostly the same",
        "all alike",
        "loaded one by one",
    ],
)
def test_ranks_that_hold_the_same_rows_are_refused(one, other):
    with pytest.raises(DataError, match="ranks 0 and 1 hold the same rows"):
        share(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (rows(*range(20)), rows(*range(20, 40))),
        (rows(*range(20)), rows(*range(15, 35))),
        (rows(*[0, 1, 2] * 10), rows(*[0, 1, 2] * 9, 2, 2)),
        (rows(), rows(1, 2)),
        (OneByOne(range(300)), OneByOne(range(300, 600))),
    ],
    ids=["apart", "some people alike", "few kinds of people", "an empty shard", "loaded one by one"],
)
def test_shards_with_some_equal_rows_are_not_refused(one, other):
    assert share(one, other) == Shard(0, (len(one), len(one)))


def test_looking_at_rows_leaves_the_callers_random_numbers_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    share(OneByOne(range(9)), OneByOne(range(9, 18)))
    assert torch.equal(before, torch.get_rng_state())


def test_digests_have_the_checks_own_key():
    one, other = (shards._digests(rows(1, 2, 3), None, key) for key in (b"one", b"other"))
    assert len(one) == 3
    assert not np.intersect1d(one, other).size


def test_a_process_by_itself_reads_nothing():
    class Unread(Dataset):
        def __getitem__(self, i):
            raise AssertionError("read")

    shards.refuse_shared_rows(OneRank(), Unread(), None)
