"""Each command once, as a user types it."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch import nn
from typer.testing import CliRunner

from sparsedp.cli.app import app
from sparsedp.cli.output import EXIT_CODES
from sparsedp.methods import MethodOptions, all_methods, build_plan, get_method
from sparsedp.privacy import plan_epsilon
from sparsedp.privacy.normalization import PrivateNormalisation
from sparsedp.runs.reader import load_weights
from sparsedp.training.planning import spec_for
from sparsedp_experiments.models import build, parameter_count

pytestmark = pytest.mark.usefixtures("checked_once")

COMMANDS = (
    "demo", "train", "check", "compare", "plan", "verify", "audit", "report", "diagnose", "data", "methods",
    "sweep",
)  # fmt: skip


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
    assert "sparsedp" in shown.output or command == "demo"


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
    assert not record["for_release"]
    model = build("mlp", (1, 8, 8), 10)
    load_weights(folder, model)
    assert parameter_count(model) == record["d"]


def test_plan_gives_the_noise_of_the_plan_that_training_uses(typed):
    question = (
        "--records",
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
    ways = ("--method", "tp-topk", "--active-ratio", "0.1", "--phase1-epochs", "1", "--phase1-budget", "0.3")
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
    question = ("--records", "2000", "--batch-size", "100", "--epochs", "2", "--other-budgets", "1")
    answer = typed("plan", *question, "--json").json
    sizes = {"units": 2000, "batch_size": 100, "epochs": 2, "delta": 1e-5, "clip_norm": 1.0}
    plan, dearer = (build_plan(get_method("tp-topk"), epsilon=epsilon, **sizes) for epsilon in (3.0, 1.0))
    assert [phase["noise_multiplier"] for phase in answer["phases"]] == [
        p.noise_multiplier for p in plan.phases
    ]
    assert answer["epsilon"] == plan_epsilon(plan)
    assert answer["noise_energy"] is None
    (other,) = answer["other_budgets"]
    louder = dearer.phases[-1].noise_multiplier / plan.phases[-1].noise_multiplier
    assert other["noise_energy_factor"] == pytest.approx(louder**2)
    shown = typed("plan", *question)
    assert "What another epsilon costs" in shown.out
    assert "docs/fine-tuning.md" not in shown.out, "without sizes there is no r to look up"
    assert "docs/fine-tuning.md" in typed("plan", *question, "--parameters", "1000").out


def test_plan_counts_a_normalisation_and_says_which_budgets_it_puts_out_of_reach(typed):
    sizes = {"units": 2000, "batch_size": 100, "epochs": 2, "delta": 1e-5, "clip_norm": 1.0}
    question = ("--records", "2000", "--batch-size", "100", "--epochs", "2", "--accountant", "rdp")
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
    "--records", "50000", "--batch-size", "2048", "--epochs", "10", "--epsilon", "1", "--delta", "1e-5",
    "--clip-norm", "0.1", "--accountant", "rdp", "--other-budgets", "",
)  # fmt: skip


@pytest.mark.parametrize(
    ("parameters", "more", "method", "why"),
    [
        (155_530, (), "tp-topk", "a learned support of ratio 0.4, as the noise of a dense step on 155,530"),
        (650, (), "dp-sgd", "dense, as the noise of a dense step on 650 coordinates is 0.0"),
        (2_000_000, (), "dp-sgd", "dense, as the noise of a dense step on 2,000,000 coordinates is 1.9"),
        (650, ("--active-ratio", "0.5"), "tp-topk", "a support, as what was said of one asks for it"),
    ],
)
def test_plan_says_what_auto_takes_and_why(typed, parameters, more, method, why):
    asked = ("plan", *PUBLIC, "--method", "auto", "--parameters", str(parameters), *more)
    answer = typed(*asked, "--json").json
    assert answer["method"] == method
    assert why in answer["reason"]
    numbers = {"units": 50_000, "batch_size": 2048, "epochs": 10, "delta": 1e-5, "accountant": "rdp"}
    chosen = spec_for(
        nn.Linear(parameters, 1, bias=False), "auto", MethodOptions(active_ratio=0.5) if more else None,
        unit="row", epsilon=1.0, clip_norm=0.1, **numbers,
    )  # fmt: skip
    noise = [phase.noise_multiplier for phase in chosen.plan().phases]
    assert [phase["noise_multiplier"] for phase in answer["phases"]] == noise
    shown = " ".join(typed(*asked).out.split())
    assert f"Method auto takes {method}: {answer['reason']}." in shown


@pytest.mark.parametrize(
    ("asked", "k", "words"),
    [
        ("--method fest --parameters 1000000", None, "what is no embedding table, whose size was not given"),
        ("--method fest --parameters 1000000 --part dense=1000", 100_900, "k=100,900 active"),
        ("--method fest --model embedding-bag", 26_231, "k=26,231 active"),
        ("--method adafest --model embedding-bag", None, "not known before training, as adafest chooses"),
        ("--method bias --parameters 1000", None, "give --bias-parameters, --head-parameters, or --model"),
        ("--method bias --parameters 1000 --head-parameters 100 --bias-parameters 9", 109, "head (at most 109"),
        ("--method bias --model mnist-cnn", 410, "bias, which is bias and head (410 coordinates)"),
        ("--method head --head-parameters 100", None, "give --parameters or --model"),
        ("--method head --model lite0", 12_810, "head (12,810 coordinates)"),
    ],
)  # fmt: skip
def test_plan_tells_the_support_or_what_it_takes_to_know_it(typed, asked, k, words):
    question = ("plan", *PUBLIC, *asked.split())
    energy = typed(*question, "--json").json["noise_energy"]
    assert k == (None if energy is None else energy["k"])
    assert words in " ".join(typed(*question).out.split())


def test_lite0_is_planned_without_the_package_of_its_weights(typed, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    answer = typed("plan", *PUBLIC, "--model", "lite0", "--method", "auto", "--json").json
    assert answer["noise_energy"]["d"] == 1280 * 10 + 10
    assert answer["method"] == "dp-sgd"


def test_methods_lists_the_whole_table(typed):
    listed = typed("methods", "--json").json
    assert [row["name"] for row in listed] == [method.name for method in all_methods()]


def test_data_says_what_is_missing_and_how_to_get_it(shell, typed):
    shown = typed("data")
    assert shown.code == 0
    flat = " ".join(shown.out.split())
    assert "sparsedp data get mnist" in flat
    assert str(shell.folder / "no-data") in shown.out.replace("\n", "")
    listed = CliRunner().invoke(
        app, ["data", "--json"], env={"SPARSEDP_DATA": str(shell.folder), "SPARSEDP_CACHE": str(shell.folder)}
    )
    sources = {one["name"]: one for one in json.loads(listed.output)["sources"]}
    assert not sources["mnist"]["complete"]
    assert sources["mnist"]["missing"][0] == "train-images-idx3-ubyte.gz"


def test_report_writes_one_html_file(trained, typed, tmp_path):
    done = typed("report", trained[0], "--out", tmp_path / "page.html", "--json")
    assert done.json == {"report": str(tmp_path / "page.html")}
    assert (tmp_path / "page.html").read_text().startswith("<!")


COMPARED = (
    "compare", "--dataset", "digits", "--methods", "dp-sgd,tp-rand", "--epsilons", "8", "--set", "subset=200",
    "--batch-size", "25", "--workers", "1", "--seeds", "2",
)  # fmt: skip


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.nightly)], ids=["whole", "interrupted"])
def compared(request, shell, typed):
    """A comparison and what it says; if asked for, one that was stopped by Ctrl-C on the way and gone on with."""
    folder = shell.folder / f"compared-{request.param}"
    asked = (*COMPARED, "--epochs", "4" if request.param else "1", "--out", folder)
    if not request.param:
        return folder, typed(*asked, "--json").json
    process = shell.start(*asked)
    kept = folder / "records"
    while not list(kept.glob("*.json")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "The same command goes on" in " ".join(err.split())
    before = {file: file.stat().st_mtime_ns for file in kept.glob("*.json")}
    assert 0 < len(before) < 4
    done = shell(*asked, "--json").json
    assert before == {file: file.stat().st_mtime_ns for file in before}
    return folder, done


def test_compare_pairs_methods_by_seed_and_goes_on_after_ctrl_c(compared):
    folder, done = compared
    assert (done["runs"], done["done"], done["failed"]) == (4, 4, [])
    dense, sparse = done["rows"]
    assert dense["difference"] is None
    assert sparse["difference"]["count"] == 2
    assert all(row["epsilon"] <= 8 for row in done["rows"])
    assert Path(done["report"]).read_text().startswith("<!")
    assert len(list(folder.glob("*/ledger.jsonl"))) == 4
