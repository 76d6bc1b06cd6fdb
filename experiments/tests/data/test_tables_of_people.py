"""Tables about people and their ratings: encodings fixed before any row is read, people on one side of the split."""

from __future__ import annotations

import csv
import hashlib
import math
import zipfile

import numpy as np
import pytest
import torch
from tables_of_people import COMPAS_COLUMNS, adult_lines, census_lines, compas_rows

from sparsedp.errors import DataError
from sparsedp_experiments.data import diabetes130, load
from sparsedp_experiments.data.encoding import (
    ICD9_SLOTS,
    Category,
    Diagnoses,
    Hashed,
    Number,
    encode,
    icd9_slot,
)
from sparsedp_experiments.data.tables import (
    read_table,
    schema,
)
from sparsedp_experiments.runs.execute import recall_at

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


def test_icd9_codes_go_to_their_class_and_what_is_none_to_the_last_slot():
    same = [
        ("8", "008"),
        ("V1", "V01"),
        ("E16", "E016"),
        ("250.7", "250.70"),
        ("365.44", "365"),
        ("E950.2", "E950"),
    ]
    for code, other in same:
        assert icd9_slot(code) == icd9_slot(other) < ICD9_SLOTS - 1
    for code in ("0", "V99", "E500", "250.05", "banana", ""):
        assert icd9_slot(code) == ICD9_SLOTS - 1
    known = [f"{n}" for n in range(1, 1000)] + [f"V{n}" for n in range(1, 92)]
    known += [f"E{n}" for n in (*range(31), *range(800, 1000))] + [
        f"250.{a}{b}" for a in range(10) for b in range(4)
    ]
    assert sorted(map(icd9_slot, known)) == list(range(ICD9_SLOTS - 1))


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"readmitted": "maybe"}, "row 3: got readmitted 'maybe', expected <30, >30 or NO"),
        ({"patient_nbr": "?"}, "row 3: got patient_nbr '\\?', expected a whole number"),
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
    with pytest.raises(DataError, match="row 120: got readmitted ''"):
        diabetes130(tmp_path)
    path.unlink()
    with zipfile.ZipFile(tmp_path / "diabetic_data.csv.zip", "w") as archive:
        archive.writestr("other.csv", "x")
    with pytest.raises(DataError, match=r"no item named 'diabetic_data\.csv'"):
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
    assert int(bundle.train.targets.sum() + bundle.test.targets.sum()) == 11_357
    assert not set(bundle.train.units.tolist()) & set(bundle.test.units.tolist())
    assert 0.19 < bundle.test.unit_count / 71_518 < 0.21


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


@pytest.mark.parametrize(
    ("name", "digest"),
    [("adult", "d68d5d3624d9978b"), ("census-income", "e4ebbf6e21524fb3"), ("compas", "22e91109d0e29e51")],
)
def test_the_tables_are_the_same_to_the_bit_as_when_their_features_were_checked_by_name(
    tmp_path, name, digest
):
    write_adult(tmp_path, adult_lines(20, "<=50K"), adult_lines(5, "<=50K."))
    write_census(tmp_path, census_lines(20), census_lines(5))
    write_compas(tmp_path, compas_rows(60))
    bundle = load(name, root=tmp_path)
    arrays = (bundle.train.inputs, bundle.test.inputs, bundle.train.targets)
    content = b"".join(array.numpy().tobytes() for array in arrays)
    assert hashlib.sha256(content).hexdigest()[:16] == digest


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "train", "test", "positives"),
    [("adult", 32_561, 16_281, 7_841), ("census-income", 199_523, 99_762, 12_382), ("compas", 5_754, 1_460, 2_596)],
)  # fmt: skip
def test_the_real_tables_are_complete(real_data, name, train, test, positives):
    if not (real_data / name).is_dir():
        pytest.skip(f"{name} is not in SPARSEDP_DATA")
    bundle = load(name, root=real_data)
    assert (len(bundle.train), len(bundle.test)) == (train, test)
    assert int(bundle.train.targets.sum()) == positives


# Data sets of ids: MovieLens' ratings, made-up texts; and what ranks them.


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
    ("file", "text"),
    [
        ("u.data", "1\t2000\t3\t0\n"),
        ("u.data", "99\t20\t3\t0\n"),
        ("u.data", "1\t20\n"),
        ("u.data", ""),
        ("u.user", "1|30|M|wizard|1\n"),
    ],
)
def test_damaged_ratings_are_refused(tmp_path, file, text):
    write(tmp_path, "ml-100k", hundred_k() | {file: text}, packed=False)
    with pytest.raises(DataError, match="ml-100k"):
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
