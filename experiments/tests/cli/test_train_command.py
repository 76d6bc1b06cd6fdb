"""`train`, `compare` and `data`, as a user types them."""

import pytest

from sparsedp.cli import Exit
from sparsedp.errors import SparseDPError
from sparsedp.runs.checkpoint import read_checkpoint
from sparsedp.runs.run import load_weights
from sparsedp_experiments.models import build, parameter_count
from sparsedp_experiments.runs.execute import execute
from sparsedp_experiments.runs.grid import comparison
from sparsedp_experiments.runs.pool import Status
from sparsedp_experiments.runs.screen import rows_of
from sparsedp_experiments.runs.settings import Settings

pytestmark = pytest.mark.usefixtures("checked_once")


def test_train_chooses_by_public_numbers_unless_told(typed, tmp_path):
    small = ("train", "--dataset", "digits", "--epochs", "1", "--batch-size", "512", "--seed", "0", "--json")
    record = typed(*small, "--out", tmp_path / "dense").json
    assert (record["config"]["method"], record["method"], record["k"]) == ("auto", "dp-sgd", 4810)
    wide = (*small, "--set", "model_options={ hidden = [256] }", "--epochs", "4")
    record = typed(*wide, "--out", tmp_path / "sparse").json
    assert (record["method"], record["k"], record["d"]) == ("tp-topk", 7684, 19210)


def test_train_prints_the_record_of_a_run_that_keeps_its_promise(trained):
    folder, record = trained
    assert record["status"] == "finished"
    assert record["dataset"] == "digits"
    assert record["method"] == "tp-topk"
    assert record["epsilon_spent"] <= record["target_epsilon"] == 3.0
    assert record["unit"] == "row"
    assert record["config"]["seed"] == record["seed"] == 0
    assert not record["publishable"]
    model = build("mlp", (1, 8, 8), 10)
    load_weights(folder, model)
    assert parameter_count(model) == record["d"]


def test_a_wrong_flag_is_a_usage_error(shell):
    shell("train", "--datset", "digits").failed_with(Exit.USAGE, "No such option", "--dataset")


def test_an_unknown_method_is_told_the_methods(typed):
    typed("train", "--dataset", "digits", "--method", "tp-top").failed_with(Exit.USAGE, "tp-top", "tp-topk")


@pytest.mark.parametrize("command", ["train", "compare"])
def test_missing_data_says_where_it_looked_and_what_to_do(shell, typed, tmp_path, command):
    done = typed(command, "--dataset", "mnist", "--out", tmp_path / "never")
    done.failed_with(Exit.DATA, "train-images", str(shell.folder / "no-data"), "data get mnist")
    assert not list(tmp_path.glob("never/**/plan.json"))


def test_a_run_is_never_overwritten(trained, shell, typed):
    before = {path.name: path.read_bytes() for path in trained[0].iterdir() if path.is_file()}
    typed(*shell.train, "--out", trained[0]).failed_with(Exit.USAGE, "never overwritten")
    assert before == {path.name: path.read_bytes() for path in trained[0].iterdir() if path.is_file()}


@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_folder_that_cannot_be_made_is_named(typed, tmp_path, command):
    (tmp_path / "file").write_text("not a folder")
    wrong = tmp_path / "file" / "run"
    typed(command, "--dataset", "digits", "--out", wrong).failed_with(
        Exit.USAGE, str(wrong), "another folder"
    )


@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_wrong_name_in_a_file_comes_before_what_is_missing(typed, tmp_path, command):
    (tmp_path / "typo.toml").write_text('datset = "digits"\n')
    typed(command, "--config", tmp_path / "typo.toml").failed_with(
        Exit.USAGE, f"{tmp_path / 'typo.toml'}: there is no setting 'datset'; did you mean 'dataset'?"
    )


def test_a_metric_no_run_has_is_told_those_there_are():
    asked = comparison("two", {"dataset": "digits"}, ["dp-sgd"], [3.0], 1, "auc")
    with pytest.raises(SparseDPError, match="'auc'; expected one of accuracy, loss"):
        rows_of(asked, Status(1, records={0: {"metrics": {"loss": 1.0, "accuracy": 0.5}}}))


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
        ("train --dataset digits --model cnn", Exit.USAGE, "mnist-cnn"),
        ("train --dataset digits --clip-norm a", Exit.USAGE, "clip-norm"),
        ("train --dataset digits --active-ratio half", Exit.USAGE, "active-ratio"),
        ("train --dataset digits --set moment=0.9", Exit.USAGE, "did you mean 'momentum'"),
        ("train --set datset=digits", Exit.USAGE, "did you mean 'dataset'"),
        ("train --dataset digits --set epochs=many", Exit.USAGE, "whole number"),
        ("train --dataset digits --set epochs", Exit.USAGE, "KEY=VALUE"),
        ("train --dataset digits --lr -1", Exit.USAGE, "a number > 0"),
        ("train --dataset digits --set momentum=1", Exit.USAGE, "[0, 1)"),
        ("train --dataset digits --set weight_decay=-1", Exit.USAGE, "a number >= 0"),
        ("train --dataset digits --set model_options={hidden=0} --out never", Exit.USAGE, "'hidden': 0"),
        ("train --dataset digits --method noisy-sgd --out never", Exit.PRIVACY, "protects nobody"),
        (
            "train --dataset digits --epsilon -1",
            Exit.USAGE,
            "epsilon: got -1.0, expected a finite number > 0",
        ),
        ("train --dataset digits --delta 2", Exit.USAGE, "delta: got 2.0"),
        ("train --dataset digits --epsilon inf", Exit.PRIVACY, "clipped-sgd"),
        ("train --dataset digits --batch-size 100000", Exit.PRIVACY, "batch_size"),
        ("train --method dp-sgd", Exit.USAGE, "--dataset"),
        ("train --resume nowhere", Exit.DATA, "nowhere"),
        ("train --resume nowhere --epochs 3", Exit.USAGE, "--resume"),
        ("train --config nowhere.toml", Exit.USAGE, "nowhere.toml"),
        ("compare --dataset digits --methods dp-sgd,noisy-sgd", Exit.USAGE, "not private"),
        ("compare --dataset digits --epsilons three", Exit.USAGE, "epsilons"),
        ("compare --dataset digits --epsilons 3,0", Exit.USAGE, "finite number > 0"),
        ("compare --dataset digits --set epsilon=3", Exit.USAGE, "--epsilons"),
        ("compare --dataset digits --workers 0", Exit.USAGE, "workers"),
        ("sweep nowhere.toml", Exit.USAGE, "nowhere.toml"),
        ("sweep nowhere.toml --threads 0", Exit.USAGE, "threads: got 0, expected at least 1"),
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
