"""Tables about people and their ratings: encodings fixed before any row is read, people on one side of the split."""

from __future__ import annotations

import csv
import gzip
import hashlib
import math
import zipfile

import numpy as np
import pytest
import torch
from tables_of_people import ADULT_ROW, CENSUS_ROW, COMPAS_COLUMNS, adult_lines, census_lines, compas_rows

from sparsedp.errors import DataError
from sparsedp_experiments.data import diabetes130, load
from sparsedp_experiments.data.encoding import (
    ICD9_SLOTS,
    Category,
    Diagnoses,
    Hashed,
    Number,
    encode,
    feature_names,
    icd9_name,
    icd9_slot,
)
from sparsedp_experiments.data.ratings import FIELD_SIZES
from sparsedp_experiments.data.tables import (
    _ADULT_RULES,
    _CENSUS_RULES,
    _COMPAS_RULES,
    adult,
    census_income,
    compas,
    read_table,
    schema,
)
from sparsedp_experiments.runs.execute import execute, recall_at
from sparsedp_experiments.runs.settings import Settings

# The hospital table: encodings fixed before any row is read.


COLUMNS = [
    "encounter_id", "patient_nbr", "race", "gender", "age", "weight", "admission_type_id",
    "discharge_disposition_id", "admission_source_id", "time_in_hospital", "payer_code", "medical_specialty",
    "num_lab_procedures", "num_procedures", "num_medications", "number_outpatient", "number_emergency",
    "number_inpatient", "diag_1", "diag_2", "diag_3", "number_diagnoses", "max_glu_serum", "A1Cresult",
    "metformin", "repaglinide", "nateglinide", "chlorpropamide", "glimepiride", "acetohexamide", "glipizide",
    "glyburide", "tolbutamide", "pioglitazone", "rosiglitazone", "acarbose", "miglitol", "troglitazone",
    "tolazamide", "examide", "citoglipton", "insulin", "glyburide-metformin", "glipizide-metformin",
    "glimepiride-pioglitazone", "metformin-rosiglitazone", "metformin-pioglitazone", "change", "diabetesMed",
    "readmitted",
]  # fmt: skip


def record(patient, **changes):
    row = dict.fromkeys(COLUMNS, "No")
    row |= {
        "encounter_id": "1",
        "patient_nbr": str(patient),
        "race": "Asian",
        "gender": "Female",
        "age": "[70-80)",
    }
    row |= dict.fromkeys(["weight", "payer_code", "medical_specialty", "diag_2", "diag_3"], "?")
    row |= dict.fromkeys([c for c in COLUMNS if c.startswith("num") or c.endswith("_id")], "1")
    row |= {
        "time_in_hospital": "7",
        "diag_1": "250.83",
        "max_glu_serum": "None",
        "A1Cresult": ">8",
        "readmitted": "NO",
    }
    return row | changes


def write_csv(path, records, columns=COLUMNS):
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(records)


def some_records(patients=60):
    return [record(p, readmitted=kind) for p in range(patients) for kind in ("NO", "<30", ">30")[: p % 3 + 1]]


def dense_row(names, split, row):
    inputs, _ = split.rows_at(torch.tensor([row]))
    return {name: value for name, value in zip(names, inputs[0].tolist(), strict=True) if value}


def test_a_record_becomes_the_features_the_dictionary_says(tmp_path):
    change = dict(
        race="?", insulin="Up", diag_1="428", diag_2="V45", number_inpatient="3", payer_code="MC", change="Ch"
    )
    write_csv(tmp_path / "diabetic_data.csv", [record(p, **change) for p in range(30)])
    bundle = diabetes130(tmp_path, unit_norm=False)
    found = dense_row(feature_names(schema()), bundle.train, 0)
    ones = {
        "gender=Female",
        "age=[70-80)",
        "A1Cresult=>8",
        "insulin=Up",
        "change=Ch",
        "diag_1=428",
        "diag_2=V45",
    }
    ones |= {
        f"{column}=1" for column in ("admission_type_id", "discharge_disposition_id", "admission_source_id")
    }
    payer = {name for name in found if name.startswith("payer_code#")}
    assert len(payer) == 1
    assert {name for name, value in found.items() if value == 1} == ones | payer
    numbers = {name: round(value, 6) for name, value in found.items() if value != 1}
    expected = {
        "time_in_hospital": 0.5,
        "num_lab_procedures": 0.01,
        "num_procedures": 1 / 6,
        "num_medications": 0.02,
        "number_diagnoses": 1 / 16,
        "number_outpatient": np.log(2) / np.log(11),
        "number_emergency": np.log(2) / np.log(11),
        "number_inpatient": np.log(4) / np.log(11),
    }
    assert numbers == {name: round(value, 6) for name, value in expected.items()}


def test_the_encoding_of_a_row_does_not_depend_on_the_others():
    """Non-interference of the encoder: a row alone and among many unlike ones gives the same numbers."""
    rng = np.random.default_rng(0)
    odd = [
        record(
            p,
            race=f"race{p}",
            diag_1=f"{rng.integers(1, 999)}",
            num_medications=str(rng.integers(0, 9999)),
            payer_code=f"p{p}",
        )
        for p in range(200)
    ]
    one = record(3, diag_1="414", medical_specialty="Cardiology")
    table = {column: [row[column] for row in [*odd, one]] for column in COLUMNS}
    alone = {column: [one[column]] for column in COLUMNS}
    for diagnoses in ("by position", "pooled"):
        blocks = schema(diagnoses)
        among = encode(table, blocks, unit_norm=True).batch(torch.tensor([200]))
        assert torch.equal(among, encode(alone, blocks, unit_norm=True).batch(torch.tensor([0])))


@pytest.mark.parametrize(
    "zipped", ["diabetic_data.csv.zip", "diabetes+130-us+hospitals+for+years+1999-2008.zip", None]
)
def test_patients_stay_on_one_side_and_targets_are_thirty_days(tmp_path, zipped):
    records = some_records()
    write_csv(tmp_path / "diabetic_data.csv", records)
    if zipped:
        with zipfile.ZipFile(tmp_path / zipped, "w") as archive:
            archive.write(tmp_path / "diabetic_data.csv", "diabetic_data.csv")
        (tmp_path / "diabetic_data.csv").unlink()
    bundle = diabetes130(tmp_path)
    assert bundle.unit == "patient"
    assert len(bundle.train) + len(bundle.test) == len(records)
    assert not set(bundle.train.units.tolist()) & set(bundle.test.units.tolist())
    assert bundle.train.unit_count + bundle.test.unit_count == 60
    positives = sum(split.targets.sum() for split in (bundle.train, bundle.test))
    assert positives == sum(row["readmitted"] == "<30" for row in records)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("8", "008"), ("428", "428"), ("999", "999"), ("V27", "V27"), ("V1", "V01"), ("E885", "E885"),
        ("E16", "E016"), ("250", "250"), ("250.83", "250.83"), ("250.7", "250.70"), ("365.44", "365"),
        ("E950.2", "E950"),
        ("0", "other"), ("V99", "other"), ("E500", "other"), ("250.05", "other"), ("banana", "other"), ("", "other"),
    ],
)  # fmt: skip
def test_icd9_codes_go_to_their_class(code, expected):
    assert icd9_name(icd9_slot(code)) == expected


def test_every_icd9_slot_has_its_own_name_and_is_reached_by_it():
    names = [icd9_name(place) for place in range(ICD9_SLOTS)]
    assert len(set(names)) == ICD9_SLOTS == 999 + 91 + 31 + 200 + 40 + 1
    assert [icd9_slot(name) for name in names] == list(range(ICD9_SLOTS))


def test_blocks_clamp_and_hash_and_put_the_unknown_in_a_slot_of_its_own():
    table = {
        "x": ["-5", "5", "50", "?"],
        "c": ["b", "zebra", "?", "quiet"],
        "d": ["1", "?", "V1", "1"],
        "e": ["1", "2", "?", "?"],
    }
    assert Number("x", 0, 10).encode(table).toarray().tolist() == [[0.0], [0.5], [1.0], [0.0]]
    category = Category("c", ("a", "b"), silent=("quiet",)).encode(table)
    assert category.toarray().tolist() == [[0, 1, 0], [0, 0, 1], [0, 0, 0], [0, 0, 0]]
    hashed = Hashed("c", 8).encode(table)
    assert hashed.shape == (4, 8)
    assert hashed.sum(axis=1).tolist() == [1, 1, 0, 1]
    both = Diagnoses("d/e").encode(table)
    assert both.sum(axis=1).tolist() == [1, 1, 1, 1]
    assert both.max() == 1
    with pytest.raises(DataError, match="column x: could not convert"):
        Number("x", 0, 1).encode({"x": ["many"]})


@pytest.mark.parametrize("block", schema() + schema("pooled"), ids=lambda block: "/".join(block.columns))
def test_every_block_has_as_many_names_as_numbers(block):
    nothing = {column: ["?"] for column in block.columns}
    assert len(block.names()) == block.encode(nothing).shape[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"readmitted": "maybe"}, "line 4: got readmitted 'maybe', expected <30, >30 or NO"),
        ({"patient_nbr": "?"}, "line 4: got patient_nbr '\\?', expected a whole number"),
        ({"num_medications": "lots"}, "num_medications"),
    ],
)
def test_unknown_values_are_named_with_their_line(tmp_path, change, message):
    write_csv(tmp_path / "diabetic_data.csv", [record(1), record(2), record(3, **change)])
    with pytest.raises(DataError, match=message):
        diabetes130(tmp_path)


def test_missing_columns_rows_and_members_are_named(tmp_path):
    path = tmp_path / "diabetic_data.csv"
    write_csv(path, some_records(), [column for column in COLUMNS if column != "insulin"])
    with pytest.raises(DataError, match="column 'insulin' is missing"):
        diabetes130(tmp_path)
    write_csv(path, [])
    with pytest.raises(DataError, match="no rows"):
        diabetes130(tmp_path)
    write_csv(path, some_records())
    path.write_text(path.read_text()[:-60])
    with pytest.raises(DataError, match="it is truncated"):
        diabetes130(tmp_path)
    path.unlink()
    with zipfile.ZipFile(tmp_path / "diabetic_data.csv.zip", "w") as archive:
        archive.writestr("other.csv", "x")
    with pytest.raises(DataError, match=r"no diabetic_data\.csv in it"):
        diabetes130(tmp_path)
    with pytest.raises(DataError, match="got 'mixed', expected one of by position, pooled"):
        diabetes130(tmp_path, diagnoses="mixed")


@pytest.mark.data
def test_the_real_table_is_complete_and_split_by_patient(real_data):
    if not (real_data / "diabetes130").is_dir():
        pytest.skip("the hospital table is not in SPARSEDP_DATA")
    bundle = diabetes130(real_data)
    assert len(bundle.train) + len(bundle.test) == 101_766
    assert bundle.train.unit_count + bundle.test.unit_count == 71_518
    assert bundle.input_shape == (len(feature_names(schema())),)
    assert int(bundle.train.targets.sum() + bundle.test.targets.sum()) == 11_357
    assert not set(bundle.train.units.tolist()) & set(bundle.test.units.tolist())
    assert 0.19 < bundle.test.unit_count / 71_518 < 0.21
    names = feature_names(schema())
    used = {names[column] for column in np.unique(bundle.train.features.matrix.indices)}
    unforeseen = {name for name in used if name.endswith("=other")}
    assert unforeseen <= {"diag_1=other", "diag_2=other", "diag_3=other"}


def test_the_encoded_table_is_the_same_to_the_bit_as_when_it_was_first_recorded(tmp_path):
    records = [
        record(p, diag_2=("250.83", "V45", "?")[p % 3], diag_3="E909", age=f"[{p % 9}0-{p % 9 + 1}0)", weight="?",
               num_medications=str(p), payer_code=f"P{p % 7}")
        for p in range(60)
    ]  # fmt: skip
    write_csv(tmp_path / "diabetic_data.csv", records)
    features = encode(read_table(tmp_path / "diabetic_data.csv"), schema(), unit_norm=True)
    dense = features.batch(torch.arange(60))
    assert hashlib.sha256(dense.numpy().tobytes()).hexdigest()[:16] == "533bffb073c6ec37"


# The census tables and COMPAS: official layouts, and encodings fixed before any row is read.


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
    widths = {rule.column: len(rule.names()) - 1 for rule in (*_ADULT_RULES, *_CENSUS_RULES)}
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
    used = {names[column] for column in np.unique(bundle.train.features.matrix.indices)}
    assert not any(one.endswith("=other") for one in used)


# Data sets of ids: ratings in MovieLens' layouts, click logs in Criteo's, made-up texts; and what ranks them.


USERS = 40


def hundred_k() -> dict[str, str]:
    generator = np.random.default_rng(0)
    users = [
        f"{u}|{7 + u}|{'MF'[u % 2]}|{('writer', 'student', 'none')[u % 3]}|{'T8H1N' if u == 3 else 94043}"
        for u in range(1, USERS + 1)
    ]
    ratings = [
        f"{u}\t{film}\t{1 + int(generator.integers(5))}\t88125{u}"
        for u in range(1, USERS + 1)
        for film in generator.choice(np.arange(1, 1683), 6, replace=False)
    ]
    return {"u.data": "\n".join(ratings) + "\n", "u.user": "\n".join(users) + "\n"}


def write(root, name, files, packed):
    if packed:
        with zipfile.ZipFile(root / f"{name}.zip", "w") as archive:
            for member, text in files.items():
                archive.writestr(f"{name}/{member}", text)
    else:
        (root / name).mkdir()
        for member, text in files.items():
            (root / name / member).write_text(text)


@pytest.mark.parametrize("packed", [False, True], ids=["folder", "zip"])
def test_ratings_become_ids_of_disjoint_fields_and_users_stay_on_one_side(tmp_path, packed):
    files, sizes = hundred_k(), FIELD_SIZES
    write(tmp_path, "ml-100k", files, packed)
    bundle = load("movielens-100k", tmp_path)
    starts = np.cumsum([0, *sizes[:-1]])
    ids = torch.cat([bundle.train.inputs, bundle.test.inputs]).numpy()
    assert bundle.vocabulary == sum(sizes)
    for field, (start, count) in enumerate(zip(starts, sizes, strict=True)):
        assert ids[:, field].min() >= start
        assert ids[:, field].max() < start + count
    assert bundle.unit == "user"
    assert bundle.train.unit_count + bundle.test.unit_count == USERS
    assert len(ids) == len(next(iter(files.values())).splitlines())


def test_a_rating_is_read_field_by_field(tmp_path):
    files = hundred_k()
    write(tmp_path, "ml-100k", files, packed=False)
    bundle = load("movielens-100k", tmp_path)
    for side in (bundle.train, bundle.test):
        lines = [
            line
            for line in map(str.split, files["u.data"].splitlines())
            if int(line[0]) in side.units.tolist()
        ]
        for (user, film, rating, _), ids, target in zip(
            lines, side.inputs.tolist(), side.targets.tolist(), strict=True
        ):
            age, u = 7 + int(user), int(user)
            group = sum(age >= low for low in (18, 25, 35, 45, 50, 56))
            occupation = (20, 18, 12)[u % 3]
            region = 10 if u == 3 else 9
            assert ids == [
                int(film) - 1,
                1682 + group,
                1689 + "FM".index("MF"[u % 2]),
                1691 + occupation,
                1712 + region,
            ]
            assert target == (int(rating) >= 4)


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("u.data", "1\t2000\t3\t0\n", "film 2000"),
        ("u.data", "99\t20\t3\t0\n", "user 99"),
        ("u.data", "1\t20\n", "line 1: expected 4 parts"),
        ("u.data", "", "no ratings"),
        ("u.user", "1|x|M|writer|1\n", "line 1"),
        ("u.user", "1|30|M|wizard|1\n", "line 1"),
    ],
)
def test_damaged_ratings_are_refused_by_line(tmp_path, file, text, complaint):
    write(tmp_path, "ml-100k", hundred_k() | {file: text}, packed=False)
    with pytest.raises(DataError, match=complaint):
        load("movielens-100k", tmp_path)


def test_made_up_words_follow_zipfs_law_and_tell_the_class():
    bundle = load("zipf", records=4000, vocabulary=1000)
    counts = torch.bincount(bundle.train.inputs.reshape(-1), minlength=1000).double()
    assert counts[0] == 0  # padding
    assert counts[1] / counts[10:20].mean() > 5
    assert float(counts[100:].sum() / counts.sum()) == pytest.approx(
        math.log(999 / 100) / math.log(999), abs=0.03
    )
    assert 0.3 < float(bundle.train.targets.double().mean()) < 0.7


def test_recall_counts_hits_among_each_users_best():
    scores = torch.tensor([3.0, 2.0, 1.0, 5.0, 4.0, 0.0, 9.0])
    liked = torch.tensor([True, False, True, False, True, True, False])
    units = torch.tensor([7, 7, 7, 2, 2, 2, 5])
    assert recall_at(1, scores, liked, units) == pytest.approx((1 + 0) / 2)
    assert recall_at(2, scores, liked, units) == pytest.approx((1 / 2 + 1 / 2) / 2)
    assert recall_at(3, scores, liked, units) == 1.0


@pytest.mark.filterwarnings("ignore:the data set knows which unit")  # per rating is asked for
@pytest.mark.parametrize("unit", [None, "row"])
def test_a_recommender_trains_per_user_and_per_rating(tmp_path, monkeypatch, unit):
    write(tmp_path, "ml-100k", hundred_k(), packed=False)
    monkeypatch.setenv("SPARSEDP_DATA", str(tmp_path))
    settings = Settings(
        dataset="movielens-100k", method="dp-sgd", epsilon=3.0, delta=1e-3, epochs=1, batch_size=16, lr=0.1,
        accountant="rdp", seed=0, unit=unit,
    )  # fmt: skip
    result = execute(settings)
    assert result.unit == ("user" if unit is None else "row")
    assert 0 <= result.metrics["recall_at_10"] <= 1
    assert result.d == sum(FIELD_SIZES) * 17 + 3
