"""SparseDPClassifier: scikit-learn's own checks, the guarantee, what is trained and predicted."""

import json
import math
import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse
from scipy.special import expit, softmax
from sklearn.base import clone
from sklearn.preprocessing import MinMaxScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from sklearn_tools import classifier, table, weights
from torch import nn
from torch.utils.data import TensorDataset

import sparsedp
from flat_settings import placed
from runs import by_method
from sparsedp import PrivacyError, PrivateNormalisation, SparseDPError, list_methods, verify
from sparsedp.diagnostics import inspect_run
from sparsedp.errors import DataError
from sparsedp.methods import get_method
from sparsedp.optimizers.factory import AVERAGED, SQUARED, table_rate
from sparsedp.privacy.ledger import Ledger
from sparsedp.runs.run import Run
from sparsedp.sklearn import SparseDPClassifier, SparseDPRegressor, expected_failed_checks

pytestmark = [
    pytest.mark.usefixtures("checked_once"),
    pytest.mark.filterwarnings("ignore:.* units are few:UserWarning"),
]

PRIVATE = [method.name for method in list_methods()]

# Some checks ask for 83 % accuracy (or an R2 of 0.5) on 200 examples, hence the large budget; the rest are about the
# interface.
CHECKED = [
    SparseDPClassifier(epsilon=20.0, epochs=10, unit_norm=True),
    SparseDPRegressor(epsilon=50.0, epochs=20, bounds=(-3, 3), target_bounds=(-3, 3)),
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@parametrize_with_checks(CHECKED, expected_failed_checks=expected_failed_checks, xfail_strict=True)
def test_scikit_learn_finds_nothing_but_what_is_listed(estimator, check):
    check(estimator)


# The guarantee


@pytest.mark.parametrize("method", by_method(PRIVATE))
def test_every_private_method_trains_by_name_within_its_budget(method):
    X, y = table(features=40)
    model = classifier(method=method, epsilon=2.0).fit(X, y)
    assert 1.98 < model.epsilon_ <= 2.0
    assert model.result_.method == method
    assert model.predict_proba(X).shape == (80, 2)


# Randomness


@pytest.mark.parametrize("state", [lambda: None, lambda: 7, lambda: np.random.RandomState(3)])
def test_a_seed_reproduces_the_fit_which_is_then_not_for_release(state):
    X, y = table()
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    before = (torch.get_rng_state(), np.random.get_state()[1].copy())  # noqa: NPY002
    seeds = [state(), state(), 6]
    one, same, other = (classifier(random_state=seed, hidden_layer_sizes=(4,)).fit(X, y) for seed in seeds)
    seeded = seeds[0] is not None
    assert np.array_equal(weights(one), weights(same)) == seeded
    assert not np.array_equal(weights(one), weights(other))
    assert one.publishable_ != seeded
    assert ("not for release" in one.guarantee_) == seeded
    assert torch.equal(before[0], torch.get_rng_state()), "the global generators are left alone"
    np.testing.assert_array_equal(before[1], np.random.get_state()[1])  # noqa: NPY002


def test_a_run_directory_tells_of_the_table_and_is_never_overwritten(tmp_path):
    X, y = table(features=40)
    names = [f"lab_{i}" for i in range(40)]
    frame, held = (
        pd.DataFrame(X, columns=names),
        (pd.DataFrame(table(60, 40, 5)[0], columns=names), table(60)[1]),
    )
    model = classifier(name="ward 7", run_dir=tmp_path / "run", active_ratio=0.3).fit(frame, y, eval_set=held)
    assert model.result_.ledger.steps == model.result_.plan.total_steps
    assert model.result_.metrics["accuracy"] == model.score(*held)
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["model"] == "logistic regression"
    told = {"feature_names": names, "classes": [0, 1], "feature_bounds": [-1, 1]}
    assert {name: record["schema"][name] for name in told} == told
    kept = model.kept_features_.tolist()
    assert kept == [names[i] for i in model.result_.support.indices if i < 40]
    assert 0 < len(kept) < 40
    page = sparsedp.write_report(tmp_path / "run").read_text()
    assert f"{len(kept)} of 40: {', '.join(kept)}" in page
    assert "<h1>tp-topk on ward 7</h1>" in page
    with pytest.raises(SparseDPError, match="run"):
        model.fit(frame, y)


# What is trained and predicted


def test_the_model_is_what_fit_gives_for_the_same_tensors():
    X, y = table(rows=100, features=50)
    low, high = np.full(50, -2.0), np.linspace(0.5, 3, 50)
    given = {"bounds": (low, high), "class_weight": {1: 3.0}, "lr": 0.5, "max_grad_norm": 0.7}
    model = classifier(method="tp-coherent", **given).fit(X, y)

    scaled = MinMaxScaler((-1, 1), clip=True).fit(np.stack([low, high])).transform(X)
    by_hand = nn.Linear(50, 1)
    nn.init.zeros_(by_hand.weight)
    nn.init.zeros_(by_hand.bias)

    def loss(network, rows):
        inputs, targets = rows
        margin = network(inputs).squeeze(1) * (2 * targets - 1)
        return torch.where(targets == 1, 1.0, 1 / 3) * nn.functional.softplus(-margin)

    data = TensorDataset(torch.tensor(scaled, dtype=torch.float32), torch.tensor(y))
    sparsedp.fit(
        by_hand, data, sparsedp.PerExampleLoss(loss), method=get_method("tp-coherent", active_ratio=32 / 51),
        epsilon=3.0, epochs=3, batch_size=16, seed=0, lr=0.5, max_grad_norm=0.7, ema_decay=1.0, progress=False,
    )  # fmt: skip
    expected = torch.cat([by_hand.weight.reshape(-1), by_hand.bias]).detach().numpy()
    assert np.abs(expected).max() > 0.01
    np.testing.assert_allclose(weights(model), expected, atol=1e-5)


@pytest.mark.parametrize("labels", [["no", "yes"], ["a", "b", "c"], [10, 20, 30]])
def test_predictions_are_the_softmax_of_the_scaled_features_times_the_weights(labels):
    rng = np.random.default_rng(3)
    X, y = rng.uniform(0, 10, size=(90, 4)), np.resize(labels, 90)
    model = classifier(classes=labels, bounds=(0, 5), epsilon=20.0).fit(X, y)
    linear = next(module for module in model.model_.modules() if isinstance(module, nn.Linear))
    W, b = linear.weight.detach().numpy(), linear.bias.detach().numpy()
    logits = (np.minimum(X, 5) / 2.5 - 1) @ W.T + b
    binary = len(labels) == 2
    expected = np.hstack([1 - expit(logits), expit(logits)]) if binary else softmax(logits, axis=1)
    np.testing.assert_allclose(model.predict_proba(X), expected, atol=1e-12)
    np.testing.assert_allclose(model.decision_function(X), logits[:, 0] if binary else logits, atol=1e-12)
    np.testing.assert_array_equal(model.predict(X), np.array(labels)[expected.argmax(axis=1)])
    assert model.score(X, y) == np.mean(model.predict(X) == y)


def test_an_additive_model_bends_with_knots_by_the_public_number_of_units():
    X, _ = table(rows=2000, features=1)
    frame, y = pd.DataFrame({"dose": X[:, 0]}), (np.abs(X[:, 0]) > 0.5).astype(int)
    given = {"columns": {"dose": ("number", -1, 1)}, "epochs": 10, "batch_size": 128}
    bent = classifier(**given, model="additive").fit(frame, y)
    assert bent.score(frame, y) > 0.8 > 0.6 > classifier(**given).fit(frame, y).score(frame, y)
    assert bent.coef_names_.tolist()[2:] == [f"dose~{knot:g}" for knot in (-1, -0.5, 0, 0.5, 1)]
    by_hand = bent.encoder_.transform(frame) @ bent.coef_[0] + bent.intercept_[0]
    np.testing.assert_allclose(bent.decision_function(frame), by_hand)
    many = pd.concat([frame] * 5)
    assert classifier(**given, model="additive").fit(many, np.tile(y, 5)).encoder_.knots == 9
    groups = np.arange(10_000) % 9_999
    assert classifier(**given, model="additive").fit(many, np.tile(y, 5), groups=groups).encoder_.knots == 5


@pytest.mark.nightly
def test_hidden_layers_learn_what_a_line_cannot():
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, size=(600, 2))
    y = (X[:, 0] * X[:, 1] > 0).astype(int)
    settings = {"epsilon": 20.0, "epochs": 30, "batch_size": 64, "lr": 0.5, "method": "dp-sgd"}
    assert classifier(**settings, hidden_layer_sizes=(16,)).fit(X, y).score(X, y) > 0.85
    assert classifier(**settings).fit(X, y).score(X, y) < 0.65


NOISY = {"epsilon": 3.0, "epochs": 3, "batch_size": 256}
COHERENT = {"batch_size": 16, "method": get_method("tp-topk", ranking="coherent")}
VERY_NOISY = {"epsilon": 0.5, "epochs": 3, "batch_size": 16}


@pytest.mark.parametrize(
    ("rows", "features", "people", "settings", "method"),
    [
        (80, 3, 80, VERY_NOISY, "dp-sgd"),
        (80, 649, 80, VERY_NOISY, "dp-sgd"),
        (1000, 649, 1000, {"epsilon": 1.0, "epochs": 1, "batch_size": None}, "dp-sgd"),
        (1000, 15_000, 1000, NOISY, "dp-sgd"),
        (10_000, 1_000, 10_000, NOISY, "tp-adaptive"),
        (1000, 400, 1000, NOISY, "dp-sgd"),
        (1000, 1_000, 1000, NOISY | {"epsilon": 200.0}, "dp-sgd"),
        (1000, 15_000, 500, NOISY | {"batch_size": 128}, "dp-sgd"),
        (80, 3, 80, NOISY | {"batch_size": 16, "active_ratio": 0.5}, "tp-topk"),
        (80, 649, 80, NOISY | COHERENT, "tp-topk"),
    ],
)
def test_auto_is_the_same_plan_as_that_of_fit(rows, features, people, settings, method):
    X, y = table(rows=rows, features=features)
    units = None if people == rows else np.arange(rows) % people
    model = classifier(**settings, accountant="rdp").fit(X, y, groups=units)
    data = TensorDataset(torch.tensor(X, dtype=torch.float32), torch.tensor(y))

    def loss(network, batch):
        return network(batch[0]).squeeze(1) * batch[1]

    other = sparsedp.fit(
        nn.Linear(features, 1), data, sparsedp.PerExampleLoss(loss), unit_ids=units, seed=0, accountant="rdp",
        progress=False, **placed(settings),
    )  # fmt: skip
    assert model.method_ == model.result_.plan.method == method
    assert model.result_.plan == other.plan


@pytest.mark.parametrize(("asked", "method"), [({}, "dp-sgd"), ({"active_ratio": 0.3}, "tp-topk")])
def test_an_estimators_run_can_be_diagnosed(tmp_path, asked, method):
    model = classifier(run_dir=tmp_path / "run", epochs=6, batch_size=128, epsilon=8.0, **asked)
    model.fit(*table(rows=800, features=40))
    assert model.method_ == method
    assert set(inspect_run(tmp_path / "run").splits) == {"energy", "coherent"}


def test_sparse_and_dense_features_give_the_same_model():
    X, y = table(features=30)
    X[np.abs(X) < 0.7] = 0
    same = {"unit_norm": True, "bounds": (-0.9, 0.9)}
    dense = classifier(**same).fit(X, y)
    for kind in (sparse.csr_matrix, sparse.coo_array):
        thin = classifier(**same).fit(kind(X), y)
        np.testing.assert_allclose(weights(thin), weights(dense), atol=1e-6)
        np.testing.assert_allclose(thin.predict_proba(kind(X)), dense.predict_proba(X), atol=1e-6)
    twice = (np.repeat(np.arange(80), 60), np.tile(np.arange(30), 160))
    doubled = sparse.csr_matrix((np.repeat(X / 2, 2, axis=0).ravel(), twice), shape=X.shape)
    plain, summed = classifier().fit(X, y), classifier().fit(doubled, y)
    np.testing.assert_allclose(weights(summed), weights(plain), atol=1e-6)


def test_a_handful_of_coordinates_is_trained_whole_unless_told_otherwise():
    few, many = table(features=3), table(features=600)
    assert classifier(method="tp-coherent").fit(*few).result_.k == 4
    assert classifier(active_ratio=0.5).fit(*few).result_.k == 2
    assert classifier(method=get_method("tp-topk", active_ratio=0.5)).fit(*few).result_.k == 2
    assert classifier(method="tp-coherent").fit(*many).result_.k == 120
    assert classifier().fit(*many).result_.k == 601
    assert classifier(method="dp-sgd").fit(*few).result_.k == 4


# The rate


def rate_in(fitted):
    """As the run's record has it."""
    (group,) = Run.open(fitted.run_dir).record["settings"]["optimizer"]["groups"]
    return group["lr"]


@pytest.mark.parametrize("unit_norm", [False, True])
def test_the_estimators_take_it_and_a_network_or_a_given_rate_does_not(unit_norm, tmp_path):
    X, y = table(rows=300, features=5)
    given = {"accountant": "rdp", "epochs": 2, "unit_norm": unit_norm}
    model = classifier(**given, run_dir=tmp_path / "rule").fit(X, y)
    length = 1.0 if unit_norm else 5**0.25
    assert rate_in(model) == pytest.approx(table_rate(model.result_.plan, 6, length, AVERAGED))
    assert rate_in(classifier(**given, lr=0.125, run_dir=tmp_path / "given").fit(X, y)) == 0.125
    network = classifier(**given, hidden_layer_sizes=4, run_dir=tmp_path / "network").fit(X, y)
    assert rate_in(network) == pytest.approx(0.2 * math.sqrt(16 / 128))
    told = {"target_bounds": (0, 1), "batch_size": 16, "run_dir": tmp_path / "number"}
    number = regressor(**given, **told).fit(X, y)
    assert rate_in(number) == pytest.approx(table_rate(number.result_.plan, 6, length, SQUARED))


# Copies


def test_a_saved_model_carries_no_record():
    X, y = table(rows=200, features=7)
    X = X.astype(np.float32)
    units = np.random.default_rng(1).permutation(200)
    saved = pickle.dumps(classifier().fit(X, y, groups=units))
    for private in (X[0], X[-1], X[0].astype(np.float64), units[:8], y[:16]):
        assert private.tobytes() not in saved


def test_a_fit_that_fails_leaves_the_one_before_whole():
    X, y = table()
    model = classifier().fit(X, y)
    before, said = dict(vars(model)), model.predict(X)
    names = np.where(y, "b", "a")
    with pytest.raises(SparseDPError, match="class_weight"):
        model.set_params(classes=["a", "b"], class_weight={"z": 1.0}).fit(X[:, :2], names)
    changed = {"classes", "class_weight"}
    assert {name: one for name, one in vars(model).items() if name not in changed} == {
        name: one for name, one in before.items() if name not in changed
    }
    np.testing.assert_array_equal(model.predict(X), said)


# Columns whose size is measured privately


def test_the_measurement_is_a_phase_of_the_plan_and_in_the_ledger(tmp_path):
    X, y = table(rows=400)
    model = classifier(epsilon=3, private_scale=[0, 2], run_dir=tmp_path / "run").fit(X, y)
    first, *others = model.result_.plan.phases
    assert (first.name, first.steps) == ("normalise", 1)
    assert (first.sampling_rate, first.noise_multiplier) == (1.0, 8.0)
    assert first.support["columns"] == (0, 2)
    ledger = Ledger.read(tmp_path / "run" / "ledger.jsonl")
    assert ledger.charged == 1 + sum(phase.steps for phase in others)
    assert (ledger.blocks[0].phase, ledger.blocks[0].noise_multiplier) == ("normalise", 8.0)
    assert model.epsilon_ <= 3
    assert verify(tmp_path / "run").passed
    assert model.model_.scale[1] == 1
    assert not model.model_.centre.any()


def test_a_column_that_is_far_smaller_than_its_bounds_counts_again():
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, size=(4000, 3)) * [0.01, 1, 1]
    y = (X[:, 0] + 0.001 * X[:, 1] > 0).astype(int)
    given = {"epsilon": 3, "epochs": 5, "batch_size": 256, "lr": 0.5}
    blind = classifier(**given).fit(X, y).score(X, y)
    scaled = classifier(**given, private_scale=[0]).fit(X, y)
    assert scaled.score(X, y) > 0.9 > blind + 0.1
    assert 0.002 < float(scaled.model_.scale[0]) < 0.02
    np.testing.assert_allclose(scaled.predict_proba(X).sum(axis=1), 1)


def test_columns_are_taken_by_name_and_kept_features_are_still_named():
    X, y = table(rows=200)
    frame = pd.DataFrame(X, columns=["stay", "age", "visits"])
    named = classifier(private_scale=["visits", "stay"]).fit(frame, y)
    assert named.result_.plan.phases[0].support["columns"] == (0, 2)
    assert set(named.kept_features_) == {"stay", "age", "visits"}
    own = classifier(private_scale=PrivateNormalisation(noise_multiplier=4.0)).fit(frame, y)
    assert own.result_.plan.phases[0].steps == 2
    assert own.model_.centre.any()


# Regression


def numbers(rows=3000):
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, size=(rows, 3))
    return X, 20 + X @ np.array([5.0, -3.0, 0.0]) + rng.normal(0, 0.5, rows)


def regressor(**changes):
    given = {"target_bounds": (0, 40), "bounds": (-1, 1), "epochs": 5, "random_state": 0}
    return SparseDPRegressor(**(given | changes))


@pytest.mark.parametrize("loss", ["squared", "huber"])
def test_it_finds_the_coefficients_in_the_units_of_the_target(loss):
    X, y = numbers()
    model = regressor(loss=loss, epochs=20).fit(X, y)
    assert model.epsilon_ <= 3
    np.testing.assert_allclose(model.coef_, [5, -3, 0], atol=1.0)
    assert model.intercept_ == pytest.approx(20, abs=1.0)
    np.testing.assert_allclose(model.predict(X[:9]), np.clip(X[:9] @ model.coef_ + model.intercept_, 0, 40))
    assert model.score(X, y) > 0.9


@pytest.mark.parametrize(("loss", "criterion"), [("squared", nn.MSELoss), ("huber", nn.HuberLoss)])
def test_the_model_is_what_fit_gives_for_the_scaled_target(loss, criterion):
    X, y = numbers(200)
    model = regressor(loss=loss, lr=0.3, batch_size=32).fit(X, y)
    by_hand = nn.Sequential(nn.Linear(3, 1))
    for parameter in by_hand.parameters():
        nn.init.zeros_(parameter)
    scaled = torch.tensor(np.clip(y, 0, 40) / 20 - 1).float()[:, None]
    more = {"delta": 0.2} if loss == "huber" else {}
    sparsedp.fit(
        by_hand, TensorDataset(torch.tensor(X).float(), scaled), criterion(reduction="none", **more), epsilon=3.0,
        epochs=5, batch_size=32, lr=0.3, seed=0, progress=False, ema_decay=1.0,
    )  # fmt: skip
    weights = [
        torch.cat([p.detach().reshape(-1) for p in m.parameters()]).double() for m in (model.model_, by_hand)
    ]
    torch.testing.assert_close(*weights, atol=1e-6, rtol=0)


def test_targets_outside_the_bounds_count_as_the_bounds():
    X, y = numbers(500)
    far = np.where(np.arange(500) == 7, 1e9, y)
    near = np.where(np.arange(500) == 7, 40.0, y)
    models = [regressor().fit(X, one) for one in (far, near)]
    np.testing.assert_array_equal(models[0].coef_, models[1].coef_)


@pytest.mark.parametrize("norm", ["auto", {"*bias": 0.2, "*": 0.5}])
def test_a_clip_beyond_flat_is_that_of_fit(norm):
    fitted = classifier(max_grad_norm=norm).fit(*table())
    phase = fitted.result_.plan.phases[-1]
    assert phase.clipping == ("auto" if norm == "auto" else tuple(norm.items()))
    assert clone(fitted).get_params()["max_grad_norm"] == norm


def test_noise_in_place_of_a_budget_says_what_it_cost():
    given = classifier(epsilon=None, noise_multiplier=1.5).fit(*table())
    same = sparsedp.plan(
        given.method_, units=80, noise_multiplier=1.5, delta=given.delta_, epochs=3, batch_size=16
    )
    assert given.result_.noise_multiplier == 1.5
    assert given.epsilon_ == pytest.approx(same.target_epsilon)


COLUMNS = {"columns": {"stay": "drop", "age": "drop", "visits": "drop"}, "bounds": None}


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        *(({"epsilon": one}, PrivacyError, "epsilon: got") for one in (None, True, "3", 0.0, -1.0, np.inf, np.nan)),
        ({"noise_multiplier": 1.0}, PrivacyError, "expected one of them"),
        ({"noise_multiplier": 0.0, "epsilon": None}, PrivacyError, "noise_multiplier: got 0.0"),
        ({"classes": [0, 2]}, DataError, "not among the declared"),
        ({"classes": ["0", "1"]}, DataError, "not among the declared"),
        ({"classes": [0]}, DataError, "at least 2"),
        ({"class_weight": "balanced"}, PrivacyError, "count the training labels"),
        ({"class_weight": {1: 0.0}}, DataError, "> 0"),
        ({"class_weight": {1: np.inf}}, DataError, "> 0"),
        ({"class_weight": {7: 1.0}}, DataError, "some of the classes"),
        ({"unit": "patient"}, PrivacyError, "unit_ids|groups"),
        *(({"bounds": one}, DataError, "bounds")
          for one in [(1, 1), (0, np.inf), (np.nan, 1), ([0, 0], 1), 3, (0, 1, 2), ("a", "b")]),
        (COLUMNS, DataError, "every column is left out"),
        (COLUMNS | {"bounds": (0, 1)}, DataError, "columns and bounds"),
        *(({"hidden_layer_sizes": one}, SparseDPError, "hidden") for one in [(0,), (2.5,), (-1, 3)]),
        ({"model": "trees"}, SparseDPError, "expected 'linear', or 'additive' with"),
        ({"model": "additive"}, SparseDPError, "expected 'linear', or 'additive' with"),
        ({"active_ratio": 0.0}, SparseDPError, "ratio"),
        ({"private_scale": ["height"]}, DataError,
         r"private_scale: got the columns \['height'\], expected some of stay, age, visits"),
        ({"private_scale": [3]}, PrivacyError, "columns: got 3, expected numbers below 3"),
        ({"private_scale": []}, PrivacyError, "columns: got"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_or_are_not_public_are_refused(given, error, told):
    X, y = table()
    with pytest.raises(error, match=told):
        classifier(**given).fit(pd.DataFrame(X, columns=["stay", "age", "visits"]), y)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        *(({"target_bounds": one}, "known without looking at the data")
          for one in [None, (0, 0), (0, np.inf), 3, (1, 2, 3), ("a", "b")]),
        ({"loss": "absolute"}, "'squared' or 'huber'"),
    ],
)  # fmt: skip
def test_a_regression_without_public_bounds_or_a_loss_is_refused(given, told):
    with pytest.raises(SparseDPError, match=told):
        regressor(**given).fit(*numbers(100))
