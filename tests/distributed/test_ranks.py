"""Several processes, one run: the same bits on any number of ranks, no rank that differs unnamed, and kills."""

from __future__ import annotations

import json
import random

import pytest
from rank_jobs import SCRIPT, jobs, jobs_of_one, torchrun

from sparsedp.methods import list_methods
from sparsedp.privacy.ledger import Ledger
from sparsedp.runs.verify import verify

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

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


KILLS = 20


def test_every_method_gives_the_same_bits_on_one_to_four_ranks(tmp_path):
    one = jobs_of_one(tmp_path, "every_method", "every_way")
    methods = one["every_method"]
    assert {method.name for method in list_methods()} == set(methods)
    assert not [name for name, text in methods.items() if text.startswith("refused")]
    for ranks in (2, 3, 4):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        for job, found in jobs(folder, ranks, "every_method", "every_way").items():
            assert found == [one[job]] * ranks


@pytest.fixture(scope="module")
def unhurt(tmp_path_factory):
    """The digest of the run that nothing happens to."""
    return jobs_of_one(tmp_path_factory.mktemp("unhurt"), "unhurt")["unhurt"]


def random_kills(count: int, seed: int) -> str:
    """Any rank, at any moment: while the run is begun or gone on with, in a step, between two."""
    draw = random.Random(seed)
    moments = [(-1, draw.uniform(0, 2)) if draw.random() < 0.4 else (draw.randint(1, 4), draw.uniform(0, 0.03))
               for _ in range(count)]  # fmt: skip
    return json.dumps([("SIGKILL", draw.randrange(2), *moment) for moment in moments])


def test_a_run_whose_ranks_are_killed_twenty_times_ends_as_if_nothing_had_been(tmp_path, unhurt):
    found = jobs(tmp_path, 2, "hurt", restarts=KILLS, timeout=600, HITS=random_kills(KILLS, seed=1))["hurt"]
    assert found == [{"digest": unhurt, "starts": KILLS + 1}] * 2
    assert verify(tmp_path / "RUN", independent=False).passed


def test_without_a_seed_what_was_lost_stays_paid_and_nothing_is_released_twice(tmp_path):
    hits = json.dumps([("SIGKILL", 0, 3, 0.0), ("SIGKILL", 1, 2, 0.01), ("SIGKILL", 0, -1, 0.5)])
    found = jobs(tmp_path, 2, "hurt", restarts=3, HITS=hits, SEEDLESS="1")["hurt"]
    assert found[0] == found[1]
    released = [int(line) for line in (tmp_path / "released.txt").read_text().split()]
    assert released == sorted(set(released))
    assert verify(tmp_path / "RUN", independent=False).passed


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


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path, unhurt):
    """In a group of the user's own making, too."""
    hits = json.dumps([("SIGKILL", 1, 17, 0.0)])
    ended = torchrun(2, str(SCRIPT), str(tmp_path), "hurt", HITS=hits, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="30")
    assert "rank 0 cannot go on: another rank raised, was killed or hangs" in ended.stderr
    assert jobs(tmp_path, 3, "resumed", OWN_GROUP="1")["resumed"] == [unhurt] * 3


def test_the_command_line_starts_under_torchrun_and_a_second_launch_is_refused(tmp_path):
    asked = "train --dataset digits --method tp-topk --epsilon 8 --epochs 2"
    command = ["-m", "sparsedp_experiments", *asked.split(), "--out", str(tmp_path / "RUN")]
    ended = torchrun(2, *command)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert verify(tmp_path / "RUN", independent=False).passed
    paid = (tmp_path / "RUN" / "ledger.jsonl").read_bytes()
    again = torchrun(2, *command, restarts=1)
    assert again.returncode != 0
    assert (again.stderr + again.stdout).count(
        "there is a run at"
    ) >= 2  # in both starts: it is not this launch's
    assert (tmp_path / "RUN" / "ledger.jsonl").read_bytes() == paid
