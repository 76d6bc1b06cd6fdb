"""SparseDPClassifier: what must be public, and what is refused or warned of."""

import json
import traceback
import warnings
from multiprocessing.pool import ThreadPool

import joblib
import numpy as np
import pandas as pd
import pytest
from scipy import sparse
from sklearn.compose import ColumnTransformer
from sklearn.decomposition import PCA
from sklearn.ensemble import VotingClassifier
from sklearn.frozen import FrozenEstimator
from sklearn.impute import SimpleImputer
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.multioutput import ClassifierChain
from sklearn.pipeline import FeatureUnion, make_pipeline
from sklearn.preprocessing import MinMaxScaler, Normalizer, OneHotEncoder, StandardScaler
from sklearn.semi_supervised import SelfTrainingClassifier
from sklearn_tools import classifier, table, weights

from sklearn import config_context
from sparsedp import DataError, PrivacyError, PrivacyWarning
from sparsedp.methods import build_plan
from sparsedp.privacy.calibration import RdpFilter
from sparsedp.sklearn import PrivacyBudget, PublicEncoder, SparseDPRegressor
from sparsedp.sklearn.data import encode_labels, held_out_by_hash

pytestmark = [
    pytest.mark.usefixtures("checked_once"),
    pytest.mark.filterwarnings("ignore:.* units are few:UserWarning"),
]


def encoder(columns=3):
    return PublicEncoder({place: ("number", -1, 1) for place in range(columns)})


# Classes


def test_classes_read_off_the_labels_are_warned_of():
    X, y = table()
    with pytest.warns(PrivacyWarning, match="classes was not given") as caught:
        model = classifier(classes=None).fit(X, y)
    assert caught[0].filename == __file__
    np.testing.assert_array_equal(model.classes_, [0, 1])


def test_declared_classes_are_kept_sorted_also_when_no_record_has_one():
    X, y = table()
    model = classifier(classes=[2, 0, 1]).fit(X, y)
    np.testing.assert_array_equal(model.classes_, [0, 1, 2])
    assert model.predict_proba(X).shape == (80, 3)


# Units


def test_units_of_any_type_are_the_same_units():
    X, y = table()
    ids = np.random.default_rng(0).integers(0, 30, size=80)
    texts = [f"p{one:02d}" for one in ids]
    kinds = (ids, texts, np.array(texts, dtype=object))
    models = [classifier(unit="patient").fit(X, y, groups=given) for given in kinds]
    for model in models[1:]:
        np.testing.assert_array_equal(weights(model), weights(models[0]))
    assert models[0].n_units_ == len(np.unique(ids))
    assert "removing one patient of" in models[0].guarantee_


@pytest.mark.parametrize(
    ("units", "message"),
    [
        ([1, 2], "2 ids for 80 examples"),
        ([None] * 80, "missing"),
        ([np.nan] * 80, "missing"),
        ([1, "a"] * 40, "type"),
    ],
)
def test_units_that_do_not_name_every_row_are_refused(units, message):
    given = np.array(units, dtype=object)
    with pytest.raises(DataError, match=message):
        classifier(unit="patient").fit(*table(), groups=given)


def test_units_are_routed_as_metadata_when_requested():
    X, y = table()
    ids = np.arange(80) // 4
    with config_context(enable_metadata_routing=True):
        model = classifier(batch_size=4, method="dp-sgd").set_fit_request(groups=True)
        with pytest.warns(PrivacyWarning):
            search = GridSearchCV(model, {"lr": [0.1]}, cv=2, error_score="raise").fit(X, y, groups=ids)
    assert search.best_estimator_.n_units_ == 20


# Scaling


def test_bounds_that_move_zero_are_refused_for_sparse_features():
    X, y = table()
    with pytest.raises(DataError, match="zero"):
        classifier(bounds=(0, 1)).fit(sparse.csr_matrix(X), y)


def test_examples_are_normalized_one_by_one():
    X, y = table()
    long = classifier(unit_norm=True, bounds=None).fit(1000 * X, y)
    np.testing.assert_allclose(
        weights(long), weights(classifier(unit_norm=True, bounds=None).fit(X, y)), atol=1e-6
    )
    np.testing.assert_allclose(long.predict_proba(X[:1]), long.predict_proba(50 * X)[:1])


# Surroundings


def columns(*steps, remainder="drop"):
    parts = [(f"part{place}", step, [place]) for place, step in enumerate(steps)]
    return ColumnTransformer(parts, remainder=remainder)


class OwnScaler(StandardScaler):
    """Learns what its parent learns."""


@pytest.mark.parametrize(
    "step",
    [
        StandardScaler(),
        make_pipeline(encoder(), MinMaxScaler()),
        columns(encoder(1), StandardScaler(), "passthrough"),
        columns("passthrough", remainder=StandardScaler()),
        columns("passthrough", remainder=make_pipeline(encoder(2), MinMaxScaler())),
        OwnScaler(),
        FeatureUnion([("bounds", encoder()), ("moments", StandardScaler())]),
    ],
)
def test_a_pipeline_that_scales_by_exact_statistics_is_refused(step):
    with pytest.raises(PrivacyError, match=r"pipeline scales with \w+Scaler, which computes"):
        make_pipeline(step, classifier()).fit(*table())


@pytest.mark.parametrize("step", [PCA(2), OneHotEncoder(), SimpleImputer(), columns(SimpleImputer())])
def test_other_steps_that_learn_from_the_data_are_warned_of(step):
    X, y = table()
    with pytest.warns(PrivacyWarning, match="what it learns is not private"):
        make_pipeline(step, classifier()).fit(np.round(X), y)


@pytest.mark.parametrize(
    "step",
    [
        "passthrough",
        encoder(),
        Normalizer(),
        FrozenEstimator(StandardScaler().fit(table(seed=9)[0])),
        OneHotEncoder(categories=[[-1, 0, 1]] * 3),
        SimpleImputer(strategy="constant", keep_empty_features=True),
        columns(OneHotEncoder(categories=[[-1, 0, 1]]), encoder(1), "drop"),
        columns("passthrough", remainder="passthrough"),
        columns("passthrough", remainder=encoder(2)),
    ],
)
def test_steps_with_fixed_rules_pass_without_a_word(step):
    X, y = table()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted = make_pipeline(step, classifier()).fit(np.round(X), y)
    assert fitted.predict(np.round(X)).shape == (80,)


def in_threads(model, X, y):
    with joblib.parallel_backend("threading"):
        cross_val_score(model, X, y, cv=2, n_jobs=2, error_score="raise")


def search(model, X, y):
    GridSearchCV(model, {"lr": [0.1]}, cv=2, error_score="raise").fit(X, y)


@pytest.mark.parametrize(
    ("around", "what"),
    [
        (search, "a search or cross-validation"),
        (in_threads, "a search or cross-validation"),
        (lambda one, X, y: VotingClassifier([("one", one), ("two", one)]).fit(X, y), "an ensemble"),
        (
            lambda one, X, y: ClassifierChain(one).fit(X, np.stack([y, 1 - y], axis=1)),
            "a fit for each output",
        ),
        (lambda one, X, y: SelfTrainingClassifier(one).fit(X, np.r_[y[:60], [-1] * 20]), "semi-supervised"),
    ],
)
def test_repeated_fits_on_the_same_data_are_warned_of(around, what):
    with pytest.warns(PrivacyWarning, match=f"{what}.*n fits cost up to n times epsilon"):
        around(classifier(), *table())


# Held-out rows


def as_lists(X, y):
    return X.tolist(), y.tolist()


def as_frame(X, y):
    return pd.DataFrame(X, columns=["a", "b", "c"]), pd.Series(y)


@pytest.mark.parametrize(
    ("kind", "again"),
    [
        (lambda X, y: (X, y), lambda X, y: (X[5:9], y[5:9].copy())),
        (as_lists, lambda X, y: (X, list(y))),
        (as_frame, lambda X, y: (X[5:9], y[5:9])),
    ],
)
def test_training_rows_are_refused_as_held_out_rows(kind, again):
    X, y = kind(*table())
    with pytest.raises(PrivacyError, match="eval_set holds rows of the training data"):
        classifier().fit(X, y, eval_set=again(X, y))
    model = classifier().fit(X[:60], y[:60], eval_set=(X[60:], y[60:]))
    assert 0 <= model.result_.metrics["accuracy"] <= 1, "other rows of the same table may be held out"


@pytest.mark.parametrize("given", [np.zeros((4, 2)), [(1, 2)], (1, 2, 3)])
def test_held_out_data_is_one_pair(given: object) -> None:
    X, y = table()
    with pytest.raises(DataError, match=r"eval_set: got .*, expected one pair"):
        classifier().fit(X, y, eval_set=given)


# What is warned of, from public numbers alone, and what is refused without showing a value


@pytest.mark.parametrize(
    ("changes", "message"),
    [
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


SECRETS = {
    "text": ["hiv+"] * 80,
    "dates or times": pd.to_datetime(["1961-03-04"] * 80),
    "missing values": [np.nan] + [7741.0] * 79,
    "infinite values": [np.inf] + [7741.0] * 79,
}


@pytest.mark.parametrize("what", SECRETS)
@pytest.mark.parametrize("kind", [lambda frame: frame, lambda frame: frame.to_numpy(dtype=object)])
def test_what_is_no_number_is_refused_by_column_and_never_shown(what, kind):
    X, y = table()
    frame = pd.DataFrame({"age": X[:, 0], "odd": SECRETS[what]})
    model = classifier().fit(X[:, :2], y)
    for attempt in (lambda: classifier().fit(kind(frame), y), lambda: model.predict(kind(frame))):
        with pytest.raises(DataError, match=f"column ('odd'|1) holds {what}.*PublicEncoder") as refusal:
            attempt()
        shown = "".join(traceback.format_exception(refusal.value))
        assert not any(secret in shown for secret in ("hiv", "1961", "7741"))


def test_a_target_of_text_is_refused_and_never_shown():
    with pytest.raises(DataError, match="y holds text, expected numbers within target_bounds") as refusal:
        SparseDPRegressor(target_bounds=(0, 1), bounds=(-1, 1)).fit(table()[0], SECRETS["text"])
    assert "hiv" not in "".join(traceback.format_exception(refusal.value))


@pytest.mark.parametrize(("labels", "private"), [([0, 1, 7741], "7741"), (["a", "b", "hiv+"], "hiv")])
def test_the_refusal_of_a_label_names_the_declared_classes_and_never_the_label(labels, private):
    with pytest.raises(DataError, match="declared classes") as refusal:
        encode_labels(np.array(labels), labels[:2])
    assert str(labels[:2]) in str(refusal.value)
    assert private not in str(refusal.value)


# A budget over several fits


def test_a_budget_is_drawn_from_until_it_is_refused_and_says_what_is_left(tmp_path):
    X, y = table()
    budget = PrivacyBudget(3.0, 1e-4, tmp_path / "budget.json")
    fits, model = 0, classifier(epsilon=1.0, delta=1e-5, budget=budget)
    with pytest.raises(PrivacyError, match=r"budget: this fit .* is left; nothing was released"):  # noqa: PT012
        for fits in range(30):  # noqa: B007
            model.fit(X, y)
    assert fits > 3, "Renyi divergences add up to less than epsilons"
    assert len(budget.draws) == fits
    assert 0 <= budget.left < budget.draws[0]["share"]
    assert f"after {fits} fits" in str(budget)
    assert PrivacyBudget(3.0, 1e-4, tmp_path / "budget.json").left == budget.left
    whole = RdpFilter(3.0, 1e-4, json.loads((tmp_path / "budget.json").read_text())["order"])
    spent = fits * whole.cost(model.result_.plan.events())
    assert spent <= whole.budget < spent * (fits + 1) / fits
    assert budget.left == pytest.approx(1 - spent / whole.budget)


def test_a_budget_of_sums_takes_one_fit_whole_and_refuses_the_next(tmp_path):
    X, y = table()
    budget = PrivacyBudget(1.0, 1e-5, tmp_path / "budget.json", composition="sum")
    model = classifier(epsilon=1.0, delta=1e-5, budget=budget).fit(X, y)
    assert budget.left < 0.01
    before = model.coef_.copy()
    with pytest.raises(PrivacyError, match="is left"):
        model.fit(X, y)
    np.testing.assert_array_equal(model.coef_, before)


@pytest.mark.parametrize("changed", [{"epsilon": 2.0}, {"delta": 1e-3}, {"composition": "sum"}])
def test_a_budget_file_stays_as_it_is(tmp_path, changed):
    given = {"epsilon": 1.0, "delta": 1e-5, "path": tmp_path / "budget.json"}
    PrivacyBudget(**given)
    with pytest.raises(PrivacyError, match="a budget stays as it is"):
        PrivacyBudget(**(given | changed))


def test_a_budget_is_for_the_same_units(tmp_path):
    X, y = table()
    model = classifier(budget=PrivacyBudget(9.0, 1e-4, tmp_path / "budget.json"), delta=1e-5).fit(X, y)
    with pytest.raises(PrivacyError, match="same units"):
        model.fit(X, y, groups=np.arange(80) // 2)


def test_a_budget_is_drawn_from_again_by_another_fit_in_the_same_folder_and_not_by_a_resume(tmp_path):
    budget, run = PrivacyBudget(3.0, 1e-4, tmp_path / "budget.json"), tmp_path / "run"
    plan = build_plan("dp-sgd", units=80, batch_size=20, epochs=2, epsilon=1.0, delta=1e-5, accountant="rdp")
    budget.draw(plan, run=run)
    budget.draw(plan, run=run, paid=True)
    assert len(budget.draws) == 1
    budget.draw(plan, run=run)
    assert len(budget.draws) == 2


def test_a_search_with_a_budget_is_refused_with_the_private_way(tmp_path):
    budget = PrivacyBudget(9.0, 1e-4, tmp_path / "budget.json")
    search = GridSearchCV(classifier(budget=budget, delta=1e-5), {"lr": [0.1]}, cv=2, error_score="raise")
    with pytest.raises(PrivacyError, match=r"fits clones of this estimator.*Tune on public"):
        search.fit(*table())
    assert budget.left == 1.0


def test_two_processes_never_draw_more_than_there_is(tmp_path):
    path = tmp_path / "budget.json"
    plan = build_plan("dp-sgd", units=80, batch_size=20, epochs=2, epsilon=1.0, delta=1e-5, accountant="rdp")

    def draw(_):
        try:
            PrivacyBudget(3.0, 1e-4, path).draw(plan)
        except PrivacyError:
            return 0
        return 1

    with ThreadPool(4) as pool:  # flock is per open file, so threads contend as processes do
        drawn = sum(pool.map(draw, range(20)))
    budget = PrivacyBudget(3.0, 1e-4, path)
    assert drawn == len(budget.draws)
    assert 0 <= budget.left < budget.draws[0]["share"]


def test_held_out_units_follow_from_their_ids_alone():
    ids = np.array([f"p{one % 500}" for one in range(1500)])
    apart = held_out_by_hash(ids, 0.2)
    assert 0.12 < apart.mean() < 0.28  # +-4.5 standard deviations of 500 units
    turned = np.random.default_rng(0).permutation(1500)
    np.testing.assert_array_equal(held_out_by_hash(ids[turned], 0.2), apart[turned])
    np.testing.assert_array_equal(held_out_by_hash(ids[:3], 0.2), apart[:3])
    assert not set(ids[apart]) & set(ids[~apart])
