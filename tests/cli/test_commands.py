"""The library's commands, each once, as a user types them, with one small run that `fit` made in a folder."""

import json
import shutil
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

import sparsedp
from sparsedp import cli
from sparsedp.auditing import mechanism, sampling
from sparsedp.cli import EXIT_CODES, Exit, app
from sparsedp.errors import DataError, ModelError, PrivacyError, SparseDPError
from sparsedp.methods import build_plan, get_method, list_methods
from sparsedp.privacy import NominalSplit, plan_epsilon
from sparsedp.training.planning import spec_for

OF_PHASE = ("name", "steps", "sampling_rate", "noise_multiplier", "clip_norm")
COMMANDS = ("plan", "check", "verify", "audit", "report", "diagnose", "methods")


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)

    def failed_with(self, code, *words):
        """One clear message on standard error, and no traceback."""
        assert self.code == code, self
        assert "Traceback" not in self.err, self.err
        flat = " ".join(self.err.split())
        for word in words:
            assert word in flat, f"{word!r} is not in {flat!r}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of `tp-topk` with a warm-up, made in a second, and its record."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    x = torch.randn(80, 6, generator=torch.Generator().manual_seed(0))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    sparsedp.fit(
        model, TensorDataset(x, (x[:, 0] > 0).long()), nn.CrossEntropyLoss(), method="tp-topk", epsilon=8, delta=1e-3,
        epochs=5, batch_size=20, seed=0, run_dir=folder, progress=False,
    )  # fmt: skip
    return folder, json.loads((folder / "record.json").read_text())


@pytest.fixture
def typed(monkeypatch, capsys):
    """The entry point in this process: the same code, without the seconds a new process takes to load torch."""

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["sparsedp", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "120")
        monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return Finished(int(ended.value.code or 0), *capsys.readouterr())

    return run


def test_help_lists_every_command_and_exit_code():
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120"})
    assert shown.exit_code == 0
    assert all(f" {name} " in shown.output for name in COMMANDS)
    assert all(f"{code.value} " in shown.output for code in EXIT_CODES)
    for command in COMMANDS:
        shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
        assert shown.exit_code == 0
        assert "--json" in shown.output


def test_plan_gives_the_noise_of_the_plan_that_training_uses_and_what_other_budgets_cost(typed):
    asked = (
        "--units", "2000", "--batch-size", "100", "--epochs", "2", "--method", "tp-topk", "--parameters", "1000",
        "--accountant", "rdp", "--active-ratio", "0.1", "--warmup-fraction", "0.25", "--warmup-budget", "0.3",
        "--other-budgets", "0.001,2",
    )  # fmt: skip
    answer = typed("plan", *asked, "--json").json
    known = {
        "units": 2000, "batch_size": 100, "epochs": 2, "delta": 1e-5, "max_grad_norm": 1.0, "accountant": "rdp",
        "warmup_fraction": 0.25, "split": NominalSplit(0.3),
    }  # fmt: skip
    method = get_method("tp-topk", active_ratio=0.1)
    plan, dearer = (build_plan(method, epsilon=epsilon, **known) for epsilon in (3.0, 2.0))
    for phase, planned in zip(answer["phases"], plan.phases, strict=True):
        assert {name: phase[name] for name in OF_PHASE} == {name: getattr(planned, name) for name in OF_PHASE}
    assert answer["epsilon"] == plan_epsilon(plan)
    assert answer["epsilons"]["pld"] < answer["epsilons"]["rdp"] < answer["epsilons"]["rdp-classic"]
    noise = answer["phases"][-1]["noise_multiplier"] / 100
    assert answer["noise_energy"]["dense"] == pytest.approx(1000 * noise**2)
    assert answer["noise_energy"]["sparse"] == pytest.approx(100 * noise**2)
    unreachable, other = answer["other_budgets"]
    assert unreachable["noise_multipliers"] == []
    louder = dearer.phases[-1].noise_multiplier / plan.phases[-1].noise_multiplier
    assert other["noise_energy_factor"] == pytest.approx(louder**2)
    shown = " ".join(typed("plan", *asked).out.split())
    for words in ("out of reach", "What another epsilon costs", "r, for all (1,000 coordinates)"):
        assert words in shown


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


def test_plan_tells_the_support_where_it_can_be_known(typed):
    asked = ("plan", *PUBLIC, "--parameters", "1000", "--method")
    assert "is not known from --parameters alone" in " ".join(typed(*asked, "fest").out.split())
    assert "k=200 active" in " ".join(typed(*asked, "tp-topk").out.split())


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("plan --units 0 --batch-size 10 --epochs 2 --parameters 9", Exit.USAGE, "--units"),
        ("plan --units 90 --parameters 9 --method dp-sgd --warmup-budget 0.3", Exit.USAGE, "has no warm-up"),
        ("plan --units 100 --batch-size 200 --epochs 2 --parameters 9", Exit.PRIVACY, "batch_size"),
        ("plan --units 100", Exit.USAGE, "--parameters"),
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
    assert "pure noise gives" in typed("diagnose", folder).out
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_verify_says_what_is_guaranteed_and_what_not(trained, typed):
    found = typed("verify", trained[0], "--json").json
    assert found["passed"]
    assert found["epsilons"]["PLD (dp-accounting)"] == pytest.approx(trained[1]["epsilon_spent"], rel=0.005)
    promised, limits = " ".join(found["guaranteed"]), " ".join(found["not_guaranteed"])
    assert "adding or removing one row" in promised
    for words in ("not for release", "outside the guarantee", "Tuning"):
        assert words in limits


def test_verify_names_a_corrupted_line_of_the_ledger(trained, typed, tmp_path):
    run = shutil.copytree(trained[0], tmp_path / "run")
    lines = (run / "ledger.jsonl").read_text().splitlines(keepends=True)
    place = [number for number, line in enumerate(lines) if '"kind":"block"' in line][1]
    lines[place] = lines[place].replace('"steps":1', '"steps":0', 1)
    (run / "ledger.jsonl").write_text("".join(lines))
    done = typed("verify", run)
    assert done.code == Exit.MISMATCH
    assert f"ledger.jsonl, line {place + 1}" in done.out
    assert "Not verified" in done.out
    assert "Guaranteed" not in done.out


def test_audit_of_a_function_s_parts_is_told_and_kept_and_spends_nothing(typed, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mechanism, "MOST_RELEASES", 40)
    monkeypatch.setattr(sampling, "HITS", 4000)
    (tmp_path / "own_parts.py").write_text(OWN)
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


def test_a_mistake_has_a_code_of_its_kind_and_a_bug_is_not_dressed_up_as_one():
    def code(kind):
        def broken():
            raise kind("a mistake")

        with pytest.raises(SystemExit) as ended:
            cli.run(broken)
        return ended.value.code

    found = [code(kind) for kind in (DataError, PrivacyError, ModelError, SparseDPError)]
    assert found == [Exit.DATA, Exit.PRIVACY, Exit.USAGE, Exit.USAGE]
    with pytest.raises(ZeroDivisionError):
        code(ZeroDivisionError)


OWN = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
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


def parts():
    return nn.Linear(3, 2), TensorDataset(torch.randn(80, 3), torch.arange(80) % 2), nn.CrossEntropyLoss()


def ok():
    return nn.Linear(3, 4), nn.CrossEntropyLoss(reduction="none"), (torch.randn(4, 3), torch.arange(4))
"""


def test_check_tells_what_is_fast_what_is_slow_and_what_cannot_be_trained(typed, tmp_path, monkeypatch):
    (tmp_path / "own_models_to_check.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    told = typed("check", "own_models_to_check:ok", "--json").json
    assert told == {"model": "own_models_to_check:ok", "parameters": 16, "fast": True, "notes": []}
    shown = typed("check", "own_models_to_check:slow").out
    assert "'target': LerpBackward0 has no formula" in shown
    for path, complaint in (
        ("own_models_to_check:mixing", "statistics of the whole batch"),
        ("own_models_to_check:nothing", "expected (model, loss_fn, rows)"),
        ("own_models_to_check:absent", "expected package.module:function"),
        ("no_such_module_at_all:f", "expected package.module:function"),
        ("nonsense", "expected package.module:function"),
    ):
        typed("check", path).failed_with(Exit.USAGE, complaint)
