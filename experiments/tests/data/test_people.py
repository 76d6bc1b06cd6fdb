"""The census tables and COMPAS: official layouts, and encodings fixed before any row is read."""

import csv
import gzip
import zipfile

import pytest
import torch

from sparsedp.errors import DataError
from sparsedp_experiments.data import load
from sparsedp_experiments.data.encoding import feature_names
from sparsedp_experiments.data.tables import (
    _ADULT_RULES,
    _CENSUS_RULES,
    _COMPAS_RULES,
    adult,
    census_income,
    compas,
)
from tables_of_people import ADULT_ROW, CENSUS_ROW, COMPAS_COLUMNS, adult_lines, census_lines, compas_rows


def write_adult(folder, train, test):
    (folder / "adult.data").write_text("\n".join(train) + "\n\n")
    (folder / "adult.test").write_text("\n".join(["|1x3 Cross validator", *test]) + "\n")


def write_census(folder, train, test):
    (folder / "census-income.data").write_text("\n".join(train) + "\n")
    (folder / "census-income.test").write_text("\n".join(test) + "\n")


def write_compas(folder, rows):
    with (folder / "compas-scores-two-years.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(COMPAS_COLUMNS)
        writer.writerows([row[column] for column in COMPAS_COLUMNS] for row in rows)


def features_of(rules, split, row=0):
    inputs, _ = split.rows_at(torch.tensor([row]))
    names = feature_names(rules)
    return {
        name: round(value, 4) for name, value in zip(names, inputs[0].tolist(), strict=True) if value != 0
    }


def test_an_adult_becomes_the_features_the_dictionary_says(tmp_path):
    write_adult(tmp_path, [ADULT_ROW + ", >50K"], [ADULT_ROW + ", <=50K."])
    bundle = adult(tmp_path, unit_norm=False)
    assert features_of(_ADULT_RULES, bundle.train) == {
        "age": 0.4333,
        "hours-per-week": 0.404,
        "capital-gain": 0.6675,
        "workclass=State-gov": 1.0,
        "education=Bachelors": 1.0,
        "marital-status=Never-married": 1.0,
        "relationship=Not-in-family": 1.0,
        "race=White": 1.0,
        "sex=Male": 1.0,
        "native-country=other": 1.0,
    }
    assert bundle.train.targets.tolist() == [1]
    assert bundle.test.targets.tolist() == [0]


def test_who_was_not_asked_has_zeros_in_the_census_table(tmp_path):
    write_census(tmp_path, [CENSUS_ROW + ", - 50000."], [CENSUS_ROW + ", 50000+."])
    bundle = census_income(tmp_path, unit_norm=False)
    found = features_of(_CENSUS_RULES, bundle.train)
    assert not any("Not in universe" in name for name in feature_names(_CENSUS_RULES))
    assert not any(name.endswith("=other") for name in found)
    assert found["detailed industry recode=4"] == 1.0
    assert found["country of birth mother=Mexico"] == 1.0
    assert found["weeks worked in year"] == 1.0
    assert "migration code-change in msa" not in " ".join(found)
    assert (bundle.train.targets.tolist(), bundle.test.targets.tolist()) == ([0], [1])


def test_the_lists_have_the_dictionarys_numbers_of_levels():
    widths = {rule.columns[0]: rule.width - 1 for rule in (*_ADULT_RULES, *_CENSUS_RULES)}
    assert widths["native-country"] == 41
    assert widths["education"] == 17  # of census-income, which comes last; adult's has 16
    assert widths["state of previous residence"] == 49  # 50 and "Not in universe"
    assert widths["detailed household and family stat"] == 38
    assert widths["country of birth self"] == 42
    assert len(feature_names(_ADULT_RULES)) == 111
    assert len(feature_names(_CENSUS_RULES)) == 518


def test_compas_is_split_by_person_and_leaves_the_scores_out(tmp_path):
    rows = compas_rows(300)
    write_compas(tmp_path, rows)
    bundle = compas(tmp_path, unit_norm=False)
    assert len(bundle.train) + len(bundle.test) == 300
    assert 30 < len(bundle.test) < 90
    assert not any("score" in name for name in feature_names(_COMPAS_RULES))
    assert int(bundle.train.targets.sum() + bundle.test.targets.sum()) == 150
    again = compas(tmp_path, unit_norm=False)
    assert torch.equal(again.test.targets, bundle.test.targets)


def test_unit_norm_is_the_default_and_scales_each_record(tmp_path):
    write_adult(tmp_path, adult_lines(20, "<=50K"), adult_lines(5, "<=50K."))
    write_census(tmp_path, census_lines(20), census_lines(5))
    write_compas(tmp_path, compas_rows(60))
    for name in ("adult", "census-income", "compas"):
        norms = load(name, root=tmp_path).train.inputs.norm(dim=1)
        torch.testing.assert_close(norms, torch.ones_like(norms))


def test_a_zip_and_gzipped_files_give_the_same_as_plain_ones(tmp_path):
    write_adult(tmp_path, adult_lines(9, "<=50K"), adult_lines(4, ">50K."))
    plain = adult(tmp_path)
    with zipfile.ZipFile(tmp_path / "adult.zip", "w") as archive:
        for name in ("adult.data", "adult.test"):
            archive.write(tmp_path / name, name)
    for name in ("adult.data", "adult.test"):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
        (tmp_path / name).unlink()
    zipped = adult(tmp_path)
    for name in ("adult.data", "adult.test"):
        (tmp_path / f"{name}.gz").unlink()
    for other in (zipped, adult(tmp_path)):
        assert torch.equal(other.train.inputs, plain.train.inputs)
        assert torch.equal(other.test.targets, plain.test.targets)


def test_wrong_tables_are_named_with_the_line(tmp_path):
    write_adult(tmp_path, adult_lines(3, "<=50K"), [ADULT_ROW + ", rich"])
    with pytest.raises(DataError, match=r"adult.test, line 2: got income 'rich', expected <=50K or >50K"):
        adult(tmp_path)
    write_adult(tmp_path, ["39, State-gov"], adult_lines(1, "<=50K."))
    with pytest.raises(DataError, match=r"adult.data, line 1: got 2 fields, expected 15; it is truncated"):
        adult(tmp_path)
    (tmp_path / "adult.data.gz").write_bytes(gzip.compress(b"1,2\n" * 99)[:12])
    (tmp_path / "adult.data").unlink()
    with pytest.raises(DataError, match=r"adult\.data\.gz: cannot be read as a table"):
        adult(tmp_path)
    with pytest.raises(DataError, match=r"found none of census-income\.data"):
        census_income(tmp_path)


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "train", "test", "positives"),
    [("adult", 32_561, 16_281, 7_841), ("census-income", 199_523, 99_762, 12_382), ("compas", 5_754, 1_460, 2_596)],
)  # fmt: skip
def test_the_real_tables_are_complete_and_every_value_is_on_its_list(real_data, name, train, test, positives):
    if not (real_data / name).is_dir():
        pytest.skip(f"{name} is not in SPARSEDP_DATA")
    bundle = load(name, root=real_data)
    assert (len(bundle.train), len(bundle.test)) == (train, test)
    assert int(bundle.train.targets.sum()) == positives
    rules = {"adult": _ADULT_RULES, "census-income": _CENSUS_RULES, "compas": _COMPAS_RULES}[name]
    names = feature_names(rules)
    used = {names[column] for column in torch.unique(bundle.train.features.columns).tolist()}
    assert not any(one.endswith("=other") for one in used)
