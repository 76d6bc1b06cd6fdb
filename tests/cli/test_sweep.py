"""`sweep`: killed and resumed it gives the same records; nothing is run twice."""

import json
import signal
import time
from pathlib import Path

import pytest

from sparsedp.cli.output import Exit
from sparsedp.experiments.config import read_experiment
from sparsedp.experiments.execute import execute
from sparsedp.experiments.results import Results, make_record
from sparsedp.experiments.runner import _alone, alone_with_records
from sparsedp.runs.reader import Run

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


def records(folder: Path) -> dict[str, dict]:
    """Every record without what may differ between two equal runs: how long it took, and a commit made meanwhile."""
    found = {file.name: json.loads(file.read_text()) for file in folder.glob("*.json")}
    equal = {name: {**record, "commit": type(record["commit"])} for name, record in found.items()}
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
    results = Results(folder / "records")
    for run in read_experiment(config).runs():
        result = execute(run.settings, out=folder / run.name)
        noise = {phase.name: phase.noise_multiplier for phase in result.plan.phases}
        results.keep(run, make_record("small", run, Run.open(folder / run.name).record, noise))
    return records(results.path)


@pytest.mark.heavy
def test_a_killed_sweep_goes_on_to_the_records_of_an_undisturbed_one(
    undisturbed, shell, config, typed, monkeypatch
):
    arguments = ("sweep", config, "--out", "broken", "--work", "broken-work", "--workers", "1")
    process = shell.start(*arguments)
    while not records(shell.folder / "broken"):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert 0 < len(records(shell.folder / "broken")) < 4
    time.sleep(0.5)

    done = shell(*arguments, "--json")
    assert done.code == 0, done.err
    assert (done.json["runs"], done.json["done"], done.json["left"]) == (4, 4, 0)
    assert records(shell.folder / "broken") == undisturbed
    assert not [path for path in (shell.folder / "broken-work").iterdir() if path.is_dir()]

    stamps = {file: file.stat().st_mtime_ns for file in (shell.folder / "broken").iterdir()}
    monkeypatch.chdir(shell.folder)
    more = typed("sweep", config, "--out", "broken", "--seeds", "3", "--dry-run", "--json").json
    assert (more["runs"], more["done"], more["left"]) == (6, 4, 2)
    assert [row["difference"] is None for row in more["rows"]] == [True, False]
    assert stamps == {file: file.stat().st_mtime_ns for file in stamps}


def test_a_record_has_all_it_takes_to_trust_and_repeat_a_run(undisturbed):
    for record in undisturbed.values():
        assert record["epsilon_spent"] <= record["target_epsilon"] == 3.0
        assert {"config_hash", "seed", "delta", "accountant", "data_variant", "versions", "commit"} <= set(
            record
        )
        assert record["test_accuracy"] == record["metrics"]["accuracy"]
        assert record["evaluated_on"] == "test"
        assert record["settings"]["seed"] == record["seed"]
        assert record["settings"]["method"] == record["cell"]["method"] == record["method"]


def test_two_sweeps_in_one_folder_are_refused(config, tmp_path, typed):
    with _alone(tmp_path / "work"):
        done = typed("sweep", config, "--out", tmp_path / "records", "--work", tmp_path / "work")
    done.failed_with(Exit.USAGE, "another process is at work")


def test_two_sweeps_for_the_same_records_are_refused(config, tmp_path, typed):
    with alone_with_records(tmp_path / "records"):
        done = typed("sweep", config, "--out", tmp_path / "records", "--work", tmp_path / "work")
    done.failed_with(Exit.USAGE, f"another process is at work in {tmp_path / 'records'}")
    assert not list((tmp_path / "records").iterdir()), "git and the tables see nothing of it"


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_a_damaged_record_says_what_to_do_with_it(config, tmp_path, typed, more):
    run = read_experiment(config).runs()[0]
    record = Results(tmp_path / "records").file(run)
    record.parent.mkdir()
    record.write_text("{")
    done = typed("sweep", config, "--out", record.parent, "--work", tmp_path / "work", *more)
    done.failed_with(Exit.DATA, str(record), "is damaged", "delete it to run it again")
