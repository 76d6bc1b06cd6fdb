"""Ranks that are killed, hang or cannot write, and every method on one to four ranks: minutes."""

from __future__ import annotations

import json
import random

import pytest
from launching import SCRIPT, jobs, jobs_of_one, torchrun

from sparsedp.methods import list_methods
from sparsedp.runs.verify import verify

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(900),
]

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
    command = [
        "-m",
        "sparsedp_experiments",
        "train",
        "--dataset",
        "digits",
        "--method",
        "tp-topk",
        "--epsilon",
        "8",
    ]
    command += ["--epochs", "2", "--out", str(tmp_path / "RUN")]
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
