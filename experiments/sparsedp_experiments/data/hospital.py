"""The hospital table (130 US hospitals, diabetic inpatients): readmitted within 30 days, per patient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch

from sparsedp.errors import DataError
from sparsedp_experiments.data.bundle import DataBundle, Split
from sparsedp_experiments.data.delimited import Known, read_columns
from sparsedp_experiments.data.encoding import (
    Category,
    ColumnRule,
    Diagnoses,
    Hashed,
    Number,
    Ordinal,
    Table,
    encode,
)
from sparsedp_experiments.data.files import fingerprint
from sparsedp_experiments.data.images import TEST_FRACTION, public_share
from sparsedp_experiments.data.row import DatasetRow, PublicFiles, SourceFile

CLASSES = ("not readmitted within 30 days", "readmitted within 30 days")

_TARGETS = {"<30": 1, ">30": 0, "NO": 0}
_KNOWN: Mapping[str, Known] = MappingProxyType(
    {"readmitted": (_TARGETS.__contains__, "<30, >30 or NO"), "patient_nbr": (str.isdigit, "a whole number")}
)
_DRUGS = (
    "metformin", "repaglinide", "nateglinide", "chlorpropamide", "glimepiride", "acetohexamide", "glipizide",
    "glyburide", "tolbutamide", "pioglitazone", "rosiglitazone", "acarbose", "miglitol", "troglitazone",
    "tolazamide", "examide", "citoglipton", "insulin", "glyburide-metformin", "glipizide-metformin",
    "glimepiride-pioglitazone", "metformin-rosiglitazone", "metformin-pioglitazone",
)  # fmt: skip
_DECADES = tuple(f"[{low}-{low + 10})" for low in range(0, 100, 10))
_WEIGHTS = (*(f"[{low}-{low + 25})" for low in range(0, 200, 25)), ">200")

_NOMINAL: tuple[ColumnRule, ...] = (
    Category("race", ("Caucasian", "AfricanAmerican", "Asian", "Hispanic", "Other")),
    Category("gender", ("Female", "Male", "Unknown/Invalid")),
    Category("admission_type_id", tuple(str(code) for code in range(1, 9))),
    Category("discharge_disposition_id", tuple(str(code) for code in range(1, 31))),
    Category("admission_source_id", tuple(str(code) for code in range(1, 27))),
    Hashed("payer_code", 64),
    Hashed("medical_specialty", 128),
    Category("change", ("Ch",), silent=("No",)),
    Category("diabetesMed", ("Yes",), silent=("No",)),
)
_ORDERED = (
    Category("age", _DECADES),
    Category("weight", _WEIGHTS),
    Category("max_glu_serum", ("Norm", ">200", ">300"), silent=("None",)),
    Category("A1Cresult", ("Norm", ">7", ">8"), silent=("None",)),
    *(Category(drug, ("Down", "Steady", "Up"), silent=("No",)) for drug in _DRUGS),
)
_NUMBERS: tuple[ColumnRule, ...] = (
    Number("time_in_hospital", 0, 14),
    Number("num_lab_procedures", 0, 100),
    Number("num_procedures", 0, 6),
    Number("num_medications", 0, 50),
    Number("number_diagnoses", 0, 16),
    Number("number_outpatient", 0, 10, logarithmic=True),
    Number("number_emergency", 0, 10, logarithmic=True),
    Number("number_inpatient", 0, 10, logarithmic=True),
)
_CODES: Mapping[str, tuple[ColumnRule, ...]] = MappingProxyType(
    {
        "by position": tuple(Diagnoses((column,)) for column in ("diag_1", "diag_2", "diag_3")),
        "pooled": (Diagnoses(("diag_1", "diag_2", "diag_3")),),
    }
)
_ORDERS: Mapping[str, tuple[ColumnRule, ...]] = MappingProxyType(
    {"one-hot": _ORDERED, "ordinal": tuple(Ordinal(b.column, b.levels, b.silent) for b in _ORDERED)}
)


def schema(ordered: str = "one-hot", diagnoses: str = "by position") -> tuple[ColumnRule, ...]:
    """The public encoding of the table: bounds and lists from its data dictionary and the ICD-9 ranges.

    `ordered` encodes age, weight, test results and doses as categories or as one number each; `diagnoses` keeps the
    three diagnosis columns apart or pools them. The data dictionary gives no list of payers and specialties: hashed.
    """
    for given, table in ((ordered, _ORDERS), (diagnoses, _CODES)):
        if given not in table:
            raise DataError(f"diabetes130: got {given!r}, expected one of {', '.join(table)}")
    return (*_NUMBERS, *_NOMINAL, *_ORDERS[ordered], *_CODES[diagnoses])


def diabetes130(
    root: Path | str | None = None,
    ordered: str = "one-hot",
    diagnoses: str = "by position",
    unit_norm: bool = True,
) -> DataBundle:
    """The hospital table, sparse, from `diabetic_data.csv` or a zip of it.

    A fifth of the patients are the test set, by a public hash of the patient's number. `unit_norm` scales each record
    to length one.
    **Privacy.** The encoding is fixed by `schema`: nothing is learned from the rows. The unit is the patient, who has
    up to 40 rows.
    """
    blocks = schema(ordered, diagnoses)
    path = _SOURCE.search.require(_SOURCE.forms["official"][0].candidates, root)
    table = read_table(path)
    features = encode(table, blocks, unit_norm)
    targets = torch.tensor([_TARGETS[value] for value in table["readmitted"]])
    patients = torch.tensor([int(number) for number in table["patient_nbr"]])
    share = {number: public_share(f"diabetes130:{number}") for number in set(patients.tolist())}
    test = torch.tensor([share[number] < TEST_FRACTION for number in patients.tolist()])
    whole = Split(features, targets, patients)
    return DataBundle(
        name="diabetes130",
        variant=f"ordered columns {ordered}, diagnoses {diagnoses}" + (", unit norm" if unit_norm else ""),
        train=whole.select((~test).nonzero().squeeze(1)),
        test=whole.select(test.nonzero().squeeze(1)),
        classes=CLASSES,
        unit="patient",
        notes=("the test set is a fifth of the patients",),
        fingerprint=fingerprint([path], "diabetes130", ordered, diagnoses, unit_norm),
        unit_norm=unit_norm,
    )


def read_table(path: Path) -> Table:
    """The columns of the CSV as strings.

    Raises:
        DataError: columns are missing, a row has another length, or a target or patient number is unknown.
    """
    columns = [*(column for block in schema() for column in block.columns), *_KNOWN]
    return read_columns(path, columns, member="diabetic_data.csv", known=_KNOWN)


_SOURCE = PublicFiles(
    "diabetes130",
    "130 US hospitals 1999-2008, diabetic inpatients",
    "101,766 encounters of 71,518 patients",
    "readmitted within 30 days, per patient",
    "the UCI repository, data set 296 (Strack et al. 2014)",
    ("diabetes130",),
    {
        "official": (
            SourceFile(
                (
                    "diabetic_data.csv",
                    "diabetic_data.csv.zip",
                    "diabetes+130-us+hospitals+for+years+1999-2008.zip",
                ),
                (
                    "f82ac129da2ddd2299391ff6fbae3a6a58b3edcf59ac9d7bd480c00fe453112a",
                    "0689e7ec031237dc63031b938805c48377748761a3b26acab621567afa24df97",
                ),
                "https://archive.ics.uci.edu/static/public/296/diabetes+130-us+hospitals+for+years+1999-2008.zip",
            ),
        )
    },
)

_BY_POSITION = DatasetRow(
    name="diabetes130",
    title="hospital table, readmitted within 30 days",
    source=_SOURCE,
    loader=diabetes130,
    model="logistic",
    recipes={"logistic": {"epochs": 10, "batch_size": 2048, "clip_norm": 0.5}},
)
_POOLED = replace(
    _BY_POSITION,
    name="diabetes130-pooled",
    title="hospital table, the three diagnosis columns pooled",
    chosen={"diagnoses": "pooled"},
)
ROWS = (_BY_POSITION, _POOLED)
