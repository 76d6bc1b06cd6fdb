"""Each command once, as a user types it."""

import subprocess
import sys

import pytest
import typer
from torch import nn
from typer.testing import CliRunner

from sparsedp import cli
from sparsedp.cli import EXIT_CODES, Exit, app
from sparsedp.errors import SparseDPError
from sparsedp.methods import MethodOptions, build_plan, get_method, list_methods
from sparsedp.privacy import plan_epsilon
from sparsedp.privacy.normalization import PrivateNormalisation
from sparsedp.runs.checkpoint import read_checkpoint
from sparsedp.runs.run import load_weights
from sparsedp.training.planning import spec_for
from sparsedp_experiments.models import build, parameter_count
from sparsedp_experiments.runs.cli import rows_of
from sparsedp_experiments.runs.execute import execute
from sparsedp_experiments.runs.grid import comparison
from sparsedp_experiments.runs.pool import Status
from sparsedp_experiments.runs.settings import Settings

pytestmark = pytest.mark.usefixtures("checked_once")

COMMANDS = ("plan", "check", "verify", "audit", "report", "diagnose", "methods")


def test_help_lists_every_command_and_exit_code_without_loading_torch(shell):
    shown = shell("--help")
    assert shown.code == 0
    assert all(f" {name} " in shown.out for name in COMMANDS)
    assert all(f"{code.value} " in shown.out for code in EXIT_CODES)
    loaded = subprocess.run(
        [sys.executable, "-c", "import sys, sparsedp.cli; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert loaded.stdout.strip() == "False"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_json_and_explains_itself(command):
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    assert "--json" in shown.output
    assert "sparsedp" in shown.output


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


def test_plan_gives_the_noise_of_the_plan_that_training_uses(typed):
    question = (
        "--units",
        "60000",
        "--batch-size",
        "1024",
        "--epochs",
        "4",
        "--epsilon",
        "3",
        "--delta",
        "1e-5",
    )
    ways = (
        "--method",
        "tp-topk",
        "--active-ratio",
        "0.1",
        "--warmup-fraction",
        "0.25",
        "--warmup-budget",
        "0.3",
    )
    answer = typed("plan", *question, *ways, "--parameters", "1000", "--other-budgets", "", "--json").json
    assert set(answer) >= {"epsilon", "delta", "accountant", "phases"}
    assert [phase["name"] for phase in answer["phases"]] == ["warm-up", "main"]
    assert [phase["steps"] for phase in answer["phases"]] == [59, 177]
    for phase in answer["phases"]:
        assert set(phase) >= {"name", "steps", "sampling_rate", "noise_multiplier", "clip_norm"}
        assert phase["sampling_rate"] == 1024 / 60000
    assert 0.995 * 3 <= answer["epsilon"] <= 3
    assert answer["epsilons"]["pld"] < answer["epsilons"]["rdp"] < answer["epsilons"]["rdp-classic"]
    noise = answer["phases"][-1]["noise_multiplier"] / 1024
    assert answer["noise_energy"]["dense"] == pytest.approx(1000 * noise**2)
    assert answer["noise_energy"]["sparse"] == pytest.approx(100 * noise**2)
    assert len(answer["curve"]) == 4
    assert answer["curve"][-1]["epsilon"] == pytest.approx(answer["epsilon"], rel=1e-3)
    assert answer["other_budgets"] == []


def test_plan_without_a_split_is_equal_noise_and_says_what_another_budget_costs(typed):
    question = ("--units", "2000", "--batch-size", "100", "--epochs", "2", "--other-budgets", "1")
    question += ("--method", "tp-topk", "--parameters", "1000")
    answer = typed("plan", *question, "--json").json
    sizes = {"units": 2000, "batch_size": 100, "epochs": 2, "delta": 1e-5, "max_grad_norm": 1.0}
    plan, dearer = (build_plan(get_method("tp-topk"), epsilon=epsilon, **sizes) for epsilon in (3.0, 1.0))
    assert [phase["noise_multiplier"] for phase in answer["phases"]] == [
        p.noise_multiplier for p in plan.phases
    ]
    assert answer["epsilon"] == plan_epsilon(plan)
    (other,) = answer["other_budgets"]
    louder = dearer.phases[-1].noise_multiplier / plan.phases[-1].noise_multiplier
    assert other["noise_energy_factor"] == pytest.approx(louder**2)
    shown = typed("plan", *question)
    assert "What another epsilon costs" in shown.out
    assert "Noise over clip norm, r, for all (1,000 coordinates)" in " ".join(shown.out.split())


def test_plan_counts_a_normalisation_and_says_which_budgets_it_puts_out_of_reach(typed):
    sizes = {"units": 2000, "batch_size": 100, "epochs": 2, "delta": 1e-5, "max_grad_norm": 1.0}
    question = ("--units", "2000", "--batch-size", "100", "--epochs", "2", "--accountant", "rdp")
    question += ("--method", "tp-topk", "--parameters", "1000")
    asked = (*question, "--normalise", "8", "--other-budgets", "0.1,2")
    answer = typed("plan", *asked, "--json").json
    plan = build_plan(
        get_method("tp-topk"), epsilon=3.0, accountant="rdp", normalise=PrivateNormalisation(8.0), **sizes
    )
    assert [(p["name"], p["noise_multiplier"]) for p in answer["phases"]] == [
        (p.name, p.noise_multiplier) for p in plan.phases
    ]
    assert [other["noise_multipliers"] == [] for other in answer["other_budgets"]] == [True, False]
    assert "out of reach" in typed("plan", *asked).out
    refused = typed("plan", *question, "--other-budgets", "2,-1")
    assert refused.code != 0
    assert "out of reach" not in refused.out


PUBLIC = (
    "--units", "50000", "--batch-size", "2048", "--epochs", "10", "--epsilon", "1", "--delta", "1e-5",
    "--clip-norm", "0.1", "--accountant", "rdp", "--other-budgets", "",
)  # fmt: skip


@pytest.mark.parametrize(
    ("parameters", "more", "method", "why"),
    [
        (155_530, (), "tp-topk", "a learned support of ratio 0.4, as the noise of a dense step on 155,530"),
        (650, (), "dp-sgd", "dense, as the noise of a dense step on 650 coordinates is 0.0"),
        (2_000_000, (), "dp-sgd", "dense, as the noise of a dense step on 2,000,000 coordinates is 1.9"),
        (650, ("--active-ratio", "0.5"), "tp-topk", "a support, as --active-ratio was given"),
    ],
)
def test_plan_says_what_auto_takes_and_why(typed, parameters, more, method, why):
    asked = ("plan", *PUBLIC, "--method", "auto", "--parameters", str(parameters), *more)
    answer = typed(*asked, "--json").json
    assert answer["method"] == method
    assert why in answer["reason"]
    numbers = {"units": 50_000, "batch_size": 2048, "epochs": 10, "delta": 1e-5, "accountant": "rdp"}
    chosen = spec_for(
        nn.Embedding(parameters, 1), "auto", MethodOptions(active_ratio=0.5) if more else None,
        unit_name="row", epsilon=1.0, max_grad_norm=0.1, **numbers,
    )  # fmt: skip
    noise = [phase.noise_multiplier for phase in chosen.plan().phases]
    assert [phase["noise_multiplier"] for phase in answer["phases"]] == noise
    shown = " ".join(typed(*asked).out.split())
    assert f"Method auto takes {method}: {answer['reason']}." in shown


@pytest.mark.parametrize(
    ("asked", "k", "words"),
    [
        ("--method fest --parameters 1000000", None, "is not known from --parameters alone"),
        ("--method tp-topk --parameters 1000", 200, "k=200 active"),
        ("--method head --model own_models:network", 90, "k=90 active"),
        ("--method bias --model own_models:network", 98, "k=98 active"),
    ],
)
def test_plan_tells_the_support_where_it_can_be_known(typed, monkeypatch, tmp_path, asked, k, words):
    monkeypatch.chdir(tmp_path)
    model = (
        "from torch import nn\ndef network():\n    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 10))\n"
    )
    (tmp_path / "own_models.py").write_text(model)
    question = ("plan", *PUBLIC, *asked.split())
    assert typed(*question, "--json").json["active"] == k
    assert words in " ".join(typed(*question).out.split())


@pytest.mark.parametrize("sizes", [(), ("--parameters", "10", "--model", "a:b")])
def test_plan_without_the_size_of_the_model_is_refused(typed, sizes):
    typed("plan", *PUBLIC, *sizes).failed_with(Exit.USAGE, "give --parameters N or --model")


def test_methods_lists_the_whole_table(typed):
    listed = typed("methods", "--json").json
    assert [row["name"] for row in listed] == [method.name for method in list_methods()]


def test_report_writes_one_html_file(trained, typed, tmp_path):
    done = typed("report", trained[0], "--out", tmp_path / "page.html", "--json")
    assert done.json == {"report": str(tmp_path / "page.html")}
    assert (tmp_path / "page.html").read_text().lstrip().startswith("<!doctype html>")


COMPARED = (
    "compare", "--dataset", "digits", "--methods", "dp-sgd,tp-rand", "--epsilons", "8", "--set", "subset=200",
    "--batch-size", "25", "--workers", "1", "--seeds", "2",
)  # fmt: skip


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
        ("plan --units 0 --batch-size 10 --epochs 2 --parameters 9", Exit.USAGE, "--units"),
        (
            "plan --units 100 --batch-size 10 --epochs 2 --parameters 9 --method dp-sgd --warmup-budget 0.3",
            Exit.USAGE,
            "has no warm-up",
        ),
        ("plan --units 100 --batch-size 200 --epochs 2 --parameters 9", Exit.PRIVACY, "batch_size"),
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


def test_a_metric_no_run_has_is_told_those_there_are():
    asked = comparison("two", {"dataset": "digits"}, ["dp-sgd"], [3.0], 1, "auc")
    with pytest.raises(SparseDPError, match="'auc'; expected one of accuracy, loss"):
        rows_of(asked, Status(1, records={0: {"metrics": {"loss": 1.0, "accuracy": 0.5}}}))


def test_a_comparison_with_other_settings_gets_another_folder(monkeypatch, typed, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/compare-digits").mkdir(parents=True)
    (tmp_path / "runs/compare-digits/comparison.json").write_text('{"base": {}, "rules": []}')
    typed("compare", "--dataset", "digits").failed_with(Exit.USAGE, "other settings")


def test_a_bug_is_not_dressed_up_as_a_mistake():
    broken = typer.Typer()

    @broken.command()
    def crash() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cli.run(lambda: broken([], standalone_mode=False))


def test_every_error_class_has_a_code_of_its_own_kind():
    from sparsedp.errors import DataError, ModelError, PrivacyError

    def code(kind):
        def broken() -> None:
            raise kind("a mistake")

        with pytest.raises(SystemExit) as ended:
            cli.run(broken)
        return ended.value.code

    found = [code(kind) for kind in (DataError, PrivacyError, ModelError, SparseDPError)]
    assert found == [Exit.DATA, Exit.PRIVACY, Exit.USAGE, Exit.USAGE]


def test_no_arguments_show_the_help():
    shown = CliRunner().invoke(app, [])
    assert "Usage" in shown.output


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
