"""`train`, `compare`, `diagnose` and `data`, as a user types them."""

import json

import pytest
from torch import nn

from sparsedp.cli import Exit
from sparsedp.runs.checkpoint import read_checkpoint
from sparsedp.runs.run import Run
from sparsedp_experiments.runs.execute import execute
from sparsedp_experiments.runs.settings import Settings
from sparsedp_experiments.theory.trajectory import read_snapshots, snapshot_steps, watching

pytestmark = pytest.mark.usefixtures("checked_once")


def test_train_chooses_by_public_numbers_unless_told(typed, tmp_path):
    small = (
        "train",
        "--dataset",
        "digits",
        "--epochs",
        "1",
        "--set",
        "batch_size=512",
        "--seed",
        "0",
        "--json",
    )
    record = typed(*small, "--out", tmp_path / "dense").json
    assert (record["config"]["method"], record["method"], record["k"]) == ("auto", "dp-sgd", 4810)
    wide = (*small, "--set", "model_options={ hidden = [256] }", "--epochs", "4")
    record = typed(*wide, "--out", tmp_path / "sparse").json
    assert (record["method"], record["k"], record["d"]) == ("tp-topk", 7684, 19210)


@pytest.mark.parametrize("command", ["train", "compare"])
def test_missing_data_says_where_it_looked_and_what_to_do(shell, typed, tmp_path, command):
    done = typed(command, "--dataset", "mnist", "--out", tmp_path / "never")
    done.failed_with(Exit.DATA, "train-images", str(shell.folder / "no-data"), "data get mnist")
    assert not list(tmp_path.glob("never/**/plan.json"))


def test_ctrl_c_stops_between_two_steps_and_says_how_to_go_on(stopped):
    done, step = stopped
    assert done.code == 130
    assert "train --resume run" in done.err
    assert "Traceback" not in done.err
    assert 0 < step < 8 * 22


def test_an_interrupted_run_resumes_to_the_weights_of_an_undisturbed_one(trained, tmp_path):
    folder, record = trained
    undisturbed = execute(Settings.from_json(record["config"]), out=tmp_path / "run")
    assert record["metrics"] == dict(undisturbed.metrics)
    assert record["epsilon_spent"] == undisturbed.ledger.epsilon
    resumed, whole = (read_checkpoint(run / "checkpoint.safetensors") for run in (folder, tmp_path / "run"))
    weights, expected = resumed.state["model"], whole.state["model"]
    assert weights.keys() == expected.keys()
    assert all((weights[name] == expected[name]).all() for name in weights)


def test_a_finished_run_is_not_taken_up_again(trained, typed):
    folder, record = trained
    before = (folder / "ledger.jsonl").read_bytes()
    done = typed("train", "--resume", folder)
    assert done.code == 0
    assert "is finished: every planned step is taken" in done.err
    assert typed("train", "--resume", folder, "--json").json["epsilon"] == record["epsilon"]
    assert (folder / "ledger.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("train --dataset mnits", Exit.DATA, "mnits"),
        ("train --dataset digits --set moment=0.9", Exit.USAGE, "did you mean 'momentum'"),
        ("train --set datset=digits", Exit.USAGE, "did you mean 'dataset'"),
        ("train --dataset digits --set epochs=many", Exit.USAGE, "whole number"),
        ("train --dataset digits --set epochs", Exit.USAGE, "KEY=VALUE"),
        ("train --dataset digits --set model_options={hidden=0} --out never", Exit.USAGE, "'hidden': 0"),
        ("train --dataset digits --method noisy-sgd --out never", Exit.PRIVACY, "protects nobody"),
        (
            "train --dataset digits --epsilon -1",
            Exit.USAGE,
            "epsilon: got -1.0, expected a finite number > 0",
        ),
        ("train --dataset digits --epsilon inf", Exit.PRIVACY, "clipped-sgd"),
        ("train --dataset digits --set batch_size=100000", Exit.PRIVACY, "batch_size"),
        ("train --dataset digits --method tp-top", Exit.USAGE, "tp-topk"),
        ("train --method dp-sgd", Exit.USAGE, "dataset: not given"),
        ("train --resume nowhere", Exit.DATA, "nowhere"),
        ("train --resume nowhere --epochs 3", Exit.USAGE, "--resume"),
        ("compare --dataset digits --epsilons three", Exit.USAGE, "epsilons"),
        ("compare --dataset digits --epsilons 3,0", Exit.USAGE, "finite number > 0"),
        ("compare --dataset digits --set epsilon=3", Exit.USAGE, "--epsilons"),
        ("compare --dataset digits --workers 0", Exit.USAGE, "workers"),
        ("sweep nowhere.toml", Exit.USAGE, "nowhere.toml"),
        ("diagnose nowhere", Exit.DATA, "nowhere is no folder"),
        ("data get eyepacs", Exit.DATA, "Kaggle"),
        ("data get mnits", Exit.DATA, "mnist"),
    ],
)
def test_a_mistake_gets_a_message_and_a_code(monkeypatch, typed, tmp_path, arguments, code, words):
    monkeypatch.chdir(tmp_path)
    done = typed(*arguments.split())
    done.failed_with(code, words)
    assert "Training" not in done.err
    assert not (tmp_path / "never").exists()


@pytest.fixture(scope="module")
def watched(shell):
    """A small run with snapshots, that each refresh of its support can be seen in."""
    small = ("--epochs", "4", "--set", "subset=150", "--set", "batch_size=30", "--seed", "1")
    done = shell(
        "train", "--dataset", "digits", "--method", "on-topk", *small, "--snapshots", "--out", "watched"
    )
    assert done.code == 0, done.err
    return shell.folder / "watched"


def test_snapshots_are_kept_and_a_resumed_run_goes_on_with_its_own_without_being_told(watched, tmp_path):
    assert tuple(shot.step for shot in read_snapshots(watched)) == snapshot_steps(Run.open(watched).plan)
    assert watching(tmp_path, snapshots=False)(nn.Linear(1, 1)) == []
    (tmp_path / "snapshots").mkdir()
    assert len(watching(tmp_path, snapshots=False)(nn.Linear(1, 1))) == 1


@pytest.mark.parametrize("rows", ["test", "train"])
def test_nonprivate_diagnostics_are_written_apart_and_marked(watched, typed, rows):
    before = {path: path.read_bytes() for path in watched.rglob("*") if path.is_file()}
    done = typed("diagnose", watched, "--nonprivate", "--rows", "40", "--data", rows)
    assert done.code == 0, done.err
    assert "Not private" in done.err
    assert "NOT PRIVATE" in done.out
    written = json.loads((watched / "nonprivate.json").read_text())
    values = {entry["name"]: entry["value"] for entry in written["values"]}
    assert 0 <= values["energy captured along the run (alpha_T)"] <= 1
    assert all("Not private" in entry["note"] for entry in written["values"])
    (watched / "nonprivate.json").unlink()
    assert before == {path: path.read_bytes() for path in watched.rglob("*") if path.is_file()}


def test_diagnose_asks_for_a_word_and_for_data_that_are_there(run_copy, typed):
    typed("diagnose", run_copy).failed_with(Exit.USAGE, "--nonprivate")
    typed("diagnose", run_copy, "--nonprivate", "--data", "all").failed_with(Exit.USAGE, "test or train")
    for config, code, words in (
        ({"dataset": "mnist", "model": "mnist-cnn"}, Exit.DATA, "data get mnist"),
        (None, Exit.USAGE, "use it from Python"),
    ):
        record = json.loads((run_copy / "record.json").read_text())
        record["config"] = None if config is None else {**record["config"], **config}
        (run_copy / "record.json").write_text(json.dumps(record))
        typed("diagnose", run_copy, "--nonprivate").failed_with(code, words)
    assert not (run_copy / "nonprivate.json").exists()
