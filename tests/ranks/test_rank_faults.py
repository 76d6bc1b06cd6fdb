"""Ranks that are killed or hang, and every method on one to four ranks: minutes."""

from __future__ import annotations

import random

import pytest
from launching import SCRIPT, jobs, torchrun

from sparsedp.runs.ledger_file import FileLedger
from sparsedp.runs.verify import verify

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(900),
]


def test_every_method_gives_the_same_bits_on_one_to_four_ranks(tmp_path):
    found = {}
    for ranks in (1, 2, 3, 4):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        found[ranks] = jobs(folder, ranks, "every_method")["every_method"]
    assert not [name for name, text in found[1][0].items() if text.startswith("refused")]
    assert all(one == found[1][0] for every in found.values() for one in every)


@pytest.fixture(scope="module")
def unhurt(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unhurt")
    return jobs(folder, 2, "hurt", HURT="SIGKILL,-1,0")["hurt"][0]


@pytest.mark.parametrize("attempt", range(20))
def test_a_killed_rank_is_restarted_and_the_run_ends_as_if_nothing_had_been(tmp_path, unhurt, attempt):
    draw = random.Random(attempt)
    victim, after = draw.randrange(2), draw.randrange(30)
    found = jobs(tmp_path, 2, "hurt", restarts=1, HURT=f"SIGKILL,{victim},{after}")
    assert found["hurt"] == [unhurt, unhurt]
    assert verify(tmp_path / "RUN", independent=False).passed


@pytest.mark.parametrize("victim", [0, 1])
def test_without_a_seed_what_was_lost_stays_paid(tmp_path, victim):
    torchrun(2, str(SCRIPT), str(tmp_path), "hurt", HURT=f"SIGKILL,{victim},13", SEEDLESS="1")
    before = FileLedger.read(tmp_path / "RUN" / "ledger.jsonl")
    assert before.charged >= 14  # step 13 was released
    assert verify(tmp_path / "RUN", independent=False).passed


def test_a_rank_that_hangs_is_named_and_the_run_goes_on(tmp_path, unhurt):
    ended = torchrun(
        3, str(SCRIPT), str(tmp_path), "hurt", restarts=1, HURT="SIGSTOP,2,9", SPARSEDP_RANK_TIMEOUT="30"
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert "nothing was heard of rank 2" in ended.stderr
    assert verify(tmp_path / "RUN", independent=False).passed


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path, unhurt):
    torchrun(2, str(SCRIPT), str(tmp_path), "hurt", HURT="SIGKILL,1,17")
    command = [str(SCRIPT), str(tmp_path), "resumed"]
    assert torchrun(3, *command, HURT="SIGKILL,-1,0").returncode == 0
    assert (tmp_path / "resumed.0.json").read_text().strip('"') == unhurt
