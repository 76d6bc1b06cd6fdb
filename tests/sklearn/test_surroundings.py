"""What stands around a fit: steps of a pipeline, searches and ensembles, a budget that other fits draw from too."""

import warnings
from multiprocessing.pool import ThreadPool

import joblib
import numpy as np
import pytest
from sklearn.compose import ColumnTransformer
from sklearn.decomposition import PCA
from sklearn.ensemble import VotingClassifier
from sklearn.frozen import FrozenEstimator
from sklearn.impute import SimpleImputer
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import FeatureUnion, make_pipeline
from sklearn.preprocessing import MinMaxScaler, Normalizer, OneHotEncoder, StandardScaler

from sparsedp import PrivacyError, PrivacyWarning
from sparsedp._files import read_json
from sparsedp.methods import build_plan
from sparsedp.privacy.calibration import RdpFilter
from sparsedp.sklearn import PrivacyBudget, PublicEncoder, SparseDPClassifier

pytestmark = [
    pytest.mark.usefixtures("checked_once"),
    pytest.mark.filterwarnings("ignore:.* units are few:UserWarning"),
]

X = np.random.default_rng(0).uniform(-1, 1, size=(80, 3))
Y = (X[:, 0] > 0).astype(int)


def classifier(**changes):
    return SparseDPClassifier(
        classes=[0, 1], epochs=1, batch_size=16, random_state=0, bounds=(-1, 1), **changes
    )


def encoder(columns=3):
    return PublicEncoder({place: ("number", -1, 1) for place in range(columns)})


def columns(*steps, remainder="drop"):
    parts = [(f"part{place}", step, [place]) for place, step in enumerate(steps)]
    return ColumnTransformer(parts, remainder=remainder)


@pytest.mark.parametrize(
    "step",
    [
        type("OwnScaler", (StandardScaler,), {})(),
        columns(encoder(1), StandardScaler(), "passthrough"),
        columns("passthrough", remainder=make_pipeline(encoder(2), MinMaxScaler())),
        FeatureUnion([("bounds", encoder()), ("moments", StandardScaler())]),
    ],
)
def test_a_pipeline_that_scales_by_exact_statistics_is_refused(step):
    with pytest.raises(PrivacyError, match=r"pipeline scales with \w+Scaler, which computes"):
        make_pipeline(step, classifier()).fit(X, Y)


@pytest.mark.parametrize("step", [PCA(2), OneHotEncoder(), columns(SimpleImputer())])
def test_other_steps_that_learn_from_the_data_are_warned_of(step):
    with pytest.warns(PrivacyWarning, match="what it learns is not private"):
        make_pipeline(step, classifier()).fit(np.round(X), Y)


@pytest.mark.parametrize(
    "step",
    [
        "passthrough",
        Normalizer(),
        FrozenEstimator(StandardScaler().fit(X)),
        SimpleImputer(strategy="constant", keep_empty_features=True),
        columns(OneHotEncoder(categories=[[-1, 0, 1]]), encoder(1), "drop"),
        columns("passthrough", remainder=encoder(2)),
    ],
)
def test_steps_with_fixed_rules_pass_without_a_word(step):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_pipeline(step, classifier()).fit(np.round(X), Y)


@pytest.mark.parametrize(
    ("around", "package"),
    [
        (lambda one: cross_val_score(one, X, Y, cv=2, n_jobs=2, error_score="raise"), "model_selection"),
        (lambda one: VotingClassifier([("one", one), ("two", one)]).fit(X, Y), "ensemble"),
    ],
)
def test_repeated_fits_on_the_same_data_are_warned_of(around, package):
    told = f"fitted by sklearn.{package}.*n fits cost up to n times epsilon"
    with joblib.parallel_backend("threading"), pytest.warns(PrivacyWarning, match=told):
        around(classifier())


# A budget over several fits


def test_a_budget_is_drawn_from_until_it_is_refused_and_says_what_is_left(tmp_path):
    path = tmp_path / "budget.json"
    budget = PrivacyBudget(3.0, 1e-4, path)
    fits, model = 0, classifier(epsilon=1.0, delta=1e-5, budget=budget)
    with pytest.raises(PrivacyError, match=r"budget: this fit .* is left; nothing was released"):  # noqa: PT012
        for fits in range(30):  # noqa: B007
            model.fit(X, Y)
    assert fits > 3, "Renyi divergences add up to less than epsilons"
    assert len(budget.draws) == fits
    assert 0 <= budget.left < budget.draws[0]["share"]
    assert f"after {fits} fits" in str(budget)
    assert PrivacyBudget(3.0, 1e-4, path).left == budget.left
    whole = RdpFilter(3.0, 1e-4, read_json(path)["order"])
    spent = fits * whole.cost(model.result_.plan.events())
    assert spent <= whole.budget < spent * (fits + 1) / fits
    assert budget.left == pytest.approx(1 - spent / whole.budget)
    for other in ((2.0, 1e-4), (3.0, 1e-3)):
        with pytest.raises(PrivacyError, match="a budget stays as it is"):
            PrivacyBudget(*other, path)


def test_a_budget_is_for_the_same_units_and_not_for_a_search(tmp_path):
    budget = PrivacyBudget(9.0, 1e-4, tmp_path / "budget.json")
    model = classifier(budget=budget, delta=1e-5)
    search = GridSearchCV(model, {"lr": [0.1]}, cv=2, error_score="raise")
    with pytest.raises(PrivacyError, match=r"fits clones of this estimator.*Tune on public"):
        search.fit(X, Y)
    assert budget.left == 1.0
    model.fit(X, Y)
    with pytest.raises(PrivacyError, match="same units"):
        model.fit(X, Y, groups=np.arange(80) // 2)


PLAN = {"units": 80, "batch_size": 20, "epochs": 2, "epsilon": 1.0, "delta": 1e-5, "accountant": "rdp"}


def test_a_budget_is_drawn_from_again_by_another_fit_in_the_same_folder_and_not_by_a_resume(tmp_path):
    budget, run = PrivacyBudget(3.0, 1e-4, tmp_path / "budget.json"), tmp_path / "run"
    plan = build_plan("dp-sgd", **PLAN)
    budget.draw(plan, run=run)
    budget.draw(plan, run=run, paid=True)
    assert len(budget.draws) == 1
    budget.draw(plan, run=run)
    assert len(budget.draws) == 2


def test_two_processes_never_draw_more_than_there_is(tmp_path):
    path, plan = tmp_path / "budget.json", build_plan("dp-sgd", **PLAN)

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
