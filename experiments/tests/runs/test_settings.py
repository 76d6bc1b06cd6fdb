"""Settings and the files they come from: round trips, digests, grids, mistakes by name."""

import json
import math

import pytest

from sparsedp.errors import SparseDPError
from sparsedp_experiments.data import DATASETS
from sparsedp_experiments.runs.grid import parse_experiment
from sparsedp_experiments.runs.settings import KINDS, Settings

# Settings: what users write is checked, completed from recipes, and hashed.


EVERYTHING = {
    "dataset": "digits",
    "data_options": {"groups": 9},
    "validation": 0.2,
    "subset": 100,
    "model": "mlp",
    "model_options": {"hidden": [8]},
    "method": "tp-coherent",
    "active_ratio": 0.5,
    "options": {"granularity": "coordinates"},
    "epsilon": "inf",
    "delta": 1e-6,
    "accountant": "rdp",
    "unit": "row",
    "rows_per_unit": 2,
    "epochs": 3,
    "batch_size": 10,
    "clip_norm": [1.0, 0.5],
    "noise_std": 0.5,
    "normalise": {"noise_multiplier": 8.0, "clip_norm": 0.5},
    "warmup_fraction": 0.2,
    "selection_budget": 0.2,
    "phase1_budget": 0.4,
    "optimizer": "adam",
    "lr": 0.1,
    "momentum": 0.5,
    "weight_decay": 0.01,
    "scheduler": "cosine",
    "ema_decay": 0.9,
    "engine": "reference",
    "max_physical_batch": 64,
    "seed": 3,
}


def test_every_setting_survives_a_round_trip_through_json():
    assert set(EVERYTHING) == set(KINDS) == {name for name in Settings.__slots__}
    settings = Settings.from_json(EVERYTHING)
    assert settings.to_json() == EVERYTHING
    assert Settings.from_json(json.loads(json.dumps(settings.to_json()))) == settings
    assert settings.epsilon == math.inf


def test_a_whole_number_and_its_float_are_the_same_run():
    one, other = ({"dataset": "digits", "epsilon": value, "lr": value} for value in (2, 2.0))
    assert Settings.from_json(one).digest == Settings.from_json(other).digest


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0),
        ("batch_size", "64"),
        ("epsilon", -1),
        ("delta", 1),
        ("lr", math.inf),
        ("clip_norm", [1.0]),
        ("active_ratio", "half"),
        ("optimizer", "lbfgs"),
        ("unit", "patient"),
        ("seed", -1),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_name(name, value):
    with pytest.raises(SparseDPError, match=f"^{name}: got"):
        Settings.from_json({"dataset": "digits", name: value})


def test_a_recipe_fills_gaps_and_only_gaps():
    plain = Settings.from_json({"dataset": "mnist"}).resolved()
    recipe = DATASETS["mnist"].recipes["mnist-cnn"]
    assert {name: getattr(plain, name) for name in recipe} == recipe
    assert (plain.model, plain.epsilon, plain.momentum) == ("mnist-cnn", 3.0, 0.9)
    own = Settings.from_json({"dataset": "mnist", "epochs": 1, "epsilon": 8, "momentum": 0.0}).resolved()
    assert (own.epochs, own.epsilon, own.momentum) == (1, 8.0, 0.0)
    assert own.resolved() == own


def test_a_method_that_is_not_private_has_an_infinite_budget_and_one_bound():
    noisy = Settings.from_json({"dataset": "digits", "method": "noisy-sgd", "noise_std": 0.0}).resolved()
    assert (noisy.epsilon, noisy.clip_norm) == (math.inf, None)
    clipped = Settings.from_json({"dataset": "digits", "method": "clipped-sgd"}).resolved()
    assert (clipped.epsilon, clipped.clip_norm) == (math.inf, 0.25)


@pytest.mark.parametrize(
    "wrong", [{"method": "sgd"}, {"options": {"rank": 1}}, {"method": "dp-sgd", "options": {"prune": True}}]
)
def test_a_wrong_method_or_option_is_found_before_anything_runs(wrong):
    with pytest.raises(SparseDPError):
        Settings.from_json({"dataset": "digits", **wrong}).resolved()


# Experiment files: the grid they make, and what they refuse.


def experiment(**content):
    return parse_experiment({"base": {"dataset": "digits"}, **content}, "x")


def test_runs_are_the_product_of_the_axes_with_seeds_outermost():
    runs = experiment(seeds=2, grid={"epsilon": [1, 3.5], "method": ["dp-sgd", "tp-topk"]}).runs()
    seen = [(run.seed, run.settings.epsilon, run.settings.method) for run in runs]
    cells = [(1.0, "dp-sgd"), (1.0, "tp-topk"), (3.5, "dp-sgd"), (3.5, "tp-topk")]
    assert seen == [(seed, *cell) for seed in (0, 1) for cell in cells]
    assert all(run.settings.seed == run.seed for run in runs)
    assert runs[2].cell == {"epsilon": "3.5", "method": "dp-sgd"}
    assert len({run.name for run in runs}) == len(runs)
    assert all(set(run.name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-_.") for run in runs)


def test_a_named_axis_changes_several_settings_at_once():
    tasks = [
        {"name": "small", "epochs": 1, "lr": 0.5},
        {"name": "large model", "model_options": {"hidden": [9]}},
    ]
    small, large = experiment(grid={"task": tasks}).runs()
    assert (small.settings.epochs, small.settings.lr) == (1, 0.5)
    assert large.settings.model_options.plain() == {"hidden": [9]}
    assert large.cell == {"task": "large model"}


def test_overrides_apply_where_they_match_and_later_ones_win():
    rules = [
        {"where": {"method": ["tp-topk", "tp-rand"]}, "set": {"lr": 1.0, "epochs": 2}},
        {"where": {"method": "tp-topk", "epsilon": 3.0}, "set": {"lr": 2.0}},
    ]
    grid = {"epsilon": [1, 3], "method": ["dp-sgd", "tp-rand", "tp-topk"]}
    runs = experiment(grid=grid, override=rules).runs()
    found = {tuple(run.cell.values()): (run.settings.lr, run.settings.epochs) for run in runs}
    assert found["1", "dp-sgd"] == (0.5, 30)
    assert found["3", "tp-rand"] == (1.0, 2)
    assert found["1", "tp-topk"] == (1.0, 2)
    assert found["3", "tp-topk"] == (2.0, 2)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"epochs": 3}, r"belong under \[base\]"),
        ({"base": {"dataset": "digits", "epoch": 3}}, "did you mean 'epochs'"),
        ({"base": {"dataset": "digitz"}}, "digitz"),
        ({"seeds": 0}, "seeds"),
        ({"grid": {"method": "dp-sgd"}}, "expected a list"),
        ({"grid": {"method": ["dp-sgd", "dp-sgd"]}}, "every value once"),
        ({"grid": {"method": ["dp-sgd", "sgd"]}}, "sgd, seed 0: method: got 'sgd'"),
        ({"grid": {"epsilon": [1, "x"]}}, "epsilon: got 'x'"),
        ({"grid": {"task": [{"name": "a", "speed": 1}]}}, "no setting 'speed'"),
        ({"grid": {"task": [{"name": "a"}, {"name": "b"}]}}, "the same run"),
        ({"grid": {"epsilon": [1]}, "override": [{"where": {"delta": 1}, "set": {}}]}, "an axis of the grid"),
        ({"grid": {"epsilon": [1]}, "override": [{"where": {"epsilon": 2}, "set": {}}]}, "expected one of"),
        ({"grid": {"epsilon": [1]}, "override": {"where": {}}}, r"\[\[override\]\]"),
        ({"grid": {"method": ["tp-topk"]}, "contrast": {"baseline": "dp-sgd"}}, "contrast"),
    ],
)
def test_a_mistake_in_a_file_is_named(content, words):
    with pytest.raises(SparseDPError, match=words):
        experiment(**content).runs()
