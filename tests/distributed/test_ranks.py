"""Several processes, one run: the same bits on any number of ranks, and no rank that differs goes unnamed."""

from __future__ import annotations

import json

import pytest
from launching import SCRIPT, jobs, jobs_of_one, torchrun

from sparsedp.privacy.ledger import Ledger

pytestmark = pytest.mark.nightly

SAME = ("people", "counted", "kept")
DIFFERENT = (
    "plans", "models", "parts", "modes", "losses", "threads",
    "others", "limits", "releases", "shuffled", "optimizers", "drifts",
)  # fmt: skip
FAILING = ("refuses", "uncounted")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two ranks do, in one start."""
    folder = tmp_path_factory.mktemp("two")
    names = (*SAME, "second", *DIFFERENT, *FAILING, "ended", "unseeded", "sharded", "noise", "sums")
    return folder, jobs(folder, 2, *names)


def test_one_rank_gives_the_bits_of_two(two, tmp_path):
    for name, found in jobs_of_one(tmp_path, *SAME).items():
        assert two[1][name] == [found] * 2


def test_ranks_leave_their_groups_before_python_ends(two):
    """Or a thread of theirs may abort a process whose run is finished."""
    assert [json.loads((two[0] / f"left.{rank}.json").read_text()) for rank in range(2)] == [True] * 2


def test_a_rank_that_raises_in_a_step_leaves_nothing_to_release(tmp_path):
    ended = torchrun(2, str(SCRIPT), str(tmp_path), "fails", timeout=120)
    assert ended.returncode != 0
    assert "SparseDPError: no more" in ended.stderr
    assert (tmp_path / "released.txt").read_text() == "3"
    assert Ledger.read(tmp_path / "RUN" / "ledger.jsonl").charged > 3
    root = ended.stderr.split("Root Cause")[1]
    assert "rank      : 1" in root
    assert "no more" in root


def test_rank_0_kept_the_run_and_paid_for_every_step(two):
    ledger = Ledger.read(two[0] / "RUN" / "ledger.jsonl")
    assert ledger.charged == ledger.planned_steps


@pytest.mark.parametrize(
    ("job", "named"),
    [
        ("second", "there is a run at"),
        ("plans", "rank 1: plan.epsilon"),
        ("models", "rank 1: model"),
        ("parts", 'rank 1: parts.1 is "ReLU()" and "Tanh()" on rank 0'),
        ("modes", "rank 1: training is []"),
        ("losses", 'rank 1: loss is "MultiMarginLoss"'),
        ("threads", "rank 1: threads is 2"),
        ("others", "rank 1: data"),
        ("limits", "rank 1: max_physical_batch is 11"),
        ("releases", "rank 1: versions.torch"),
        ("shuffled", "rank 1: data"),
        ("optimizers", "rank 1: optimizer"),
        ("drifts", "rank 1: weights"),
    ],
)
def test_every_rank_is_told_who_differs_and_in_what(two, job, named):
    assert [named in text for text in two[1][job]] == [True] * 2, two[1][job]


@pytest.mark.parametrize("job", FAILING)
def test_an_error_on_one_rank_ends_all_there_and_then(two, job):
    found = two[1][job]
    assert found[1].startswith("the disk is gone" if job == "uncounted" else "criterion: ")
    assert "rank 1 stopped the run" in found[0]
    assert found[1] in found[0]


def test_ranks_that_are_told_to_end_save_first_and_go_on_later(two):
    (said, charged, again, whole), other = two[1]["ended"]
    assert (said, other[0]) == ("stopped", "stopped")
    assert 4 <= int(charged) < 8
    assert again == whole


def test_without_a_seed_all_ranks_end_alike(two):
    found = two[1]["unseeded"]
    assert found == [found[0]] * 2


def test_shards_count_together_and_no_unit_is_on_two(two):
    found = two[1]["sharded"]
    assert found == [found[0]] * 2
    assert found[0]["units"] == 400
    assert "both hold rows of one unit" in found[0]["twice"]
    assert "ranks 0 and 1 hold the same rows" in found[0]["copies"]


def test_noise_is_drawn_once_a_step_and_on_one_rank(two):
    drawn = two[1]["noise"]
    steps = drawn[0][1]
    assert [count for count, _ in drawn] == [steps, 0]


def test_rows_move_the_sum_of_their_owner_and_of_nobody_else(two):
    assert [found["honest"] != found["changed"] for found in two[1]["sums"]] == [False, True]
