"""Columns become features by declared rules alone: nothing is learned, and zero stays zero."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline

from sparsedp import DataError, PrivacyWarning
from sparsedp.sklearn import PublicEncoder, SparseDPClassifier

RULES = {
    "age": ("linear", 0, 120),
    "change": ("linear", -10, 5),
    "visits": ("log", 50),
    "smokes": "binary",
    "sex": ("one-hot", ["F", "M"]),
    "id": "drop",
}
TABLE = pd.DataFrame(
    {
        "age": [60.0, 0.0, 300.0, math.nan],
        "change": [-20.0, 0.0, 5.0, 2.0],
        "visits": [0, 50, 7, 1000],
        "smokes": ["yes", "", None, "no"],
        "sex": ["M", "F", "X", None],
        "id": ["a", "b", "c", "d"],
    }
)
EXPECTED = np.array(
    [
        [0.5, -1.0, 0.0, 1, 0, 1],
        [0.0, 0.0, 1.0, 0, 1, 0],
        [1.0, 0.5, math.log(8) / math.log(51), 0, 0, 0],
        [0.0, 0.2, 1.0, 1, 0, 0],
    ]
)


def test_every_rule_gives_what_it_says():
    encoder = PublicEncoder(RULES)
    assert np.allclose(encoder.fit_transform(TABLE), EXPECTED)
    assert list(encoder.get_feature_names_out()) == ["age", "change", "visits", "smokes", "sex=F", "sex=M"]


def test_columns_may_come_in_any_order_and_by_number():
    turned = TABLE[list(RULES)[::-1]]
    encoder = PublicEncoder(RULES).fit(turned)
    assert list(encoder.get_feature_names_out())[:2] == ["sex=F", "sex=M"]
    by_number = PublicEncoder({1: ("log", 9), 0: ("linear", 0, 4)})
    assert np.allclose(by_number.fit_transform(np.array([[2.0, 9.0], [0, 0]])), [[0.5, 1.0], [0, 0]])


def test_a_row_is_encoded_the_same_in_any_company():
    encoder = PublicEncoder(RULES).fit(TABLE)
    alone = np.concatenate([encoder.transform(TABLE[i : i + 1]) for i in range(len(TABLE))])
    assert np.array_equal(alone, encoder.transform(TABLE))
    assert np.array_equal(clone(encoder).transform(TABLE), encoder.transform(TABLE))  # it learned nothing


def test_features_keep_their_names():
    shown = PublicEncoder(RULES).set_output(transform="pandas").fit_transform(TABLE)
    assert list(shown.columns)[-1] == "sex=M"


def test_polars_frames_are_taken_with_their_names():
    polars = pytest.importorskip("polars")
    lists = {name: [None if value != value else value for value in TABLE[name].tolist()] for name in TABLE}
    frame = polars.DataFrame(lists)
    assert np.allclose(PublicEncoder(RULES).fit_transform(frame), EXPECTED)


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        ({**RULES, "id": "hash"}, r"columns\['id'\]: got 'hash'"),
        ({**RULES, "age": ("linear", 5)}, "expected"),
        ({**RULES, "age": ("linear", 5, 5)}, "low < high"),
        ({**RULES, "visits": ("log", 0)}, "0 < high"),
        ({name: rule for name, rule in RULES.items() if name != "sex"}, r"no rule for \['sex'\]"),
        ({**RULES, "height": "binary"}, r"rules for \['height'\]"),
        ({**RULES, "sex": ("linear", 0, 1)}, "no number"),
    ],
)
def test_a_rule_that_does_not_fit_is_told(rules, told):
    with pytest.raises(DataError, match=told):
        PublicEncoder(rules).fit_transform(TABLE)


def a_table(rows: int = 400) -> tuple[pd.DataFrame, np.ndarray]:
    rng = np.random.default_rng(0)
    visits, sex = rng.poisson(3, rows), rng.choice(["F", "M"], rows)
    return pd.DataFrame({"visits": visits, "sex": sex}), (visits + (sex == "F") > 3).astype(int)


def test_a_pipeline_over_a_frame_trains_without_a_warning():
    X, y = a_table()
    encoder = PublicEncoder({"visits": ("log", 30), "sex": ("one-hot", ["F", "M"])})
    model = make_pipeline(encoder, SparseDPClassifier(epsilon=8.0, classes=[0, 1], lr=3.0, random_state=0))
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        model.fit(X, y)
    assert model.score(X, y) > 0.75


def test_a_grid_search_works_and_says_what_it_costs():
    X, y = a_table(120)
    encoder = PublicEncoder({"visits": ("log", 30), "sex": ("one-hot", ["F", "M"])})
    classifier = SparseDPClassifier(epsilon=8.0, classes=[0, 1], epochs=2, accountant="rdp", random_state=0)
    search = GridSearchCV(
        make_pipeline(encoder, classifier), {"sparsedpclassifier__lr": [0.1, 1.0]}, cv=2, error_score="raise"
    )
    with pytest.warns(PrivacyWarning, match="n fits cost up to n times epsilon"):
        search.fit(X, y)
    assert search.best_params_["sparsedpclassifier__lr"] in (0.1, 1.0)
