"""Columns become features by descriptions alone: nothing is learned, and missing is a level of its own."""

from __future__ import annotations

import math
import traceback

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone

from sparsedp import DataError
from sparsedp.sklearn import PublicEncoder
from sparsedp.sklearn.columns import CODE_SYSTEMS

RULES = {
    "age": ("number", 0, 120),
    "change": ("number", -10, 5),
    "visits": ("count", 50),
    "sex": ("category", ["F", "M"]),
    "seen": ("number", "2020-01-01", "2020-01-11"),
    "main": ("code", "icd10"),
    "who": "unit",
    "id": "drop",
}
TABLE = pd.DataFrame(
    {
        "age": [60.0, 0.0, 300.0, math.nan],
        "change": [-20.0, -2.5, 5.0, 1.25],
        "visits": [0, 50, -7, 1000],
        "sex": ["M", "F", "X", None],
        "seen": ["2020-01-06", "2020-01-01", "2031-01-01", ""],
        "main": ["C50.9", "a01", "not known", "NA"],
        "who": [1, 1, 2, 3],
        "id": ["a", "b", "c", "d"],
    }
)
ICD10 = [f"main={chapter}" for chapter in CODE_SYSTEMS["icd10"]] + ["main=missing", "main=other"]
NAMES = [
    "age", "change", "visits", "sex=F", "sex=M", "sex=missing", "sex=other", "seen", "age=missing", "seen=missing",
]  # fmt: skip
EXPECTED = np.array(
    [
        [0.0, -1.0, 0.0, 0, 1, 0, 0, 0, 0, 0],
        [-1.0, 0.0, 1.0, 1, 0, 0, 0, -1, 0, 0],
        [1.0, 1.0, -math.log(8) / math.log(51), 0, 0, 0, 1, 1, 0, 0],
        [0.0, 0.5, 1.0, 0, 0, 1, 0, 0, 1, 1],
    ]
)


def encoded(frame, encoder=None):
    """The features under `NAMES`, and the features of the codes that are one."""
    encoder = encoder or PublicEncoder(RULES)
    found = pd.DataFrame(encoder.fit_transform(frame), columns=encoder.get_feature_names_out())
    assert set(found.columns) == {*NAMES, *ICD10, "change=missing", "visits=missing"}
    assert not found[["change=missing", "visits=missing"]].to_numpy().any()
    assert (found[ICD10].sum(axis=1) == 1).all()
    return found[NAMES].to_numpy(), [ICD10[place] for place in found[ICD10].to_numpy().argmax(axis=1)]


def test_every_description_gives_what_it_says():
    numbers, codes = encoded(TABLE)
    assert np.allclose(numbers, EXPECTED)
    assert codes == ["main=C00-D49", "main=A00-B99", "main=other", "main=missing"]
    thin = PublicEncoder(RULES, sparse_output=True).fit_transform(TABLE)
    assert np.array_equal(thin.toarray(), PublicEncoder(RULES).fit_transform(TABLE))


def test_it_says_what_became_of_each_column_and_who_is_protected():
    encoder = PublicEncoder(RULES).fit(TABLE)
    lines = dict(line.split(": ", 1) for line in encoder.describe().splitlines())
    assert list(lines) == list(RULES)
    assert "2020-01-01 .. 2020-01-11" in lines["seen"]
    assert "4 features" in lines["sex"]
    assert encoder.unit_column == "who"
    assert encoder.unit_ids(TABLE).tolist() == [1, 1, 2, 3]


def test_knots_are_shares_of_the_two_nearest_and_add_up_to_one():
    rules = {
        "age": ("number", 0, 120),
        "visits": ("count", 80),
        "seen": ("number", "2020-01-01", "2020-01-11"),
    }
    frame = pd.DataFrame(
        {"age": [0.0, 45, 300, math.nan], "visits": [-3, 2, 8, 80], "seen": ["2020-01-02"] * 3 + [""]}
    )
    encoder = PublicEncoder(rules, knots=3).set_output(transform="pandas")
    found = encoder.fit_transform(frame)
    expected = {
        "age": [-1, -0.25, 1, 0], "age=missing": [0, 0, 0, 1],
        "age~0": [1, 0.25, 0, 0], "age~60": [0, 0.75, 0, 0], "age~120": [0, 0, 1, 0],
        "visits~0": [1, 0.5, 0, 0], "visits~8": [0, 0.5, 1, 0], "visits~80": [0, 0, 0, 1],
        "seen~2020-01-01": [0.8, 0.8, 0.8, 0], "seen~2020-01-06": [0.2, 0.2, 0.2, 0], "seen~2020-01-11": [0] * 4,
    }  # fmt: skip
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, atol=1e-12, err_msg=name)
    plain = PublicEncoder(rules).set_output(transform="pandas").fit_transform(frame)
    pd.testing.assert_frame_equal(found[plain.columns], plain)
    assert "3 knots" in encoder.describe()
    with pytest.raises(DataError, match="knots: got 1"):
        PublicEncoder(rules, knots=1).fit(frame)


@pytest.mark.parametrize(
    ("system", "codes", "groups"),
    [
        (
            "icd9",
            ["250.83", 8, "V27", "E812", "x", "25083"],
            ["240-279", "001-139", "V01-V91", "E000-E999", "other", "240-279"],
        ),
        ("icd10", ["I21", "D49", "D50.1", "Y99", "x"], ["I00-I99", "C00-D49", "D50-D89", "V00-Y99", "other"]),
        ("atc", ["N02BE01", "c10", "9"], ["N", "C", "other"]),
        (["25", "250", "I1"], ["250.1", "251", "i10", "2"], ["250", "25", "I1", "other"]),
        (["C-1", "C-12"], ["c-12/3", "C-1", "C1"], ["C-12", "C-1", "other"]),
    ],
)  # fmt: skip
def test_a_code_goes_to_its_chapter_or_its_longest_prefix(system, codes, groups):
    encoder = PublicEncoder({"a": ("code", system)}).set_output(transform="pandas")
    found = encoder.fit_transform(pd.DataFrame({"a": pd.Series(codes, dtype=object)}))
    assert [name.removeprefix("a=") for name in found.idxmax(axis=1)] == groups


def test_columns_may_come_in_another_order_later():
    encoder = PublicEncoder(RULES).fit(TABLE)
    turned = TABLE[list(RULES)[::-1]]
    assert np.array_equal(encoder.transform(turned), encoder.transform(TABLE))
    shown = (
        PublicEncoder(RULES).set_output(transform="pandas").transform(turned)
    )  # without a fit, as described
    assert np.allclose(shown[NAMES].to_numpy(), EXPECTED)
    with pytest.raises(DataError, match=r"descriptions of \['sex'\], which are not in the table"):
        encoder.transform(turned.drop(columns="sex"))


def test_a_fit_on_an_array_forgets_the_names_of_a_frame():
    numbered = pd.DataFrame({1: [9.0], 0: [2.0]})
    encoder = PublicEncoder({0: ("number", 0, 4), 1: ("count", 9)}).fit(numbered)
    assert list(encoder.get_feature_names_out()) == ["1", "1=missing", "0", "0=missing"]
    assert encoder.fit_transform(np.array([[3.0, 9.0], [0, 0]])).tolist() == [[0.5, 0, 1, 0], [-1, 0, 0, 0]]
    assert list(encoder.get_feature_names_out()) == ["0", "0=missing", "1", "1=missing"]


@pytest.mark.parametrize(
    ("kind", "values", "rule", "expected"),
    [
        ("Int64", [1, 2, None], ("category", [1, 2]), [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]),
        ("Int64", [1, 2, None], ("number", 0, 4), [[-0.5, 0], [0, 0], [0, 1]]),
        (
            "datetime64[us, Europe/Berlin]",
            ["2020-01-06 01:00", None],
            ("number", "2020-01-01", "2020-01-11"),
            [[0, 0], [0, 1]],
        ),
        ("boolean", [True, None, False], ("category", [True]), [[1, 0, 0], [0, 1, 0], [0, 0, 1]]),
        (object, ["x", pd.NA, math.nan], ("category", ["x"]), [[1, 0, 0], [0, 1, 0], [0, 1, 0]]),
        (object, ["3", " 1 ", "?"], ("number", 1, 3), [[1, 0], [-1, 0], [0, 1]]),
        (object, ["None", "x", ""], ("category", ["None"]), [[1, 0, 0], [0, 0, 1], [0, 1, 0]]),
        ("float64", [math.inf, -math.inf, 2], ("number", 1, 3), [[1, 0], [-1, 0], [0, 0]]),
    ],
)
def test_missing_is_a_level_of_its_own_in_every_kind_of_column(kind, values, rule, expected):
    frame = pd.DataFrame({"a": pd.Series(values, dtype=kind)})
    assert PublicEncoder({"a": rule}).fit_transform(frame).tolist() == expected


@pytest.mark.parametrize(
    ("values", "levels"),
    [
        (["1", "2", "3"], [1, 2]),
        ([1.0, 2.0, 9.5], ["1", "2"]),
        ([True, False, "no"], ["True", "False"]),
        ([1, True, 3], [1, "True"]),
        ([True, 1, 3], ["True", 1]),
    ],
)
def test_a_level_is_what_reads_the_same(values, levels):
    encoder = PublicEncoder({"a": ("category", levels)})
    frame = pd.DataFrame({"a": pd.Series(values, dtype=object)})
    expected = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1]]
    assert encoder.fit_transform(frame).tolist() == expected
    by_number = PublicEncoder({0: ("category", levels)})
    assert by_number.fit_transform([[value] for value in values]).tolist() == expected, "each row by itself"


def test_an_example_is_encoded_the_same_alone():
    encoder = PublicEncoder(RULES).fit(TABLE)
    alone = np.concatenate([encoder.transform(TABLE[i : i + 1]) for i in range(len(TABLE))])
    assert np.array_equal(alone, encoder.transform(TABLE))
    assert np.array_equal(clone(encoder).transform(TABLE), encoder.transform(TABLE))  # it learned nothing


def test_polars_frames_are_taken_with_their_names():
    polars = pytest.importorskip("polars")
    lists = {name: [None if value != value else value for value in TABLE[name].tolist()] for name in TABLE}
    assert np.allclose(encoded(polars.DataFrame(lists))[0], EXPECTED)


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        ({**RULES, "id": "hash"}, r"columns\['id'\]: got 'hash'"),
        ({**RULES, "age": ("number", 5)}, "expected"),
        ({**RULES, "age": ("number", 5, 5)}, "low < high"),
        ({**RULES, "visits": ("count", 0)}, "0 < high"),
        ({name: rule for name, rule in RULES.items() if name != "sex"}, r"no description of \['sex'\]"),
        ({**RULES, "height": ("count", 9)}, r"descriptions of \['height'\]"),
        ({**RULES, "sex": ("number", 0, 1)}, "no number"),
        ({**RULES, "main": ("code", "icd11")}, "icd10"),
        ({**RULES, "id": "unit"}, "at most one column that says who is protected"),
        ({**RULES, "sex": ("category", ["F", None])}, "none of them missing"),
        ({**RULES, "sex": ("category", [1, "1"])}, "read differently"),
        ({**RULES, "sex": ("category", "FM")}, "a list of levels"),
    ],
)
def test_a_description_that_does_not_fit_is_told(rules, told):
    with pytest.raises(DataError, match=told) as refusal:
        PublicEncoder(rules).fit_transform(TABLE)
    assert "'X'" not in "".join(traceback.format_exception(refusal.value)), "no value is shown"


def test_dates_are_no_numbers_and_a_dropped_column_need_not_be_there():
    table = pd.DataFrame({"admitted": pd.to_datetime(["2020-01-01", None])})
    for rule in (("number", 0, 1e18), ("count", 1e18)):
        with pytest.raises(DataError, match="holds dates or times"):
            PublicEncoder({"admitted": rule}).transform(table)
    fitted = PublicEncoder({"admitted": "drop", "age": ("number", 0, 100)}).fit(table.assign(age=[50, 100]))
    assert fitted.transform(pd.DataFrame({"age": [50, 100]})).tolist() == [[0, 0], [1, 0]]
