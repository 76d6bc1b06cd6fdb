"""Settings: what users write is checked, completed from recipes, and hashed."""

import json
import math

import pytest

from sparsedp.errors import SparseDPError
from sparsedp_experiments.data import DATASETS
from sparsedp_experiments.models import MODELS
from sparsedp_experiments.runs.settings import KINDS, Settings

EVERYTHING = {
    "dataset": "digits",
    "data_options": {"groups": 9},
    "validation": 0.2,
    "subset": 100,
    "model": "mlp",
    "model_options": {"hidden": [8]},
    "method": "tp-coherent",
    "active_ratio": "auto",
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
    "public_scores": "scores.safetensors",
    "engine": "reference",
    "max_physical_batch": 64,
    "cache_features": True,
    "seed": 3,
}


def test_every_setting_survives_a_round_trip_through_json():
    assert set(EVERYTHING) == set(KINDS) == {name for name in Settings.__slots__}
    settings = Settings.from_json(EVERYTHING)
    assert settings.to_json() == EVERYTHING
    assert Settings.from_json(json.loads(json.dumps(settings.to_json()))) == settings
    assert settings.epsilon == math.inf


@pytest.mark.parametrize("name", sorted(set(EVERYTHING) - {"dataset"}))
def test_every_setting_changes_the_hash(name):
    without = {key: value for key, value in EVERYTHING.items() if key != name}
    assert Settings.from_json(without).digest != Settings.from_json(EVERYTHING).digest


def test_a_whole_number_and_its_float_are_the_same_run():
    one, other = ({"dataset": "digits", "epsilon": value, "lr": value} for value in (2, 2.0))
    assert Settings.from_json(one).digest == Settings.from_json(other).digest


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0),
        ("epochs", 1.5),
        ("epochs", True),
        ("batch_size", "64"),
        ("epsilon", "three"),
        ("epsilon", math.nan),
        ("epsilon", -1),
        ("epsilon", 0),
        ("delta", 0),
        ("delta", 1),
        ("batch_size", 0),
        ("lr", math.inf),
        ("clip_norm", [1.0]),
        ("clip_norm", [1.0, "a"]),
        ("active_ratio", "half"),
        ("optimizer", "lbfgs"),
        ("scheduler", "step"),
        ("accountant", "gdp"),
        ("unit", "patient"),
        ("seed", -1),
        ("options", ["ranking"]),
        ("model", ""),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_name(name, value):
    with pytest.raises(SparseDPError, match=f"^{name}: got"):
        Settings.from_json({"dataset": "digits", name: value})


def test_an_unknown_setting_is_refused_with_the_nearest_one():
    with pytest.raises(SparseDPError, match="did you mean 'batch_size'"):
        Settings.from_json({"dataset": "digits", "batchsize": 3})
    with pytest.raises(SparseDPError, match="dataset: not given"):
        Settings.from_json({"epochs": 3})


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


def test_every_recipe_names_a_model_that_exists():
    for row in DATASETS.values():
        assert {row.model, *row.recipes} <= set(MODELS)
