"""The hospital table: encodings fixed before any row is read."""

import csv
import hashlib
import zipfile

import numpy as np
import pytest
import torch

from sparsedp.errors import DataError
from sparsedp_experiments.data import diabetes130
from sparsedp_experiments.data.encoding import (
    ICD9_SLOTS,
    Category,
    Diagnoses,
    Hashed,
    Number,
    Ordinal,
    encode,
    feature_names,
    icd9_name,
    icd9_slot,
)
from sparsedp_experiments.data.tables import read_table, schema

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
    for ordered in ("one-hot", "ordinal"):
        for diagnoses in ("by position", "pooled"):
            blocks = schema(ordered, diagnoses)
            among = encode(table, blocks, unit_norm=True).batch(torch.tensor([200]))
            assert torch.equal(among, encode(alone, blocks, unit_norm=True).batch(torch.tensor([0])))


def test_unit_norm_scales_every_record_to_length_one(tmp_path):
    write_csv(tmp_path / "diabetic_data.csv", some_records())
    norms = diabetes130(tmp_path).train.inputs.norm(dim=1)
    torch.testing.assert_close(norms, torch.ones_like(norms))


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


def test_pooled_diagnoses_count_a_repeated_code_once(tmp_path):
    write_csv(
        tmp_path / "diabetic_data.csv",
        [record(p, diag_1="428", diag_2="428", diag_3="401") for p in range(30)],
    )
    names = feature_names(schema(diagnoses="pooled"))
    found = dense_row(names, diabetes130(tmp_path, diagnoses="pooled", unit_norm=False).train, 0)
    codes = {name.split("=")[1]: value for name, value in found.items() if name.startswith("diag_1/")}
    assert codes == {"428": 1.0, "401": 1.0}


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
    ordinal = Ordinal("c", ("a", "b")).encode(table)
    assert ordinal.toarray().tolist() == [[1.0], [0.0], [0.0], [0.0]]
    hashed = Hashed("c", 8).encode(table)
    assert hashed.shape == (4, 8)
    assert hashed.sum(axis=1).tolist() == [1, 1, 0, 1]
    both = Diagnoses(("d", "e")).encode(table)
    assert both.sum(axis=1).tolist() == [1, 1, 1, 1]
    assert both.max() == 1
    with pytest.raises(DataError, match="column x: could not convert"):
        Number("x", 0, 1).encode({"x": ["many"]})


@pytest.mark.parametrize(
    "block", schema() + schema("ordinal", "pooled"), ids=lambda block: "/".join(block.columns)
)
def test_every_block_has_as_many_names_as_numbers(block):
    assert len(block.names()) == block.width


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
    with pytest.raises(DataError, match="got 'thermometer', expected one of one-hot, ordinal"):
        diabetes130(tmp_path, ordered="thermometer")


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
    used = {names[column] for column in torch.unique(bundle.train.features.columns).tolist()}
    unforeseen = {name for name in used if name.endswith("=other")}
    assert unforeseen <= {"diag_1=other", "diag_2=other", "diag_3=other"}


@pytest.mark.parametrize(
    ("ordered", "diagnoses", "digest"),
    [
        ("one-hot", "by position", "533bffb073c6ec37"),
        ("ordinal", "pooled", "d940307c3ff329e7"),
    ],
)
def test_the_encoded_table_is_the_same_to_the_bit_as_when_it_was_first_recorded(
    tmp_path, ordered, diagnoses, digest
):
    records = [
        record(p, diag_2=("250.83", "V45", "?")[p % 3], diag_3="E909", age=f"[{p % 9}0-{p % 9 + 1}0)", weight="?",
               num_medications=str(p), payer_code=f"P{p % 7}")
        for p in range(60)
    ]  # fmt: skip
    write_csv(tmp_path / "diabetic_data.csv", records)
    features = encode(read_table(tmp_path / "diabetic_data.csv"), schema(ordered, diagnoses), unit_norm=True)
    dense = features.batch(torch.arange(60))
    assert hashlib.sha256(dense.numpy().tobytes()).hexdigest()[:16] == digest
