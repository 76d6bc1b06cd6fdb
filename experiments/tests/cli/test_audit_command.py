"""`sparsedp audit` as a user types it: before a run, after one, and with mistakes."""

import json
import math

import pytest
import torch

from sparsedp.auditing import mechanism, sampling
from sparsedp.auditing.result import FORMAT
from sparsedp.cli import Exit
from sparsedp.randomness import SystemRandomness
from sparsedp_experiments.attacks import audits

DIGITS = ("audit", "--dataset", "digits", "--method", "tp-topk", "--set", "epochs=2")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(mechanism, "MOST_RELEASES", 40)
    monkeypatch.setattr(sampling, "HITS", 4000)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_plan_is_audited_before_it_runs(typed):
    done = typed(*DIGITS, "--epsilon", "3", "--steps", "20", "--confidence", "0.9999999", "--json")
    assert done.code == 0, done
    found = done.json
    assert found["claimed_epsilon"] == pytest.approx(3, rel=0.006)
    assert 0 <= found["lower_bound"] <= found["claimed_epsilon"]
    assert 0 < found["recomposed"] <= found["claimed_epsilon"]
    assert (found["confidence"], found["method"], found["folder"]) == (0.9999999, "tp-topk", None)
    assert found["canaries"] > 1000
    assert 2 <= found["steps"] <= 24


def test_an_audit_takes_the_method_that_training_would(typed):
    done = typed(
        "audit",
        "--dataset",
        "digits",
        "--set",
        "epochs=2",
        "--steps",
        "4",
        "--confidence",
        "0.9999999",
        "--json",
    )
    assert done.code == 0, done
    assert done.json["method"] == "dp-sgd"  # by "auto": digits' network is small


@pytest.mark.nightly
def test_a_run_is_audited_and_left_as_it_was_and_verify_and_report_tell(typed, run_copy):
    before = contents(run_copy)
    done = typed("audit", run_copy, "--steps", "20", "--confidence", "0.9999999")
    assert done.code == 0, done
    assert "No leak found" in done.out
    assert contents(run_copy) == before
    folder = run_copy.with_name("run-audit")
    assert "Not for release" in (folder / "NOT-FOR-RELEASE.txt").read_text()
    assert "Attacked from outside" in typed("verify", run_copy).out
    assert typed("verify", run_copy, "--json").json["audit"]["passed"]
    typed("report", run_copy)
    assert "Attacked from outside" in (run_copy / "report.html").read_text()
    again = typed("audit", run_copy, "--steps", "4", "--out", run_copy)
    again.failed_with(Exit.USAGE, "holds something that is no audit")


def test_an_audit_of_another_run_is_not_shown(typed, run_copy):
    folder = run_copy.with_name("run-audit")
    folder.mkdir()
    other = {"format": FORMAT, "run": "other", "passed": True, "words": ["all is well"]}
    (folder / "audit.json").write_text(json.dumps(other))
    shown = typed("verify", run_copy)
    assert "all is well" not in shown.out
    assert shown.code == 0


def test_a_leak_is_named_and_has_an_exit_code(typed, monkeypatch, tmp_path):
    honest = SystemRandomness.add_rounded_gaussian

    def too_small(self, bits, sums, key):
        noise = torch.zeros_like(sums)
        honest(self, bits, noise, key)
        sums += (noise / math.sqrt(3)).round().to(torch.int64)

    monkeypatch.setattr(SystemRandomness, "add_rounded_gaussian", too_small)
    done = typed(*DIGITS, "--steps", "4", "--out", tmp_path / "found")
    assert done.code == Exit.MISMATCH
    assert "LEAK" in done.out


def test_a_place_that_cannot_be_written_to_is_told_before_anything_is_run(typed, monkeypatch, tmp_path):
    monkeypatch.setattr(audits, "audit_settings", lambda *_, **__: pytest.fail("the audit was run first"))
    file, folder = tmp_path / "notes.txt", tmp_path / "pictures"
    file.write_text("mine")
    folder.mkdir()
    (folder / "me.png").write_bytes(b"mine")
    for place, words in {file: "is a file", file / "audit": "is a file", folder: "is no audit"}.items():
        typed(*DIGITS, "--out", place).failed_with(Exit.USAGE, words)
    assert contents(tmp_path) == {"notes.txt": b"mine", "me.png": b"mine"}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("audit",), Exit.USAGE, "the folder of a run"),
        (("audit", "nowhere"), Exit.DATA, "nowhere is no folder"),
        (("audit", "--dataset", "digits", "--confidence", "2"), Exit.USAGE, "confidence: got 2.0"),
        (("audit", "--dataset", "digits", "--method", "tp-top"), Exit.USAGE, "tp-topk"),
    ],
)
def test_mistakes_are_told(typed, arguments, code, words):
    typed(*arguments).failed_with(code, words)


def test_a_run_is_audited_as_it_was_planned(typed, run_copy):
    typed("audit", run_copy, "--epsilon", "1").failed_with(Exit.USAGE, "got a run and settings")
