"""`sweep`: killed and resumed it gives the same records; nothing is run twice."""

import signal
import subprocess
import time
from pathlib import Path

import pytest

from sparsedp.cli import Exit
from sparsedp.runs.run import Run
from sparsedp_experiments.runs import results as results_module
from sparsedp_experiments.runs.execute import execute
from sparsedp_experiments.runs.grid import read_experiment
from sparsedp_experiments.runs.pool import alone_in
from sparsedp_experiments.runs.results import Results, append_row, make_record, read_rows

CONFIG = """
title = "a small sweep"
seeds = 2

[base]
dataset = "digits"
subset = 200
epochs = 6
batch_size = 50

[grid]
method = ["dp-sgd", "tp-topk"]
"""


def records(file: Path) -> dict[str, dict]:
    """Every record without what may differ between two equal runs: how long it took, and a commit made meanwhile."""
    equal = {row["config_hash"]: {**row, "commit": type(row["commit"])} for row in read_rows(file)}
    return {name: {k: v for k, v in record.items() if k != "seconds"} for name, record in equal.items()}


@pytest.fixture(scope="module")
def config(shell) -> Path:
    path = shell.folder / "small.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def undisturbed(config, tmp_path_factory) -> dict[str, dict]:
    """The records of the same runs, done one after the other in this process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    results = Results(folder / "records.jsonl", "small")
    for run in read_experiment(config).runs():
        result = execute(run.settings, out=folder / run.name)
        noise = {phase.name: phase.noise_multiplier for phase in result.plan.phases}
        append_row(results.path, make_record("small", run, Run.open(folder / run.name).record, noise))
    return records(results.path)


@pytest.mark.nightly
def test_a_killed_sweep_goes_on_to_the_records_of_an_undisturbed_one(undisturbed, shell, config):
    arguments = ("sweep", config, "--out", "broken.jsonl", "--workers", "1")
    process = shell.start(*arguments)
    while not records(shell.folder / "broken.jsonl"):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert 0 < len(records(shell.folder / "broken.jsonl")) < 4
    time.sleep(0.5)

    done = shell(*arguments)
    assert done.code == 0, done.err
    assert "4 of 4 runs done" in done.out
    assert records(shell.folder / "broken.jsonl") == undisturbed
    assert not [path for path in (shell.folder / "runs" / "small").iterdir() if path.is_dir()]


def test_two_sweeps_in_one_folder_are_refused(config, tmp_path, typed, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with alone_in(tmp_path / "runs" / "small"):
        done = typed("sweep", config, "--out", tmp_path / "records.jsonl")
    done.failed_with(Exit.USAGE, "another process is at work")


def test_a_damaged_line_is_named(config, tmp_path, typed, monkeypatch):
    monkeypatch.chdir(tmp_path)
    records = tmp_path / "records.jsonl"
    records.write_text('{"a": 1}\n{\n{"a": 1}\n')
    done = typed("sweep", config, "--out", records)
    done.failed_with(Exit.DATA, f"{records}, line 2", "not JSON", "delete the line to run it again")


def test_a_torn_last_line_is_no_record_and_the_next_one_takes_its_place(tmp_path):
    records = tmp_path / "records.jsonl"
    append_row(records, {"experiment": "small", "config_hash": "a", "value": 0.1})
    with records.open("ab") as file:
        file.write(b'{"experiment": "small", "config_hash": "b", "val')
    assert [row["config_hash"] for row in read_rows(records)] == ["a"]
    append_row(records, {"experiment": "small", "config_hash": "c", "value": 1 / 3})
    assert [(row["config_hash"], row["value"]) for row in read_rows(records)] == [("a", 0.1), ("c", 1 / 3)]


def test_records_of_other_experiments_in_a_file_are_left_alone(config, tmp_path):
    first, *others = read_experiment(config).runs()
    row = {"config_hash": first.settings.digest, "metrics": {}}
    for name in ("another", "small"):
        append_row(tmp_path / "family.jsonl", {"experiment": name, **row, "is": name})
    results = Results(tmp_path / "family.jsonl", "small")
    assert (results.find(first) or {})["is"] == "small"
    assert [results.find(run) for run in others] == [None] * len(others)
    assert results.stale(others) == (first.settings.digest,)


def test_a_commit_is_never_that_of_a_repository_around_an_installed_copy(tmp_path, monkeypatch):
    git = ("git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b")
    for arguments in (("init", "-q"), ("commit", "-q", "--allow-empty", "-m", "theirs")):
        subprocess.run([*git, *arguments], check=True)
    copy = tmp_path / "venv" / "results.py"
    copy.parent.mkdir()
    copy.write_text("")
    monkeypatch.setattr(results_module, "__file__", str(copy))
    assert results_module.commit.__wrapped__() is None
