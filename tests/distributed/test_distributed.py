"""Several processes, one run: what ranks tell each other, the same bits on any number of them, shards, and kills."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from rank_jobs import SCRIPT, group_of_one, jobs, jobs_of_one, torchrun
from torch.utils.data import Dataset, TensorDataset

from sparsedp import distributed
from sparsedp.errors import DataError, RankError, SparseDPError
from sparsedp.federated import FederatedTrainer
from sparsedp.loading import DataConfig
from sparsedp.methods import build_plan, list_methods
from sparsedp.privacy.ledger import Ledger
from sparsedp.runs.verify import verify
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
    ids=["all rows", "in another order", "a part", "mostly the same", "all alike", "loaded one by one"],
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


# Runs of several processes.


def several_processes(test):
    return pytest.mark.nightly(pytest.mark.timeout(900)(test))


NAMED = {
    "second": "there is a run at",
    "plans": "rank 1: plan.epsilon",
    "models": "rank 1: model",
    "parts": 'rank 1: parts.1 is "ReLU()" and "Tanh()" on rank 0',
    "modes": "rank 1: training is []",
    "losses": 'rank 1: loss is "MultiMarginLoss"',
    "threads": "rank 1: threads is 2",
    "others": "rank 1: data",
    "limits": "rank 1: max_physical_batch is 11",
    "shuffled": "rank 1: data",
    "optimizers": "rank 1: optimizer",
    "drifts": "rank 1: weights",
}
"""Jobs in which one rank differs, and what all are told."""


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two ranks do, in one start."""
    folder = tmp_path_factory.mktemp("two")
    return folder, jobs(folder, 2, "kept", *NAMED, "refuses", "ended", "unseeded", "sharded")


@several_processes
def test_ranks_leave_their_groups_before_python_ends(two):
    """Or a thread of theirs may abort a process whose run is finished."""
    assert [json.loads((two[0] / f"left.{rank}.json").read_text()) for rank in range(2)] == [True] * 2


@several_processes
def test_a_rank_that_raises_in_a_step_leaves_nothing_to_release(tmp_path):
    ended = torchrun(2, str(SCRIPT), str(tmp_path), "fails", timeout=120)
    assert ended.returncode != 0
    assert "SparseDPError: no more" in ended.stderr
    assert (tmp_path / "released.txt").read_text() == "3"
    assert Ledger.read(tmp_path / "FAILED" / "ledger.jsonl").charged > 3
    root = ended.stderr.split("Root Cause")[1]
    assert "rank      : 1" in root
    assert "no more" in root


@several_processes
@pytest.mark.parametrize("job", NAMED)
def test_every_rank_is_told_who_differs_and_in_what(two, job):
    assert [NAMED[job] in text for text in two[1][job]] == [True] * 2, two[1][job]


@several_processes
def test_an_error_on_one_rank_ends_all_there_and_then(two):
    others, own = two[1]["refuses"]
    assert own == "no more"
    assert "rank 1 stopped the run" in others
    assert own in others


@several_processes
def test_ranks_that_are_told_to_end_save_first_and_go_on_later(two):
    (said, charged, again, whole), other = two[1]["ended"]
    assert (said, other[0]) == ("stopped", "stopped")
    assert 4 <= int(charged) < 8
    assert again == whole


@several_processes
def test_without_a_seed_all_ranks_end_alike(two):
    found = two[1]["unseeded"]
    assert found == [found[0]] * 2


@several_processes
def test_shards_count_together_and_no_unit_is_on_two(two):
    found = two[1]["sharded"]
    assert found == [found[0]] * 2
    assert found[0]["units"] == 400
    assert "both hold rows of one unit" in found[0]["twice"]
    assert "ranks 0 and 1 hold the same rows" in found[0]["copies"]


@several_processes
def test_every_method_gives_the_same_bits_on_one_to_four_ranks(tmp_path):
    one = jobs_of_one(tmp_path, "every_method", "every_way")
    methods = one["every_method"]
    assert {method.name for method in list_methods()} == set(methods)
    for number in (2, 3, 4):
        folder = tmp_path / str(number)
        folder.mkdir()
        for job, found in jobs(folder, number, "every_method", "every_way").items():
            assert found == [one[job]] * number


@pytest.fixture(scope="module")
def unhurt(tmp_path_factory):
    """The digest of the run that nothing happens to."""
    return jobs_of_one(tmp_path_factory.mktemp("unhurt"), "unhurt")["unhurt"]


@several_processes
def test_a_run_whose_ranks_are_killed_twenty_times_ends_as_if_nothing_had_been(tmp_path, unhurt):
    """Any rank, at any moment: while the run is begun or gone on with, in a step, between two."""
    draw = random.Random(1)
    moments = [(-1, draw.uniform(0, 2)) if draw.random() < 0.4 else (draw.randint(1, 4), draw.uniform(0, 0.03))
               for _ in range(20)]  # fmt: skip
    hits = json.dumps([("SIGKILL", draw.randrange(2), *moment) for moment in moments])
    found = jobs(tmp_path, 2, "hurt", restarts=20, timeout=600, HITS=hits)["hurt"]
    assert found == [{"digest": unhurt, "starts": 21}] * 2
    assert verify(tmp_path / "RUN", independent=False).passed


@several_processes
def test_without_a_seed_what_was_lost_stays_paid_and_nothing_is_released_twice(tmp_path):
    hits = json.dumps([("SIGKILL", 0, 3, 0.0), ("SIGKILL", 1, 2, 0.01), ("SIGKILL", 0, -1, 0.5)])
    found = jobs(tmp_path, 2, "hurt", restarts=3, HITS=hits, SEEDLESS="1")["hurt"]
    assert found[0] == found[1]
    released = [int(line) for line in (tmp_path / "released.txt").read_text().split()]
    assert released == sorted(set(released))
    assert verify(tmp_path / "RUN", independent=False).passed


@several_processes
def test_a_run_goes_on_after_a_rank_that_hangs_or_cannot_write(tmp_path, unhurt):
    """A worker and the ledger's rank stop; then the ledger's rank has no space left."""
    hits = [("SIGSTOP", 2, 3, 0.0), ("SIGSTOP", 0, 3, 0.0), ("FULL", 0, 3, 0.0)]
    ended = torchrun(
        3, str(SCRIPT), str(tmp_path), "hurt",
        restarts=3, timeout=600, HITS=json.dumps(hits), SPARSEDP_RANK_TIMEOUT="20",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert "rank 0 cannot go on: another rank raised, was killed or hangs" in ended.stderr
    assert "rank 2 cannot go on: another rank raised, was killed or hangs" in ended.stderr
    assert "OSError: [Errno 28] No space left on device" in ended.stderr
    found = [json.loads((tmp_path / f"hurt.{rank}.json").read_text()) for rank in range(3)]
    assert found == [{"digest": unhurt, "starts": 4}] * 3
    assert verify(tmp_path / "RUN", independent=False).passed


@several_processes
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path, unhurt):
    """In a group of the user's own making, too."""
    hits = json.dumps([("SIGKILL", 1, 17, 0.0)])
    ended = torchrun(2, str(SCRIPT), str(tmp_path), "hurt", HITS=hits, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="30")
    assert "rank 0 cannot go on: another rank raised, was killed or hangs" in ended.stderr
    assert jobs(tmp_path, 3, "resumed", OWN_GROUP="1")["resumed"] == [unhurt] * 3
