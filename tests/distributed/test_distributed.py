"""What ranks tell each other, in one process and in a group of one; and shards that must be apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from rank_jobs import group_of_one
from torch.utils.data import Dataset, TensorDataset

from sparsedp import distributed
from sparsedp.errors import DataError, PrivacyError, RankError, SparseDPError
from sparsedp.federated import FederatedTrainer
from sparsedp.loading import DataConfig
from sparsedp.methods import build_plan
from sparsedp.privacy.mechanism import Grid
from sparsedp.sampling import UnitPartition
from sparsedp.training import ranks
from sparsedp_experiments.runs.pool import run_all


def test_distributed_in_one_process_every_function_does_nothing():
    values = torch.tensor([3, -5, 2**60])
    distributed.connect()
    assert not distributed.is_distributed()
    assert (distributed.rank(), distributed.world_size(), distributed.is_main_process()) == (0, 1, True)
    assert distributed.broadcast(distributed.reduce_sum(values)) is values
    assert distributed.gather(7) == [7]
    assert [distributed.should_stop(asked) for asked in (True, False)] == [True, False]
    for call in (distributed.broadcast_from_main, distributed.all_or_raise, distributed.report_failure):
        assert call(lambda: "made") == "made"
        with pytest.raises(ZeroDivisionError):
            call(lambda: 1 // 0)
    distributed.check_same_on_all_ranks(lambda: 1 // 0)


class Told:
    """The other rank of two: what this one hears of it."""

    def __init__(self, monkeypatch, *others: Any) -> None:
        self.others = list(others)
        monkeypatch.setattr(distributed, "world_size", lambda: 2)
        monkeypatch.setattr(distributed, "is_distributed", lambda: True)
        monkeypatch.setattr(distributed, "rank", lambda: 0)
        monkeypatch.setattr(distributed, "broadcast_from_main", lambda make: make())
        monkeypatch.setattr(distributed, "gather", lambda value: [value, self.others.pop(0)])


def test_all_or_raise_names_the_rank_that_failed(monkeypatch):
    Told(monkeypatch, "ValueError: no more", "ValueError: no more")
    with pytest.raises(RankError, match="rank 1 stopped the run: ValueError: no more"):
        distributed.all_or_raise(lambda: 1)
    with pytest.raises(ZeroDivisionError):
        distributed.all_or_raise(lambda: 1 // 0)


def test_check_same_on_all_ranks_names_who_differs_and_in_what(monkeypatch):
    Told(monkeypatch, None, {"plan": {"epsilon": 3}, "rows": 5})
    with pytest.raises(RankError, match=r"rank 1: plan\.epsilon is 3 and 2 on rank 0"):
        distributed.check_same_on_all_ranks(lambda: {"plan": {"epsilon": 2}, "rows": 5})


def test_a_sum_over_ranks_has_room_for_every_rank(monkeypatch):
    """Each rank may fill its share of 2^61 alone, so that no sum of theirs overflows."""
    grid = Grid(1.0, 10, 1.0)
    part = torch.tensor([2.0**60])
    assert grid.round_and_sum([part.clone()]).tolist() == [2**60]
    monkeypatch.setattr(distributed, "world_size", lambda: 4)
    with pytest.raises(PrivacyError, match="nothing was released"):
        grid.round_and_sum([part])
    with pytest.raises(PrivacyError, match="too many units"):
        grid.round_and_sum([torch.tensor([2.0**58])] * 3)


def test_diagnoses_comparisons_and_servers_are_for_one_process(monkeypatch):
    distributed.require_one_process("this")
    monkeypatch.setenv("WORLD_SIZE", "2")
    plan = build_plan("dp-sgd", units=9, epochs=1, epsilon=9, accountant="rdp", batch_size=3)
    for refused in (
        lambda: distributed.require_one_process("this"),
        lambda: run_all("all methods", [], None, None),
        lambda: FederatedTrainer(torch.nn.Linear(2, 2), plan=plan, optimizer=torch.optim.SGD),
    ):
        with pytest.raises(SparseDPError, match="without torchrun"):
            refused()


def test_a_seeded_run_of_one_rank_has_the_threads_that_each_of_several_has(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        distributed.use_threads_of_ranks()
        assert torch.get_num_threads() == 2  # no launcher
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run")
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        distributed.use_threads_of_ranks()
        assert torch.get_num_threads() == 2  # the user's choice
        monkeypatch.delenv("OMP_NUM_THREADS")
        distributed.use_threads_of_ranks()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def launcher(monkeypatch):
    """A group of one, as `torchrun` starts it; gives a function that goes to the next start."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run")
    with group_of_one():
        yield lambda number: monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(number))


def test_a_later_start_takes_up_what_an_earlier_one_of_its_launch_began(launcher, tmp_path):
    path = tmp_path / "RUN"
    begun = distributed.begun_by_this_launch
    launcher(1)
    assert not begun(path, exists=True)  # another launch's
    launcher(0)
    with pytest.raises(ZeroDivisionError), distributed.begins_run(path):
        raise ZeroDivisionError
    launcher(1)
    assert not begun(path, exists=True)  # it was refused
    launcher(0)
    with distributed.begins_run(path):
        launcher(1)
        assert begun(path, exists=True)  # killed as soon as the directory was there
        assert not begun(path, exists=False)  # or before
        launcher(0)
    assert not begun(path, exists=True)  # this start's own: a second run into one directory
    launcher(2)
    assert begun(path, exists=True)
    with pytest.raises(SparseDPError, match="which is not here"):
        begun(path, exists=False)


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


WHOLE = range(40)


def partition(monkeypatch, one, other):
    monkeypatch.setattr(ranks.secrets, "token_bytes", lambda size: b"key")
    Told(monkeypatch, None, ranks._row_digests(other, None, b"key"), len(other))
    return ranks.partition_of(one, DataConfig(sharded=True), None)


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
def test_ranks_that_hold_the_same_rows_are_refused(monkeypatch, one, other):
    with pytest.raises(DataError, match="ranks 0 and 1 hold the same rows"):
        partition(monkeypatch, one, other)


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
def test_shards_with_some_equal_rows_are_not_refused(monkeypatch, one, other):
    found = partition(monkeypatch, one, other)
    assert found == UnitPartition(0, 2, in_blocks=True, shard_sizes=(len(one), len(other)))
