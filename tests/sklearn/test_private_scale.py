"""Columns whose size is measured privately: charged in the classifier's own plan, and worth it."""

import numpy as np
import pandas as pd
import pytest
from sklearn_tools import classifier, table

from sparsedp import PrivateNormalisation, verify
from sparsedp.errors import DataError, PrivacyError
from sparsedp.privacy.ledger import Ledger

pytestmark = [
    pytest.mark.usefixtures("checked_once"),
    pytest.mark.filterwarnings("ignore:.* units are few:UserWarning"),
]


def test_the_measurement_is_a_phase_of_the_plan_and_in_the_ledger(tmp_path):
    X, y = table(rows=400)
    model = classifier(epsilon=3, private_scale=[0, 2], run_dir=tmp_path / "run").fit(X, y)
    first, *others = model.result_.plan.phases
    assert (first.name, first.steps, first.sampling_rate, first.noise_multiplier) == (
        "normalise",
        1,
        1.0,
        8.0,
    )
    assert first.support["columns"] == (0, 2)
    ledger = Ledger.read(tmp_path / "run" / "ledger.jsonl")
    assert ledger.charged == 1 + sum(phase.steps for phase in others)
    assert (ledger.blocks[0].phase, ledger.blocks[0].noise_multiplier) == ("normalise", 8.0)
    assert model.epsilon_ <= 3
    assert verify(tmp_path / "run").passed
    assert model.model_.scale[1] == 1
    assert not model.model_.centre.any()


def test_the_rest_of_the_plan_has_more_noise_for_it():
    X, y = table(rows=400)
    without = classifier(epsilon=1).fit(X, y).result_.plan.phases[-1].noise_multiplier
    with_it = classifier(epsilon=1, private_scale=[0]).fit(X, y).result_.plan.phases[-1].noise_multiplier
    assert with_it > 1.01 * without


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


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (["height"], DataError, r"private_scale: got the columns \['height'\], expected some of stay, age, visits"),
        ([3], PrivacyError, "columns: got 3, expected numbers below 3"),
        ([], PrivacyError, "columns: got"),
    ],
)  # fmt: skip
def test_columns_that_are_not_there_are_refused(given, error, message):
    X, y = table()
    with pytest.raises(error, match=message):
        classifier(private_scale=given).fit(pd.DataFrame(X, columns=["stay", "age", "visits"]), y)
