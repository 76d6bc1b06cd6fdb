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


def test_columns_may_come_in_another_order_later():
    encoder = PublicEncoder(RULES).fit(TABLE)
    turned = TABLE[list(RULES)[::-1]]
    assert np.allclose(encoder.transform(turned), EXPECTED)
    assert list(encoder.feature_names_in_) == list(RULES)
    with pytest.raises(DataError, match=r"rules for \['sex'\], which are not in the table"):
        encoder.transform(turned.drop(columns="sex"))


def test_a_fit_on_an_array_forgets_the_names_of_a_frame():
    numbered = pd.DataFrame({1: [9.0], 0: [2.0]})
    encoder = PublicEncoder({0: ("linear", 0, 4), 1: ("log", 9)}).fit(numbered)
    assert list(encoder.get_feature_names_out()) == ["1", "0"]
    encoder.fit(np.array([[2.0, 9.0]]))
    assert list(encoder.get_feature_names_out()) == ["0", "1"]


def test_the_order_of_the_rules_holds_without_a_fit():
    encoder = PublicEncoder(RULES).set_output(transform="pandas")
    shown = encoder.transform(TABLE[list(RULES)[::-1]])
    assert list(shown.columns) == list(encoder.get_feature_names_out())
    assert np.allclose(shown.to_numpy(), EXPECTED)
    assert not hasattr(encoder, "n_features_in_")


@pytest.mark.parametrize(
    ("kind", "values", "rule", "expected"),
    [
        ("Int64", [1, 2, None], ("one-hot", [1, 2]), [[1, 0], [0, 1], [0, 0]]),
        ("Int64", [1, 2, None], ("linear", 0, 4), [[0.25], [0.5], [0]]),
        ("string", ["x", None, "y"], ("one-hot", ["x", "y"]), [[1, 0], [0, 0], [0, 1]]),
        ("string", ["x", None, ""], "binary", [[1], [0], [0]]),
        ("boolean", [True, None, False], "binary", [[1], [0], [0]]),
        ("boolean", [True, None, False], ("linear", 0, 1), [[1], [0], [0]]),
        ("boolean", [True, None, False], ("one-hot", [True, False]), [[1, 0], [0, 0], [0, 1]]),
        (object, ["x", pd.NA, math.nan], ("one-hot", ["x"]), [[1], [0], [0]]),
    ],
)
def test_what_is_missing_is_zero_in_every_kind_of_column(kind, values, rule, expected):
    frame = pd.DataFrame({"a": pd.Series(values, dtype=kind)})
    assert PublicEncoder({"a": rule}).fit_transform(frame).tolist() == expected


@pytest.mark.parametrize(
    ("values", "categories"),
    [
        (["1", "2", "3"], [1, 2]),
        ([1, 2, 3], ["1", "2"]),
        ([1.0, 2.0, math.nan], ["1", "2"]),
        ([True, False, None], ["True", "False"]),
        ([1, 2, "?"], [1.0, 2.0]),
    ],
)
def test_a_category_is_what_reads_the_same(values, categories):
    encoder = PublicEncoder({"a": ("one-hot", categories)})
    assert encoder.fit_transform(pd.DataFrame({"a": values})).tolist() == [[1, 0], [0, 1], [0, 0]]


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
        ({**RULES, "sex": ("one-hot", ["F", None])}, "none of them missing"),
        ({**RULES, "sex": ("one-hot", [1, "1"])}, "read differently"),
        ({**RULES, "sex": ("one-hot", "FM")}, "a list of categories"),
        ({**RULES, "sex": ("one-hot", 3)}, "a list of categories"),
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


@pytest.mark.parametrize("rule", [("linear", 0, 1e18), ("log", 1e18)])
def test_dates_are_no_numbers(rule: tuple[object, ...]) -> None:
    table = pd.DataFrame({"admitted": pd.to_datetime(["2020-01-01", None])})
    with pytest.raises(DataError, match="holds dates or times"):
        PublicEncoder({"admitted": rule}).transform(table)


def test_a_column_that_is_dropped_need_not_be_there() -> None:
    rules = {"id": "drop", "age": ("linear", 0, 100)}
    fitted = PublicEncoder(rules).fit(pd.DataFrame({"id": [1, 2], "age": [50, 100]}))
    assert fitted.transform(pd.DataFrame({"age": [50, 100]})).tolist() == [[0.5], [1.0]]
