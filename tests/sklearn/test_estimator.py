"""The estimators: scikit-learn's own checks, what is trained and predicted, what must be public or is warned of."""

import json
import math
import pickle
import traceback
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse
from scipy.special import expit, softmax
from sklearn.model_selection import GridSearchCV
from sklearn.preprocessing import MinMaxScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn
from torch.utils.data import TensorDataset

import sparsedp
from runs import placed
from sklearn import config_context
from sparsedp import DataError, PrivacyError, PrivacyWarning, SparseDPError, verify
from sparsedp.methods import get_method
from sparsedp.optimizers.factory import AVERAGED, SQUARED, table_rate
from sparsedp.runs.run import Run
from sparsedp.sklearn import SparseDPClassifier, SparseDPRegressor, expected_failed_checks

pytestmark = [
    pytest.mark.usefixtures("checked_once"),
    pytest.mark.filterwarnings("ignore:.* units are few:UserWarning"),
]


def table(rows=80, features=3, seed=0):
    X = np.random.default_rng(seed).uniform(-1, 1, size=(rows, features))
    return X, (X[:, 0] > 0).astype(int)


def numbers(rows=3000):
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, size=(rows, 3))
    return X, 20 + X @ np.array([5.0, -3.0, 0.0]) + rng.normal(0, 0.5, rows)


def classifier(**changes):
    given = {"classes": [0, 1], "epochs": 3, "batch_size": 16, "random_state": 0, "bounds": (-1, 1)}
    if changes.get("columns") is not None:
        del given["bounds"]
    return SparseDPClassifier(**(given | changes))


def regressor(**changes):
    given = {"target_bounds": (0, 40), "bounds": (-1, 1), "epochs": 5, "random_state": 0}
    return SparseDPRegressor(**(given | changes))


def weights(model):
    return torch.cat([p.detach().reshape(-1).double() for p in model.parameters()]).numpy()


def zeroed(linear):
    for parameter in linear.parameters():
        nn.init.zeros_(parameter)
    return linear


@pytest.mark.filterwarnings("ignore::UserWarning")
@parametrize_with_checks(
    [  # some ask for 83 % accuracy, or an R2 of 0.5, on 200 examples
        SparseDPClassifier(epsilon=20.0, epochs=10, unit_norm=True),
        SparseDPRegressor(epsilon=50.0, epochs=20, bounds=(-3, 3), target_bounds=(-3, 3)),
    ],
    expected_failed_checks=expected_failed_checks,
    xfail_strict=True,
)
def test_scikit_learn_finds_nothing_but_what_is_listed(estimator, check):
    check(estimator)


# What is trained and predicted


@pytest.mark.parametrize("state", [lambda: None, lambda: 7, lambda: np.random.RandomState(3)])
def test_a_seed_reproduces_the_fit_which_is_then_not_for_release(state):
    X, y = table()
    before = (torch.get_rng_state(), np.random.get_state()[1].copy())  # noqa: NPY002
    seeds = [state(), state(), 6]
    one, same, other = (classifier(random_state=seed, hidden_layer_sizes=(4,)).fit(X, y) for seed in seeds)
    seeded = seeds[0] is not None
    assert np.array_equal(weights(one.model_), weights(same.model_)) == seeded
    assert not np.array_equal(weights(one.model_), weights(other.model_))
    assert one.publishable_ != seeded
    assert ("not for release" in one.guarantee_) == seeded
    assert torch.equal(before[0], torch.get_rng_state()), "the global generators are left alone"
    np.testing.assert_array_equal(before[1], np.random.get_state()[1])  # noqa: NPY002


def test_a_run_directory_tells_of_the_table_and_is_never_overwritten(tmp_path):
    X, y = table(features=40)
    names = [f"lab_{i}" for i in range(40)]
    frame = pd.DataFrame(X, columns=names)
    held = (pd.DataFrame(table(60, 40, 5)[0], columns=names), table(60)[1])
    model = classifier(name="ward 7", run_dir=tmp_path / "run", active_ratio=0.3).fit(frame, y, eval_set=held)
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


def test_a_classifier_is_what_fit_gives_for_the_same_tensors():
    X, y = table(rows=100, features=50)
    low, high = np.full(50, -2.0), np.linspace(0.5, 3, 50)
    given = {"bounds": (low, high), "class_weight": {1: 3.0}, "lr": 0.5, "max_grad_norm": 0.7}
    model = classifier(method="tp-coherent", **given).fit(X, y)

    scaled = MinMaxScaler((-1, 1), clip=True).fit(np.stack([low, high])).transform(X)
    by_hand = zeroed(nn.Linear(50, 1))

    def loss(network, rows):
        inputs, targets = rows
        margin = network(inputs).squeeze(1) * (2 * targets - 1)
        return torch.where(targets == 1, 1.0, 1 / 3) * nn.functional.softplus(-margin)

    data = TensorDataset(torch.tensor(scaled, dtype=torch.float32), torch.tensor(y))
    sparsedp.fit(
        by_hand, data, sparsedp.PerExampleLoss(loss), method=get_method("tp-coherent", active_ratio=32 / 51),
        epsilon=3.0, epochs=3, batch_size=16, seed=0, lr=0.5, max_grad_norm=0.7, ema_decay=1.0, progress=False,
    )  # fmt: skip
    assert np.abs(weights(by_hand)).max() > 0.01
    np.testing.assert_allclose(weights(model.model_), weights(by_hand), atol=1e-5)


@pytest.mark.parametrize(("loss", "criterion"), [("squared", nn.MSELoss), ("huber", nn.HuberLoss)])
def test_a_regressor_is_what_fit_gives_for_the_scaled_target(loss, criterion):
    X, y = numbers(200)
    y[7] = 1e9  # counts as 40
    model = regressor(loss=loss, lr=0.3, batch_size=32).fit(X, y)
    by_hand = zeroed(nn.Linear(3, 1))
    scaled = torch.tensor(np.clip(y, 0, 40) / 20 - 1).float()[:, None]
    more = {"delta": 0.2} if loss == "huber" else {}
    sparsedp.fit(
        by_hand, TensorDataset(torch.tensor(X).float(), scaled), criterion(reduction="none", **more), epsilon=3.0,
        epochs=5, batch_size=32, lr=0.3, seed=0, progress=False, ema_decay=1.0,
    )  # fmt: skip
    np.testing.assert_allclose(weights(model.model_), weights(by_hand), atol=1e-6)
    np.testing.assert_allclose(model.predict(X), np.clip(X @ model.coef_ + model.intercept_, 0, 40))


@pytest.mark.parametrize("labels", [["no", "yes"], ["a", "b", "c"], [10, 20, 30]])
def test_predictions_are_the_softmax_of_the_scaled_features_times_the_weights(labels):
    rng = np.random.default_rng(3)
    X, y = rng.uniform(0, 10, size=(90, 4)), np.resize(labels, 90)
    model = classifier(classes=labels, bounds=(0, 5), epsilon=20.0).fit(X, y)
    logits = (np.minimum(X, 5) / 2.5 - 1) @ model.coef_.T + model.intercept_
    binary = len(labels) == 2
    expected = np.hstack([1 - expit(logits), expit(logits)]) if binary else softmax(logits, axis=1)
    np.testing.assert_allclose(model.predict_proba(X), expected, atol=1e-12)
    np.testing.assert_allclose(model.decision_function(X), logits[:, 0] if binary else logits, atol=1e-12)
    np.testing.assert_array_equal(model.predict(X), np.array(labels)[expected.argmax(axis=1)])


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


NOISY = {"epsilon": 3.0, "batch_size": 256}


@pytest.mark.parametrize(
    ("rows", "features", "people", "settings", "method"),
    [
        (80, 649, 80, {"epsilon": 0.5}, "dp-sgd"),
        (10_000, 1_000, 10_000, NOISY, "tp-adaptive"),
        (1000, 15_000, 500, NOISY | {"batch_size": 128}, "dp-sgd"),
        (80, 3, 80, {"active_ratio": 0.5}, "tp-topk"),
        (80, 3, 80, {"max_grad_norm": {"*bias": 0.2, "*": 0.5}}, "dp-sgd"),
        (80, 3, 80, {"epsilon": None, "noise_multiplier": 1.5}, "dp-sgd"),
    ],
)
def test_settings_give_the_same_plan_as_that_of_fit(rows, features, people, settings, method):
    X, y = table(rows=rows, features=features)
    units = None if people == rows else np.arange(rows) % people
    model = classifier(**settings, accountant="rdp").fit(X, y, groups=units)
    data = TensorDataset(torch.tensor(X, dtype=torch.float32), torch.tensor(y))

    def loss(network, batch):
        return network(batch[0]).squeeze(1) * batch[1]

    other = sparsedp.fit(
        nn.Linear(features, 1), data, sparsedp.PerExampleLoss(loss), unit_ids=units, seed=0, accountant="rdp",
        progress=False, **placed({"epochs": 3, "batch_size": 16} | settings),
    )  # fmt: skip
    assert model.method_ == model.result_.plan.method == method
    assert model.result_.plan == other.plan


def test_sparse_and_dense_features_give_the_same_model():
    X, y = table(features=30)
    X[np.abs(X) < 0.7] = 0
    same = {"unit_norm": True, "bounds": (-0.9, 0.9)}
    dense = classifier(**same).fit(X, y)
    for kind in (sparse.csr_matrix, sparse.coo_array):
        thin = classifier(**same).fit(kind(X), y)
        np.testing.assert_allclose(weights(thin.model_), weights(dense.model_), atol=1e-6)
        np.testing.assert_allclose(thin.predict_proba(kind(X)), dense.predict_proba(X), atol=1e-6)
    twice = (np.repeat(np.arange(80), 60), np.tile(np.arange(30), 160))
    doubled = sparse.csr_matrix((np.repeat(X / 2, 2, axis=0).ravel(), twice), shape=X.shape)
    plain, summed = classifier().fit(X, y), classifier().fit(doubled, y)
    np.testing.assert_allclose(weights(summed.model_), weights(plain.model_), atol=1e-6)
    with pytest.raises(DataError, match="zero"):
        classifier(bounds=(0, 1)).fit(sparse.csr_matrix(X), y)


def test_a_handful_of_coordinates_is_trained_whole_unless_told_otherwise():
    few, many = table(features=3), table(features=600)
    assert classifier(method="tp-coherent").fit(*few).result_.k == 4
    assert classifier(active_ratio=0.5).fit(*few).result_.k == 2
    assert classifier(method=get_method("tp-topk", active_ratio=0.5)).fit(*few).result_.k == 2
    assert classifier(method="tp-coherent").fit(*many).result_.k == 120


@pytest.mark.parametrize("unit_norm", [False, True])
def test_the_rate_is_the_rule_s_that_of_a_network_or_the_one_given(unit_norm, tmp_path):
    def rate_in(fitted):
        (group,) = Run.open(fitted.run_dir).record["settings"]["optimizer"]["groups"]
        return group["lr"]

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


def test_a_saved_model_carries_no_record():
    X, y = table(rows=200, features=7)
    X = X.astype(np.float32)
    units = np.random.default_rng(1).permutation(200)
    saved = pickle.dumps(classifier().fit(X, y, groups=units))
    for private in (X[0], X[-1], X[0].astype(np.float64), units[:8], y[:16]):
        assert private.tobytes() not in saved


def test_a_private_scale_is_a_phase_of_the_plan_and_makes_a_small_column_count(tmp_path):
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, size=(4000, 3)) * [0.01, 1, 1]
    y = (X[:, 0] + 0.001 * X[:, 1] > 0).astype(int)
    frame = pd.DataFrame(X, columns=["stay", "age", "visits"])
    given = {"epsilon": 3, "epochs": 5, "batch_size": 256, "lr": 0.5}
    blind = classifier(**given).fit(frame, y)
    model = classifier(**given, private_scale=["visits", "stay"], run_dir=tmp_path / "run").fit(frame, y)
    assert model.score(frame, y) > 0.9 > blind.score(frame, y) + 0.1
    first = model.result_.plan.phases[0]
    assert (first.name, first.steps, first.sampling_rate) == ("normalise", 1, 1.0)
    assert first.support["columns"] == (0, 2)
    assert model.epsilon_ <= 3
    assert verify(tmp_path / "run").passed
    assert 0.002 < float(model.model_.scale[0]) < 0.02
    assert model.model_.scale[1] == 1
    assert not model.model_.centre.any()
    assert set(model.kept_features_) == set(frame.columns)


# What must be public, and what is refused


COLUMNS = {"columns": {"stay": "drop", "age": "drop", "visits": "drop"}, "bounds": None}


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        *(({"epsilon": one}, PrivacyError, "epsilon: got") for one in (None, True, "3", 0.0, np.nan)),
        ({"noise_multiplier": 1.0}, PrivacyError, "one of them"),
        ({"classes": [0, 2]}, DataError, "not among the declared"),
        ({"classes": ["0", "1"]}, DataError, "not among the declared"),
        ({"classes": [0]}, DataError, "at least 2"),
        ({"class_weight": "balanced"}, PrivacyError, "count the training labels"),
        ({"class_weight": {1: 0.0}}, DataError, "> 0"),
        ({"class_weight": {7: 1.0}}, DataError, "some of the classes"),
        ({"unit": "patient"}, PrivacyError, "unit_ids|groups"),
        *(({"bounds": one}, DataError, "bounds") for one in [(1, 1), (0, np.inf), ([0, 0], 1), 3, ("a", "b")]),
        (COLUMNS, DataError, "every column is left out"),
        (COLUMNS | {"bounds": (0, 1)}, DataError, "columns and bounds"),
        *(({"hidden_layer_sizes": one}, SparseDPError, "hidden") for one in [(0,), (2.5,), (-1, 3)]),
        ({"model": "trees"}, SparseDPError, "expected 'linear', or 'additive' with"),
        ({"model": "additive"}, SparseDPError, "expected 'linear', or 'additive' with"),
        ({"private_scale": ["height"]}, DataError,
         r"private_scale: got the columns \['height'\], expected some of stay, age, visits"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_or_are_not_public_are_refused(given, error, told):
    X, y = table()
    with pytest.raises(error, match=told):
        classifier(**given).fit(pd.DataFrame(X, columns=["stay", "age", "visits"]), y)


def test_a_regression_without_public_bounds_or_a_loss_is_refused():
    for bounds in (None, (0, 0), (0, np.inf), 3, ("a", "b")):
        with pytest.raises(PrivacyError, match="known without looking at the data"):
            regressor(target_bounds=bounds).fit(*numbers(100))
    with pytest.raises(SparseDPError, match="'squared' or 'huber'"):
        regressor(loss="absolute").fit(*numbers(100))


SECRETS = {
    "text": ["hiv+"] * 80,
    "dates or times": pd.to_datetime(["1961-03-04"] * 80),
    "missing values": [np.nan] + [7741.0] * 79,
    "infinite values": [np.inf] + [7741.0] * 79,
}


def refused_unseen(call, told):
    with pytest.raises(DataError, match=told) as refusal:
        call()
    shown = "".join(traceback.format_exception(refusal.value))
    assert not any(secret in shown for secret in ("hiv", "1961", "7741"))


@pytest.mark.parametrize("what", SECRETS)
@pytest.mark.parametrize("kind", [lambda frame: frame, lambda frame: frame.to_numpy(dtype=object)])
def test_what_is_no_number_is_refused_by_column_and_never_shown(what, kind):
    X, y = table()
    odd = kind(pd.DataFrame({"age": X[:, 0], "odd": SECRETS[what]}))
    model = classifier().fit(X[:, :2], y)
    told = f"column ('odd'|1) holds {what}.*PublicEncoder"
    refused_unseen(lambda: classifier().fit(odd, y), told)
    refused_unseen(lambda: model.predict(odd), told)


def test_a_target_or_a_label_that_is_refused_is_never_shown():
    X, y = table()
    refused_unseen(lambda: regressor().fit(X, SECRETS["text"]), "y holds text")
    labels = np.where(y, "hiv+", "0")
    refused_unseen(lambda: classifier(classes=["0", "1"]).fit(X, labels), r"declared classes \['0', '1'\]")


def test_units_of_any_type_are_the_same_units_also_as_routed_metadata():
    X, y = table()
    ids = np.arange(80) // 4
    texts = [f"p{one:02d}" for one in ids]
    model, *others = (
        classifier(unit="patient").fit(X, y, groups=one)
        for one in (ids, texts, np.array(texts, dtype=object))
    )
    for other in others:
        np.testing.assert_array_equal(weights(other.model_), weights(model.model_))
    assert model.n_units_ == 20
    assert "removing one patient of" in model.guarantee_
    with config_context(enable_metadata_routing=True):
        routed = classifier(batch_size=4, method="dp-sgd").set_fit_request(groups=True)
        search = GridSearchCV(routed, {"lr": [0.1]}, cv=2, error_score="raise")
        with pytest.warns(PrivacyWarning):
            search.fit(X, y, groups=ids)
    assert search.best_estimator_.n_units_ == 20
    for odd, told in (([1, 2], "2 ids for 80 examples"), ([None] * 80, "missing"), ([1, "a"] * 40, "type")):
        with pytest.raises(DataError, match=told):
            classifier().fit(X, y, groups=np.array(odd, dtype=object))


def test_training_rows_are_refused_as_held_out_rows():
    X, y = table()
    with pytest.raises(PrivacyError, match="eval_set holds rows of the training data"):
        classifier().fit(X, y, eval_set=(X[5:9], y[5:9].copy()))
    classifier().fit(X[:60], y[:60], eval_set=(X[60:], y[60:]))  # others of the same table may be held out


# What is warned of, from public numbers and names alone


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": None}, "classes was not given"),
        ({"bounds": None}, "no bounds were given"),
        ({"bounds": (0, [1, 1e6, 1])}, "column 'ward' are five orders of magnitude apart"),
        ({"delta": 0.2}, "delta"),
        ({"epsilon": 0.1}, "80 units are few for epsilon=0.1"),
    ],
)
@pytest.mark.filterwarnings("default:.* units are few:UserWarning")
def test_what_would_ruin_a_model_is_warned_of(changes, message):
    X, y = table()
    with pytest.warns(UserWarning, match=message) as caught:
        classifier(**changes).fit(pd.DataFrame(X, columns=["age", "ward", "stay"]), y)
    assert "delta" in changes or any(one.filename == __file__ for one in caught)


@pytest.mark.parametrize("name", ["patient_id", "PatientID", "id", "MRN", "subject", "person_no"])
def test_a_column_that_looks_like_an_id_is_warned_of_unless_groups_are_given(name):
    X, y = table()
    frame = pd.DataFrame(X, columns=[name, "idle", "acid"])
    with pytest.warns(PrivacyWarning, match=f"'{name}' looks like an id"):
        classifier().fit(frame, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        classifier().fit(frame, y, groups=np.arange(80) // 2)
        others = {"idle": ("number", -1, 1), "acid": ("number", -1, 1)}
        classifier(columns={name: "drop", **others}).fit(frame, y)
