"""Several processes, one run: the same bits on any number of ranks, and no rank that differs goes unnamed."""

from __future__ import annotations

import pytest
from launching import jobs, jobs_of_one

from sparsedp.runs.ledger_file import FileLedger

SAME = ("people", "counted", "kept")
DIFFERENT = ("plans", "models", "others", "limits", "releases", "shuffled", "optimizers", "drifts")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two ranks do, in one start."""
    folder = tmp_path_factory.mktemp("two")
    names = (*SAME, "second", *DIFFERENT, "fails", "refuses", "unseeded", "sharded", "noise", "sums")
    return folder, jobs(folder, 2, *names)


def test_one_rank_gives_the_bits_of_two(two, tmp_path):
    for name, found in jobs_of_one(tmp_path, *SAME).items():
        assert two[1][name] == [found] * 2


def test_rank_0_kept_the_run_and_paid_for_every_step(two):
    ledger = FileLedger.read(two[0] / "RUN" / "ledger.jsonl")
    assert ledger.charged == ledger.planned_steps


@pytest.mark.parametrize(
    ("job", "named"),
    [
        ("second", "there is a run at"),
        ("plans", "rank 1: plan.epsilon"),
        ("models", "rank 1: model"),
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


@pytest.mark.parametrize("job", ["fails", "refuses"])
def test_an_error_on_one_rank_ends_all_there_and_then(two, job):
    found = two[1][job]
    assert found[1] == "no more"
    assert "rank 1 stopped the run" in found[0]
    assert "no more" in found[0]


def test_without_a_seed_all_ranks_end_alike(two):
    found = two[1]["unseeded"]
    assert found == [found[0]] * 2


def test_shards_count_together_and_no_unit_is_on_two(two):
    found = two[1]["sharded"]
    assert found == [found[0]] * 2
    assert found[0]["units"] == 400
    assert "both hold rows of one unit" in found[0]["twice"]


def test_noise_is_drawn_once_a_step_and_on_one_rank(two):
    drawn = two[1]["noise"]
    steps = drawn[0][1]
    assert [count for count, _ in drawn] == [steps, 0]


def test_rows_move_the_sum_of_their_owner_and_of_nobody_else(two):
    assert [found["honest"] != found["changed"] for found in two[1]["sums"]] == [False, True]
