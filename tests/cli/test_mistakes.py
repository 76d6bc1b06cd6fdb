"""User mistakes: one clear message, a documented exit code, no traceback."""

import pytest
import typer
from typer.testing import CliRunner

from sparsedp.cli import app as application
from sparsedp.cli.output import Exit
from sparsedp.errors import SparseDPError
from sparsedp_experiments.cli.running import rows_of
from sparsedp_experiments.runs.comparison import comparison
from sparsedp_experiments.runs.runner import Status


def test_a_wrong_flag_is_a_usage_error(shell):
    shell("train", "--datset", "digits").failed_with(Exit.USAGE, "No such option", "--dataset")


def test_an_unknown_method_is_told_the_methods(typed):
    typed("train", "--dataset", "digits", "--method", "tp-top").failed_with(Exit.USAGE, "tp-top", "tp-topk")


@pytest.mark.parametrize("command", ["train", "compare"])
def test_missing_data_says_where_it_looked_and_what_to_do(shell, typed, tmp_path, command):
    done = typed(command, "--dataset", "mnist", "--out", tmp_path / "never")
    done.failed_with(Exit.DATA, "train-images", str(shell.folder / "no-data"), "sparsedp data get mnist")
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
        ("train --dataset digits --classes a,b --out never", Exit.USAGE, ".npz"),
        ("train --dataset digits --set model_options={hidden=0} --out never", Exit.USAGE, "'hidden': 0"),
        ("train --dataset digits --method noisy-sgd --out never", Exit.PRIVACY, "got no noise_std"),
        (
            "train --dataset digits --epsilon -1",
            Exit.USAGE,
            "epsilon: got -1.0, expected a finite number > 0",
        ),
        ("train --dataset digits --delta 2", Exit.USAGE, "delta: got 2.0"),
        ("train --dataset digits --unit patient --out never", Exit.USAGE, "'unit'"),
        ("train --dataset digits --epsilon inf", Exit.PRIVACY, "clipped-sgd"),
        ("train --dataset digits --batch-size 100000", Exit.PRIVACY, "batch_size"),
        ("train --method dp-sgd", Exit.USAGE, "--dataset"),
        ("train --resume nowhere", Exit.DATA, "nowhere"),
        ("train --resume nowhere --epochs 3", Exit.USAGE, "--resume"),
        ("train --config nowhere.toml", Exit.USAGE, "nowhere.toml"),
        ("train --dataset digits --tensorboard --out never", Exit.USAGE, "pip install"),
        ("compare --dataset digits --methods dp-sgd,noisy-sgd", Exit.USAGE, "not private"),
        ("compare --dataset digits --epsilons three", Exit.USAGE, "epsilons"),
        ("compare --dataset digits --epsilons 3,0", Exit.USAGE, "finite number > 0"),
        ("compare --dataset digits --set epsilon=3", Exit.USAGE, "--epsilons"),
        ("compare --dataset digits --workers 0", Exit.USAGE, "workers"),
        (
            "plan --records 100 --batch-size 10 --epochs 2 --equal-noise --phase1-budget 0.3",
            Exit.USAGE,
            "not both",
        ),
        ("plan --records 100 --batch-size 10 --epochs 2 --phase1-epochs 2", Exit.USAGE, "phase1-epochs"),
        ("plan --records 0 --batch-size 10 --epochs 2", Exit.USAGE, "--records"),
        (
            "plan --records 100 --batch-size 10 --epochs 2 --method dp-sgd --phase1-budget 0.3",
            Exit.USAGE,
            "one phase",
        ),
        ("plan --records 100 --batch-size 10 --epochs 2 --model mlp", Exit.USAGE, "--parameters"),
        ("plan --records 100 --batch-size 200 --epochs 2", Exit.PRIVACY, "batch_size"),
        ("plan --records 100 --batch-size 10 --epochs 2 --method auto", Exit.USAGE, "add --parameters N"),
        (
            "plan --records 100 --batch-size 10 --epochs 2 --parameters 100 --head-parameters 12810",
            Exit.USAGE,
            "head: got 12,810 parameters of a model that has 100",
        ),
        (
            "plan --records 100 --batch-size 10 --epochs 2 --model mnist-cnn --parameters 100",
            Exit.USAGE,
            "got --model mnist-cnn and --parameters; give the model",
        ),
        (
            "plan --records 100 --batch-size 10 --epochs 2 --parameters 100 --part norm=3",
            Exit.USAGE,
            "--part: got 'norm=3', expected NAME=N",
        ),
        ("verify nowhere", Exit.DATA, "nowhere"),
        ("report nowhere", Exit.DATA, "nowhere"),
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


@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_wrong_name_in_a_file_comes_before_what_is_missing(typed, tmp_path, command):
    (tmp_path / "typo.toml").write_text('datset = "digits"\n')
    typed(command, "--config", tmp_path / "typo.toml").failed_with(
        Exit.USAGE, f"{tmp_path / 'typo.toml'}: there is no setting 'datset'; did you mean 'dataset'?"
    )


def test_a_folder_for_records_is_made_before_any_run(typed, tmp_path):
    (tmp_path / "small.toml").write_text('[base]\ndataset = "digits"\n[grid]\nmethod = ["dp-sgd"]\n')
    (tmp_path / "file").write_text("not a folder")
    wrong = tmp_path / "file" / "records"
    done = typed("sweep", tmp_path / "small.toml", "--out", wrong, "--work", tmp_path / "work")
    done.failed_with(Exit.USAGE, str(wrong), "another folder")


def test_a_metric_no_run_has_is_told_those_there_are():
    asked = comparison("two", {"dataset": "digits"}, ["dp-sgd"], [3.0], 1, "auc")
    with pytest.raises(SparseDPError, match="'auc'; expected one of accuracy, loss"):
        rows_of(asked, Status(1, records={0: {"metrics": {"loss": 1.0, "accuracy": 0.5}}}))


def test_a_comparison_with_other_settings_gets_another_folder(monkeypatch, typed, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/compare-digits").mkdir(parents=True)
    (tmp_path / "runs/compare-digits/comparison.json").write_text('{"base": {}, "rules": []}')
    typed("compare", "--dataset", "digits").failed_with(Exit.USAGE, "other settings")


def test_a_bug_is_not_dressed_up_as_a_mistake(monkeypatch):
    broken = typer.Typer()

    @broken.command()
    def crash() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(application, "app", lambda: broken([], standalone_mode=False))
    with pytest.raises(ZeroDivisionError):
        application.main()


def test_every_error_class_has_a_code_of_its_own_kind():
    from sparsedp.errors import DataError, ModelError, PrivacyError

    codes = [application._code(kind("")) for kind in (DataError, PrivacyError, ModelError, SparseDPError)]
    assert codes == [Exit.DATA, Exit.PRIVACY, Exit.USAGE, Exit.USAGE]


def test_no_arguments_show_the_help():
    shown = CliRunner().invoke(application.app, [])
    assert "Usage" in shown.output
