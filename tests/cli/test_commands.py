"""The library's commands, each once, as a user types them."""

import re
import subprocess
import sys

import pytest
import typer
from torch import nn
from typer.testing import CliRunner

from sparsedp import cli
from sparsedp.auditing import mechanism, sampling
from sparsedp.cli import EXIT_CODES, Exit, app
from sparsedp.errors import SparseDPError
from sparsedp.methods import build_plan, get_method, list_methods
from sparsedp.privacy import plan_epsilon
from sparsedp.privacy.normalization import PrivateNormalisation
from sparsedp.training.planning import spec_for

COMMANDS = ("plan", "check", "verify", "audit", "report", "diagnose", "methods")


def test_help_lists_every_command_and_exit_code_without_loading_torch():
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120"})
    assert shown.exit_code == 0
    assert all(f" {name} " in shown.output for name in COMMANDS)
    assert all(f"{code.value} " in shown.output for code in EXIT_CODES)
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


def test_plan_gives_the_noise_of_the_plan_that_training_uses(typed):
    asked = (
        "plan --units 60000 --batch-size 1024 --epochs 4 --epsilon 3 --delta 1e-5 --method tp-topk "
        "--active-ratio 0.1 --warmup-fraction 0.25 --warmup-budget 0.3 --parameters 1000 --json"
    )
    answer = typed(*asked.split(), "--other-budgets", "").json
    assert [phase["name"] for phase in answer["phases"]] == ["warm-up", "main"]
    assert [phase["steps"] for phase in answer["phases"]] == [59, 177]
    for phase in answer["phases"]:
        assert phase["sampling_rate"] == 1024 / 60000
    assert 0.995 * 3 <= answer["epsilon"] <= 3
    assert answer["epsilons"]["pld"] < answer["epsilons"]["rdp"] < answer["epsilons"]["rdp-classic"]
    noise = answer["phases"][-1]["noise_multiplier"] / 1024
    assert answer["noise_energy"]["dense"] == pytest.approx(1000 * noise**2)
    assert answer["noise_energy"]["sparse"] == pytest.approx(100 * noise**2)
    assert len(answer["curve"]) == 4
    assert answer["curve"][-1]["epsilon"] == pytest.approx(answer["epsilon"], rel=1e-3)
    assert answer["other_budgets"] == []


SMALL = (
    "--units", "2000", "--batch-size", "100", "--epochs", "2", "--method", "tp-topk", "--parameters", "1000",
)  # fmt: skip
SIZES = {"units": 2000, "batch_size": 100, "epochs": 2, "delta": 1e-5, "max_grad_norm": 1.0}


def test_plan_without_a_split_is_equal_noise_and_says_what_another_budget_costs(typed):
    question = (*SMALL, "--other-budgets", "1")
    answer = typed("plan", *question, "--json").json
    plan, dearer = (build_plan(get_method("tp-topk"), epsilon=epsilon, **SIZES) for epsilon in (3.0, 1.0))
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
    question = (*SMALL, "--accountant", "rdp")
    asked = (*question, "--normalise", "8", "--other-budgets", "0.1,2")
    answer = typed("plan", *asked, "--json").json
    plan = build_plan(
        get_method("tp-topk"), epsilon=3.0, accountant="rdp", normalise=PrivateNormalisation(8.0), **SIZES
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
        nn.Embedding(parameters, 1), get_method("tp-topk", active_ratio=0.5) if more else "auto",
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


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("plan --units 0 --batch-size 10 --epochs 2 --parameters 9", Exit.USAGE, "--units"),
        ("plan --units 90 --parameters 9 --method dp-sgd --warmup-budget 0.3", Exit.USAGE, "has no warm-up"),
        ("plan --units 100 --batch-size 200 --epochs 2 --parameters 9", Exit.PRIVACY, "batch_size"),
        ("plan --units 100", Exit.USAGE, "give --parameters N or --model"),
        ("plan --units 100 --parameters 10 --model a:b", Exit.USAGE, "give --parameters N or --model"),
        ("verify nowhere", Exit.DATA, "nowhere"),
        ("report nowhere", Exit.DATA, "nowhere"),
        ("predict nowhere new.csv", Exit.DATA, "nowhere is no folder"),
        ("columns nowhere.csv", Exit.DATA, "nowhere.csv: No such file"),
    ],
)
def test_a_mistake_gets_a_message_and_a_code(typed, arguments, code, words):
    typed(*arguments.split()).failed_with(code, words)


def test_a_place_that_cannot_be_written_to_is_a_message(trained, typed, tmp_path):
    (tmp_path / "header.csv").write_text("age,stay\n")
    for asked in (("report", trained[0]), ("columns", tmp_path / "header.csv")):
        typed(*asked, "--out", tmp_path / "header.csv" / "x").failed_with(Exit.USAGE, "header.csv/x")


def test_methods_are_listed_and_a_report_is_one_html_file(trained, typed, tmp_path):
    listed = typed("methods", "--json").json
    assert [row["name"] for row in listed] == [method.name for method in list_methods()]
    done = typed("report", trained[0], "--out", tmp_path / "page.html", "--json")
    assert done.json == {"report": str(tmp_path / "page.html")}
    assert (tmp_path / "page.html").read_text().lstrip().startswith("<!doctype html>")


def test_diagnose_reads_releases_only_and_writes_nothing(trained, typed):
    folder, record = trained
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    visible = typed("diagnose", folder, "--json").json["visible"]
    assert (visible["k"], visible["d"]) == (record["k"], record["d"])
    assert sum(layer["active"] for layer in visible["layers"]) == record["k"]
    assert "pure noise gives" in typed("diagnose", folder).out
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_audit_of_a_function_s_parts_is_told_and_kept_and_spends_nothing(typed, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mechanism, "MOST_RELEASES", 40)
    monkeypatch.setattr(sampling, "HITS", 4000)
    (tmp_path / "own_parts.py").write_text(PARTS)
    done = typed("audit", "own_parts:parts", "--epochs", "2", "--batch-size", "20", "--delta", "1e-3",
                 "--steps", "10", "--confidence", "0.9999999", "--out", tmp_path / "found", "--json")  # fmt: skip
    assert done.code == 0, done
    assert done.json["lower_bound"] <= done.json["claimed_epsilon"]
    assert done.json["claimed_epsilon"] == pytest.approx(3, rel=0.006)
    assert (tmp_path / "found" / "audit.json").exists()
    typed("audit", "own_parts:parts", "--run", "nowhere").failed_with(Exit.DATA, "nowhere is no folder")
    typed("audit", "own_parts:parts", "--run", tmp_path, "--epsilon", "1").failed_with(
        Exit.USAGE, "got a run and settings"
    )


PARTS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


def parts():
    return nn.Linear(3, 2), TensorDataset(torch.randn(80, 3), torch.arange(80) % 2), nn.CrossEntropyLoss()
"""


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


OWN = """
import torch
from torch import nn
from sparsedp import PerExampleLoss


class Blends(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.target = nn.Linear(3, 2), nn.Parameter(torch.ones(2))

    def forward(self, x):
        return torch.lerp(self.body(x), self.target, 0.5)


def slow():
    loss = PerExampleLoss(lambda model, rows: model(rows).square().sum(1))
    return Blends(), loss, torch.randn(4, 3)


def mixing():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), nn.CrossEntropyLoss(reduction="none"), (
        torch.randn(4, 3), torch.arange(4))


def nothing():
    return None


def broken():
    raise ValueError("my own mistake")


def ok():
    return nn.Linear(3, 4), nn.CrossEntropyLoss(reduction="none"), (torch.randn(4, 3), torch.arange(4))
"""


@pytest.fixture
def own_models(tmp_path, monkeypatch):
    (tmp_path / "own_models_to_check.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("own_models")
def test_a_model_of_linear_layers_is_all_fast(typed):
    told = typed("check", "own_models_to_check:ok", "--json").json
    assert 0 < told.pop("times_plain") < 100  # measured, on whatever runs here
    assert told == {"model": "own_models_to_check:ok", "parameters": 16, "fast": True, "notes": []}


@pytest.mark.usefixtures("own_models")
def test_what_is_slow_in_ones_own_model_is_named(typed):
    shown = typed("check", "own_models_to_check:slow").out
    assert "'target': LerpBackward0 has no formula" in shown
    assert re.search(r"32 examples takes \d+\.\d times an ordinary gradient", " ".join(shown.split()))


@pytest.mark.usefixtures("own_models")
@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("own_models_to_check:mixing", "statistics of the whole batch"),
        ("own_models_to_check:nothing", "expected (model, loss_fn, rows)"),
        ("own_models_to_check:broken", "raised ValueError (my own mistake); expected it to give"),
        ("own_models_to_check:absent", "expected package.module:function"),
        ("no_such_module_at_all:f", "expected package.module:function"),
        ("nonsense", "expected package.module:function"),
    ],
)
def test_mistakes_are_said(typed, path, complaint):
    refused = typed("check", path)
    assert refused.code == 2
    assert complaint in " ".join(refused.err.split())
