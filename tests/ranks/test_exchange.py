"""The exchange of one step, in a group of one process: what goes in, what comes out, and who may draw noise."""

from __future__ import annotations

import pytest
import torch
from launching import group_of_one

from sparsedp.errors import PrivacyError, SparseDPError
from sparsedp.federated import FederatedTrainer
from sparsedp.methods import build_plan
from sparsedp.randomness import SystemRandomness
from sparsedp.ranks import launch
from sparsedp.ranks.here import ranks_here, refuse_ranks, same_threads
from sparsedp_experiments.runs.pool import run_all


@pytest.fixture(scope="module")
def ranks():
    with group_of_one():
        yield ranks_here()


def test_what_is_handed_out_is_the_release(ranks):
    total = torch.tensor([3, -5, 2**60])
    group = ranks.process_group
    assert group.is_main_process()
    assert torch.equal(group.broadcast(group.reduce_sum(total.clone()) + 7), total + 7)
    part = torch.tensor([0.1, 1e-30], dtype=torch.float64)
    assert torch.equal(group.broadcast(group.reduce_sum(part.clone())), part)


@pytest.mark.parametrize("number", [2**61, -(2**61), -(2**63)])
def test_an_integer_without_room_is_refused_before_it_is_released(ranks, number):
    with pytest.raises(PrivacyError, match="too many units"):
        ranks.process_group.reduce_sum(torch.tensor([number]))


def test_a_rank_that_follows_has_no_noise(ranks, monkeypatch):
    assert ranks.randomness(SystemRandomness()) == SystemRandomness()
    monkeypatch.setattr(type(ranks), "leads", False)
    follower, sums = ranks.randomness(SystemRandomness()), torch.zeros(1, dtype=torch.int64)
    for draw in (
        lambda: follower.rounded_gaussian(3, 1, (0,)),
        lambda: follower.add_rounded_gaussian(40, sums, (0,)),
    ):
        with pytest.raises(PrivacyError, match="draws no noise"):
            draw()
    assert int(sums) == 0


def test_diagnoses_comparisons_and_servers_are_for_one_process(monkeypatch):
    refuse_ranks("this")
    monkeypatch.setenv("WORLD_SIZE", "2")
    plan = build_plan("dp-sgd", units=9, epochs=1, epsilon=9, accountant="rdp", batch_size=3)
    for refused in (
        lambda: refuse_ranks("this"),
        lambda: run_all("all methods", [], None, None),
        lambda: FederatedTrainer(torch.nn.Linear(2, 2), plan=plan, optimizer=torch.optim.SGD),
    ):
        with pytest.raises(SparseDPError, match="without torchrun"):
            refused()


def test_a_seeded_run_of_one_rank_has_the_threads_that_each_of_several_has(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        same_threads()
        assert torch.get_num_threads() == 2  # no launcher
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run")
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        same_threads()
        assert torch.get_num_threads() == 2  # the user's choice
        monkeypatch.delenv("OMP_NUM_THREADS")
        same_threads()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_a_later_start_takes_up_what_an_earlier_one_of_its_launch_began(ranks, tmp_path, monkeypatch):
    out = tmp_path / "RUN"

    def in_the_next_start(here: bool) -> bool:
        with monkeypatch.context() as later:
            later.setattr(launch, "_THIS_START", "another")
            return ranks.begun_before(out, here)

    assert not in_the_next_start(here=True)  # another launch's
    with pytest.raises(ZeroDivisionError), ranks.beginning(out):
        raise ZeroDivisionError
    assert not in_the_next_start(here=True)  # it was refused
    with ranks.beginning(out):
        assert in_the_next_start(here=True)  # killed as soon as the folder was there
        assert not in_the_next_start(here=False)  # or before
    assert in_the_next_start(here=True)
    assert not ranks.begun_before(out, here=True)  # this start's own: a second run into one folder
    with pytest.raises(SparseDPError, match="which is not here"):
        in_the_next_start(here=False)
