"""`audit` and `diagnose`, as typed."""

import json
import math

import pytest
import torch
from torch import nn

from sparsedp.auditing import mechanism, sampling
from sparsedp.auditing.result import FORMAT
from sparsedp.cli import Exit
from sparsedp.diagnostics import statistics_of
from sparsedp.randomness import SystemRandomness
from sparsedp.runs.run import Run
from sparsedp_experiments.attacks import audits
from sparsedp_experiments.theory.trajectory import snapshot_steps, watching

# `sparsedp audit` as a user types it: before a run, after one, and with mistakes.


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
        (("audit", "--dataset", "digits", "--method", "clipped-sgd"), Exit.PRIVACY, "protects nobody"),
        (("audit", "--dataset", "digits", "--method", "tp-top"), Exit.USAGE, "tp-topk"),
    ],
)
def test_mistakes_are_told(typed, arguments, code, words):
    typed(*arguments).failed_with(code, words)


def test_a_run_is_audited_as_it_was_planned(typed, run_copy):
    typed("audit", run_copy, "--epsilon", "1").failed_with(Exit.USAGE, "got a run and settings")


# `diagnose` as typed, and what `train` keeps for them.


pytestmark = pytest.mark.usefixtures("checked_once")

SMALL = ("--dataset", "digits", "--epochs", "4", "--set", "subset=150", "--batch-size", "30", "--seed", "1")


@pytest.fixture(scope="session")
def watched(shell):
    """A small run with snapshots, that each refresh of its support can be seen in."""
    done = shell("train", *SMALL, "--method", "on-topk", "--snapshots", "--out", "watched", "--json")
    assert done.code == 0, done.err
    return shell.folder / "watched"


def test_a_run_stopped_by_ctrl_c_and_resumed_keeps_its_whole_warm_up(trained, typed):
    folder, record = trained
    found, plan = statistics_of(Run.open(folder)), Run.open(folder).plan
    assert found.steps == found.planned == plan.phases[0].steps
    assert record["status"] == "finished"


def test_diagnose_reads_releases_only_and_writes_nothing(trained, typed):
    folder, record = trained
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    seen = typed("diagnose", folder, "--json").json
    assert set(seen) == {"run", "visible"}
    visible = seen["visible"]
    assert (visible["k"], visible["d"]) == (record["k"], record["d"])
    assert 0 < visible["proxy"]["null"]["mean"] < 1
    assert sum(layer["active"] for layer in visible["layers"]) == record["k"]
    assert visible["wire"]["values"] == 4 * record["k"] * visible["wire"]["steps"]
    assert visible["missing"] is None
    shown = typed("diagnose", folder).out
    assert "pure noise gives" in shown
    assert "An update takes" in shown
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_snapshots_are_kept_and_show_how_supports_change(watched, typed):
    plan = Run.open(watched).plan
    files = sorted(path.name for path in (watched / "snapshots").iterdir())
    assert files == [f"step-{step:08d}.safetensors" for step in snapshot_steps(plan)]
    visible = typed("diagnose", watched, "--json").json["visible"]
    assert "on-topk has no warm-up" in visible["missing"]
    assert visible["splits"] == {}
    assert visible["proxy"] is None
    # The first epoch is dense, so three supports, one after the other.
    changes = [(shared["first"], shared["second"]) for shared in visible["overlaps"]]
    assert changes == [("step 9", "step 10"), ("step 14", "step 15")]
    assert "dropped" in typed("diagnose", watched).out


def test_a_resumed_run_goes_on_with_its_snapshots_without_being_told(tmp_path):
    assert watching(tmp_path, snapshots=False)(nn.Linear(1, 1)) == []
    assert len(watching(tmp_path, snapshots=True)(nn.Linear(1, 1))) == 1
    (tmp_path / "snapshots").mkdir()
    assert len(watching(tmp_path, snapshots=False)(nn.Linear(1, 1))) == 1


def test_nonprivate_diagnostics_are_written_marked_and_reported(watched, typed, tmp_path):
    typed("report", watched, "--out", tmp_path / "before.html")
    done = typed("diagnose", watched, "--nonprivate", "--rows", "40", "--json")
    assert done.code == 0, done.err
    assert "Not private" in done.err
    written = json.loads((watched / "nonprivate.json").read_text())
    assert done.json["nonprivate"] == written
    values = {entry["name"]: entry["value"] for entry in written["values"]}
    assert 0 <= values["energy captured along the run (alpha_T)"] <= 1
    assert all("Not private" in entry["note"] for entry in written["values"])

    typed("report", watched, "--out", tmp_path / "plain.html")
    assert (tmp_path / "plain.html").read_bytes() == (tmp_path / "before.html").read_bytes()
    assert len(written["figures"]) == 4
    drawn = (watched / "nonprivate.svg").read_text()
    assert "<!-- Not private" in drawn


def test_training_rows_can_be_looked_at(watched, typed):
    done = typed("diagnose", watched, "--nonprivate", "--rows", "20", "--data", "train")
    assert done.code == 0, done.err
    assert "clipping" in done.err
    assert "NOT PRIVATE" in done.out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("diagnose nowhere", Exit.DATA, "nowhere is no folder"),
        ("diagnose empty --nonprivate", Exit.DATA, "holds no run"),
        ("diagnose watched --data test", Exit.USAGE, "add --nonprivate"),
        ("diagnose watched --rows 5", Exit.USAGE, "add --nonprivate"),
        ("diagnose watched --nonprivate --rows 1", Exit.USAGE, "at least 2"),
        ("diagnose watched --nonprivate --data all", Exit.USAGE, "test"),
    ],
)
def test_mistakes_get_a_message_and_a_code(
    watched, shell, typed, monkeypatch, tmp_path, arguments, code, words
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "watched").symlink_to(watched)
    typed(*arguments.split()).failed_with(code, words)


def test_a_data_set_that_is_gone_is_named(run_copy, typed):
    record = json.loads((run_copy / "record.json").read_text())
    record["config"] |= {"dataset": "mnist", "model": "mnist-cnn"}
    (run_copy / "record.json").write_text(json.dumps(record))
    typed("diagnose", run_copy, "--nonprivate").failed_with(Exit.DATA, "data get mnist")
    assert not (run_copy / "nonprivate.json").exists()


def test_a_run_from_python_has_no_settings_to_load_data_by(run_copy, typed):
    record = json.loads((run_copy / "record.json").read_text())
    record["config"] = None
    (run_copy / "record.json").write_text(json.dumps(record))
    assert typed("diagnose", run_copy, "--json").code == 0
    typed("diagnose", run_copy, "--nonprivate").failed_with(Exit.USAGE, "use it from Python")
