"""What a report prints for running again really runs again."""

from __future__ import annotations

import json
import shlex
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from report_runs import a_run, data, loss_fn, network

from sparsedp import About, MethodOptions, load_weights
from sparsedp.methods import Cooling, EverySteps, GeometryRule, Granularity, Protection, all_methods
from sparsedp.methods.options import configure
from sparsedp.privacy import NominalSplit
from sparsedp.report.reproduce import changed_options, recipe
from sparsedp.report.run import read_run

pytestmark = pytest.mark.usefixtures("checked_once")

CASES = {
    "plain": {"method": "tp-topk"},
    "dense": {"method": "dp-sgd"},
    "ratio": {"method": "tp-coherent", "active_ratio": 0.35},
    "options": {
        "method": "tp-coherent",
        "options": MethodOptions(granularity=Granularity.ROWS, schedule=Cooling()),
    },
    "clock": {"method": "on-rand", "options": MethodOptions(clock=EverySteps(2), active_ratio=0.4)},
    "geometry": {"method": "adadpigu", "options": MethodOptions(centre_decay=0.8, per_sample_top=0.5)},
    "split": {
        "method": "tp-topk",
        "split": NominalSplit(0.4),
        "warmup_fraction": 0.5,
        "clip_norm": (1.0, 0.5),
    },
    "adam": {
        "method": "tp-rand",
        "optimizer": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.9)),
        "ema_decay": 0.9,
    },
    "no clip": {"method": "noisy-sgd", "epsilon": None, "noise_std": 0.5},
    "units": {
        "method": "tp-topk",
        "units": [i // 2 for i in range(80)],
        "unit": "patient",
        "rows_per_unit": 2,
    },
}


@pytest.mark.parametrize(
    "case",
    [
        case if case in ("plain", "dense", "geometry") else pytest.param(case, marks=pytest.mark.heavy)
        for case in CASES
    ],
)
def test_the_python_in_a_report_makes_the_same_plan_and_the_same_weights(case, tmp_path: Path):
    folder = a_run(tmp_path / "run", seed=7, **CASES[case])
    found = recipe(read_run(folder))
    assert found is not None
    names = {
        "model": network(),
        "train_dataset": data(1),
        "loss_fn": loss_fn,
        "units": CASES[case].get("units"),
    }
    exec(found.python, names)
    saved = network()
    load_weights(folder, saved)
    again = names["result"]
    assert again.plan == read_run(folder).plan
    for one, other in zip(saved.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("method", all_methods(), ids=lambda method: method.name)
def test_a_row_of_the_table_needs_no_options(method):
    assert changed_options(method) == {}


def test_options_come_back_as_they_were_given():
    method = next(m for m in all_methods() if m.name == "tp-topk")
    options = MethodOptions(
        ranking="coherent", prune=True, geometry=GeometryRule.STANDARDIZED, variance_decay=0.5
    )
    changed = changed_options(configure(method, options))
    assert changed is not None
    assert configure(method, MethodOptions.from_json(changed)) == configure(method, options)


def test_a_method_of_the_users_own_has_no_recipe():
    method = all_methods()[0]
    assert changed_options(replace(method, name="my-own")) is None
    assert changed_options(replace(method, protection=Protection.NO_NOISE)) is None


def test_the_command_line_holds_every_setting_the_run_was_started_with(tmp_path: Path):
    config = {
        "dataset": "digits",
        "method": "tp-topk",
        "epsilon": 3.0,
        "clip_norm": [1.0, 0.5],
        "batch_size": 128,
        "classes": ["a b", "c"],
        "momentum": 0.5,
        "options": {"ranking": "coherent", "clock": {"per_epoch": 2}},
        "scheduler": "cosine",
        "seed": 0,
    }
    folder = a_run(tmp_path / "run", "tp-topk", seed=0, about=About(dataset="digits", config=config))
    found = recipe(read_run(folder))
    assert found is not None
    assert found.command is not None
    words = shlex.split(found.command.replace("\\\n", " "))
    assert words[:2] == ["sparsedp", "train"]
    flags: dict[str, object] = {}
    for flag, value in zip(words[2::2], words[3::2], strict=True):
        if flag == "--set":
            flags.update(tomllib.loads(value))
        else:
            flags[flag.removeprefix("--").replace("-", "_")] = value
    assert flags.pop("out") == "RUN"
    assert {"clip_norm": "1.0,0.5", "classes": "a b,c", "epsilon": "3.0"}.items() <= flags.items()
    assert flags["options"] == config["options"]
    assert flags["scheduler"] == "cosine"
    assert set(flags) == set(config)


def test_a_run_started_from_python_has_no_command_line(single):
    found = recipe(read_run(single))
    assert found is not None
    assert found.command is None
    assert json.loads((single / "record.json").read_text())["config"] is None
