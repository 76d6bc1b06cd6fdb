"""Settings carried out: data, model, privacy unit and optimizer are those asked for."""

import warnings

import numpy as np
import pytest
import torch

from sparsedp.errors import DataError, ModelError, PrivacyWarning, SparseDPError
from sparsedp_experiments.runs.execute import build_model, execute, load_data
from sparsedp_experiments.runs.settings import Settings

pytestmark = pytest.mark.usefixtures("checked_once")

TINY = {"dataset": "digits", "subset": 120, "epochs": 1, "batch_size": 30, "epsilon": 8.0, "seed": 0}


def settings(**changes):
    return Settings.from_json({**TINY, **changes})


@pytest.fixture
def patients(tmp_path):
    """60 rows of 20 patients to train on, 20 rows of 10 others to test on."""
    generator = np.random.default_rng(0)
    arrays = {}
    for side, rows, people, first in (("train", 60, 20, 0), ("test", 20, 10, 100)):
        arrays[f"x_{side}"] = generator.random((rows, 4), dtype=np.float32)
        arrays[f"y_{side}"] = np.arange(rows) % 2
        arrays[f"units_{side}"] = first + np.arange(rows) % people
    np.savez(tmp_path / "clinic.npz", **arrays)
    return {
        "dataset": str(tmp_path / "clinic.npz"),
        "classes": ["well", "ill"],
        "epochs": 1,
        "batch_size": 5,
        "seed": 0,
    }


def test_people_are_protected_where_the_data_knows_them(patients):
    result = execute(Settings.from_json({**patients, "data_options": {"unit": "patient"}}))
    assert (result.unit, result.plan.units) == ("patient", 20)
    assert set(result.metrics) >= {
        "auc",
        "average_precision",
        "balanced_accuracy",
        "sensitivity",
        "specificity",
    }


def test_rows_are_protected_only_when_asked_for_and_with_a_warning(patients):
    with pytest.warns(PrivacyWarning, match="rows are protected"):
        result = execute(Settings.from_json({**patients, "unit": "row"}))
    assert (result.unit, result.plan.units) == ("row", 60)


def test_inputs_are_normalised_for_each_patient_where_that_is_asked_for(patients):
    asked = {"normalise": {"noise_multiplier": 6.0}, "data_options": {"unit": "patient"}, "epsilon": 8.0}
    result = execute(Settings.from_json({**patients, **asked, "rows_per_unit": 3}))
    first = result.plan.phases[0]
    assert (first.name, first.noise_multiplier, first.clip_norm, first.trains) == (
        "normalise",
        6.0,
        1.0,
        False,
    )
    assert result.plan.expected_batch_size(first) == 20
    assert result.epsilon <= 8.0
    assert result.model.centre.shape == (4,)


def test_a_normalisation_is_checked_before_anything_is_loaded(patients):
    with pytest.raises(SparseDPError, match="normalise: got \\['sigmas'\\]"):
        Settings.from_json({**patients, "normalise": {"sigmas": 8}}).resolved()


def test_an_npz_needs_its_classes_declared(patients):
    del patients["classes"]
    with pytest.raises(DataError, match="name its classes"):
        execute(Settings.from_json(patients))


def test_nothing_is_spent_without_rows_to_evaluate_on(patients, tmp_path):
    with np.load(patients["dataset"]) as file:
        arrays = {name: file[name][: 0 if "test" in name else None] for name in file.files}
    np.savez(patients["dataset"], **arrays)
    with pytest.raises(DataError, match=r"x_test.* has no rows; give some, or .*validation=0.2"):
        execute(Settings.from_json(patients), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    result = execute(Settings.from_json({**patients, "validation": 0.2}))
    assert (result.plan.units, set(result.metrics) >= {"accuracy"}) == (16, True)


def test_a_table_of_ones_own_gets_the_model_with_a_rate_for_tables(patients, tmp_path):
    assert Settings.from_json(patients).resolved().model == "logistic"
    assert Settings.from_json({**patients, "model": "mlp"}).resolved().model == "mlp"
    np.savez(tmp_path / "pictures.npz", x_train=np.zeros((6, 1, 4, 4)))
    for other in ("pictures.npz", "none.npz", "folder"):
        assert Settings.from_json({"dataset": str(tmp_path / other)}).resolved().model == "mlp"


def test_a_seed_decides_everything():
    first, again, other = (execute(settings(seed=seed)) for seed in (3, 3, 4))
    weights = [
        torch.cat([p.flatten() for p in result.model.parameters()]) for result in (first, again, other)
    ]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_initial_weights_come_from_the_seed_and_leave_torch_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, two = (build_model("mlp", {"hidden": [4]}, (1, 8, 8), 10, seed=1) for _ in range(2))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(one[1].weight, two[1].weight)
    assert one[1].weight.shape == (4, 64)


def test_a_validation_split_takes_the_test_sets_place():
    whole, split = (
        load_data(settings(subset=None or 10**6)),
        load_data(settings(subset=10**6, validation=0.25)),
    )
    assert len(split.train) + len(split.test) == len(whole.train)
    assert abs(len(split.test) - 0.25 * len(whole.train)) < 1
    kept = {tuple(row) for row in whole.train.inputs.flatten(1).tolist()}
    assert {tuple(row) for row in split.test.inputs.flatten(1).tolist()} <= kept


def test_a_subset_takes_whole_units(patients):
    bundle = load_data(Settings.from_json({**patients, "subset": 7}))
    assert (bundle.train.unit_count, bundle.test.unit_count) == (7, 7)
    assert len(bundle.train) == 21
    assert any("subset" in note for note in bundle.notes)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("scheduler", ["constant", "cosine", "linear"])
def test_every_optimizer_and_scheduler_runs_and_is_recorded(optimizer, scheduler, tmp_path):
    from sparsedp.runs.run import Run

    execute(settings(optimizer=optimizer, scheduler=scheduler, subset=60), out=tmp_path / "run")
    saved = Run.open(tmp_path / "run").record
    assert saved["settings"]["optimizer"]["class"].lower() == optimizer
    assert (saved["settings"]["scheduler"] is None) == (scheduler == "constant")
    assert saved["config"]["optimizer"] == optimizer


def test_a_nominal_split_and_two_clips_reach_the_plan():
    plan = execute(settings(epochs=3, phase1_budget=0.3, clip_norm=[1.0, 0.5])).plan
    assert [phase.clip_norm for phase in plan.phases] == [1.0, 0.5]
    assert plan.phases[0].noise_multiplier != plan.phases[1].noise_multiplier


def test_an_ablation_runs_with_an_infinite_epsilon():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        plain = {key: value for key, value in TINY.items() if key != "epsilon"}
        result = execute(Settings.from_json({**plain, "method": "noisy-sgd", "noise_std": 0.0}))
    assert not result.private


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model": "cnn"}, ModelError, "mnist-cnn"),
        ({"model_options": {"width": 3}}, ModelError, "knows no"),
        ({"model": "mnist-cnn", "model_options": {"activation": "sin"}}, SparseDPError, "activation"),
        ({"data_options": {"pixels": "unit"}}, SparseDPError, "takes none"),
        ({"momentum": 0.5, "model": "logistic"}, SparseDPError, "lr: not given"),
        ({"dataset": "mnist", "data_options": {"colour": 1}}, SparseDPError, "knows no"),
        ({"dataset": "mnist", "data_options": {"pixels": "bright"}}, SparseDPError, "pixels"),
    ],
)
def test_what_cannot_be_done_is_said(changes, error, words):
    with pytest.raises(error, match=words):
        execute(settings(**changes))


@pytest.mark.nightly
def test_kept_features_change_nothing_but_the_time(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSEDP_CACHE", str(tmp_path / "cache"))
    generator, arrays = np.random.default_rng(0), {}
    for side, rows in (("train", 40), ("test", 12)):
        arrays[f"x_{side}"] = generator.random((rows, 3, 8, 8), dtype=np.float32)
        arrays[f"y_{side}"] = np.arange(rows) % 2
    np.savez(tmp_path / "pictures.npz", **arrays)
    asked = {"dataset": str(tmp_path / "pictures.npz"), "classes": ["no", "yes"], "model": "lite0",
             "model_options": {"resize": 32}, "epochs": 2, "batch_size": 10, "seed": 0}  # fmt: skip
    plain, kept = (execute(Settings.from_json({**asked, "cache_features": flag})) for flag in (False, True))
    assert plain.metrics == pytest.approx(kept.metrics, rel=1e-5)
    weights = plain.model.state_dict()
    for name, value in kept.model.state_dict().items():
        torch.testing.assert_close(value, weights[name], rtol=1e-5, atol=1e-6)


def test_features_of_a_model_without_a_fixed_part_cannot_be_kept():
    with pytest.raises(ModelError, match="cache_features"):
        execute(settings(model="mlp", cache_features=True))


def test_least_squares_is_one_release_over_all_units_unless_told_otherwise():
    asked = {"dataset": "digits", "model": "least-squares", "method": "auto"}
    asked |= {"epsilon": 8.0, "delta": 1e-5, "seed": 0}
    result = execute(Settings.from_json(asked))
    (phase,) = result.plan.phases
    assert (phase.steps, phase.sampling_rate) == (1, 1.0)
    assert phase.clip_norm == pytest.approx((1 + 0.9) ** 0.5), "what a record of ten classes adds"
    assert result.metrics["accuracy"] > 0.8
    sampled = execute(Settings.from_json({**asked, "epochs": 2, "batch_size": 500}))
    assert sampled.plan.phases[0].steps > 2
    assert sampled.metrics["accuracy"] > 0.8


@pytest.mark.parametrize("change", [{"optimizer": "adam"}, {"momentum": 0.9}, {"weight_decay": 0.1}])
def test_least_squares_refuses_an_optimizer_that_does_not_add_up_releases(change):
    with pytest.raises(SparseDPError, match=r"least squares: got optimizer .* expected plain sgd"):
        execute(Settings.from_json({"dataset": "digits", "model": "least-squares", **change}))
