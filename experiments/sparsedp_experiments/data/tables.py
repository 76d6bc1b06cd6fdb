"""Tables of people: the hospital table, two census tables and COMPAS."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from sparsedp.errors import DataError
from sparsedp_experiments.data.bundle import DataBundle, Split
from sparsedp_experiments.data.encoding import (
    Category,
    ColumnRule,
    Diagnoses,
    Hashed,
    Known,
    Number,
    Table,
    encode,
    read_columns,
)
from sparsedp_experiments.data.files import fingerprint, parted
from sparsedp_experiments.data.spec import SOURCES

_LEVELS = tomllib.loads((Path(__file__).parent / "census_levels.toml").read_text(encoding="utf-8"))
HOSPITAL_CLASSES = ("not readmitted within 30 days", "readmitted within 30 days")

_TARGETS = {"<30": 1, ">30": 0, "NO": 0}
_HOSPITAL_KNOWN: Mapping[str, Known] = {
    "readmitted": (_TARGETS.__contains__, "<30, >30 or NO"),
    "patient_nbr": (str.isdigit, "a whole number"),
}
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
_CODES: Mapping[str, tuple[ColumnRule, ...]] = {
    "by position": tuple(map(Diagnoses, ("diag_1", "diag_2", "diag_3"))),
    "pooled": (Diagnoses("diag_1/diag_2/diag_3"),),
}


def schema(diagnoses: str = "by position") -> tuple[ColumnRule, ...]:
    """The public encoding of the table: bounds and lists from its data dictionary and the ICD-9 ranges.

    `diagnoses` keeps the three diagnosis columns apart or pools them. The data dictionary gives no list of payers and
    specialties: hashed.
    """
    if diagnoses not in _CODES:
        raise DataError(f"diabetes130: got {diagnoses!r}, expected one of {', '.join(_CODES)}")
    return (*_NUMBERS, *_NOMINAL, *_ORDERED, *_CODES[diagnoses])


def diabetes130(
    root: Path | str | None = None, diagnoses: str = "by position", unit_norm: bool = True
) -> DataBundle:
    """The hospital table, sparse, from `diabetic_data.csv` or a zip of it.

    A fifth of the patients are the test set, by a public hash of the patient's number. `unit_norm` scales each record
    to length one.
    **Privacy.** The encoding is fixed by `schema`: nothing is learned from the rows. The unit is the patient, who has
    up to 40 rows.
    """
    blocks = schema(diagnoses)
    (path,) = SOURCES["diabetes130"].require(root)
    table = read_table(path)
    features = encode(table, blocks, unit_norm)
    targets = torch.tensor([_TARGETS[value] for value in table["readmitted"]])
    patients = torch.tensor([int(number) for number in table["patient_nbr"]])
    train, test = parted(
        Split(features, targets, patients), [f"diabetes130:{number}" for number in patients.tolist()]
    )
    return DataBundle(
        name="diabetes130",
        variant=f"ordered columns one-hot, diagnoses {diagnoses}" + (", unit norm" if unit_norm else ""),
        train=train,
        test=test,
        classes=HOSPITAL_CLASSES,
        unit="patient",
        notes=("the test set is a fifth of the patients",),
        fingerprint=fingerprint([path], "diabetes130", "one-hot", diagnoses, unit_norm),
        unit_norm=unit_norm,
    )


def read_table(path: Path) -> Table:
    """The columns of the CSV as strings."""
    columns = [*(column for block in schema() for column in block.columns), *_HOSPITAL_KNOWN]
    return read_columns(path, columns, _HOSPITAL_KNOWN, member="diabetic_data.csv")


CENSUS_CLASSES = ("at most 50,000 dollars", "more than 50,000 dollars")

_ADULT_COLUMNS = (
    "age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship",
    "race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country", "income",
)  # fmt: skip
_ADULT_RULES: tuple[ColumnRule, ...] = (
    Number("age", 0, 90),
    Number("hours-per-week", 0, 99),
    Number("capital-gain", 0, 100_000, logarithmic=True),
    Number("capital-loss", 0, 5_000, logarithmic=True),
    *(Category(column, tuple(levels)) for column, levels in _LEVELS["adult"].items()),
)
_ADULT_TARGETS = {"<=50K": 0, ">50K": 1, "<=50K.": 0, ">50K.": 1}

_CENSUS_COLUMNS = (
    "age", "class of worker", "detailed industry recode", "detailed occupation recode", "education",
    "wage per hour", "enroll in edu inst last wk", "marital stat", "major industry code", "major occupation code",
    "race", "hispanic origin", "sex", "member of a labor union", "reason for unemployment",
    "full or part time employment stat", "capital gains", "capital losses", "dividends from stocks",
    "tax filer stat", "region of previous residence", "state of previous residence",
    "detailed household and family stat", "detailed household summary in household", "instance weight",
    "migration code-change in msa", "migration code-change in reg", "migration code-move within reg",
    "live in this house 1 year ago", "migration prev res in sunbelt", "num persons worked for employer",
    "family members under 18", "country of birth father", "country of birth mother", "country of birth self",
    "citizenship", "own business or self employed", "fill inc questionnaire for veteran's admin",
    "veterans benefits", "weeks worked in year", "year", "income",
)  # fmt: skip
_OUTSIDE = ("Not in universe", "Not in universe or children", "Not in universe under 1 year old")
"""Who was not asked; nothing is present, so nothing is encoded."""
_CENSUS_RULES: tuple[ColumnRule, ...] = (
    Number("age", 0, 90),
    Number("weeks worked in year", 0, 52),
    Number("num persons worked for employer", 0, 6),
    Number("wage per hour", 0, 10_000, logarithmic=True),
    Number("capital gains", 0, 100_000, logarithmic=True),
    Number("capital losses", 0, 5_000, logarithmic=True),
    Number("dividends from stocks", 0, 100_000, logarithmic=True),
    Category("detailed industry recode", tuple(str(code) for code in range(1, 52)), silent=("0",)),
    Category("detailed occupation recode", tuple(str(code) for code in range(1, 47)), silent=("0",)),
    *(
        Category(column, tuple(level for level in levels if level not in _OUTSIDE), silent=_OUTSIDE)
        for column, levels in _LEVELS["census-income"].items()
    ),
    *(
        Category(f"country of birth {whose}", tuple(_LEVELS["countries"]))
        for whose in ("self", "father", "mother")
    ),
)
_CENSUS_TARGETS = {"- 50000.": 0, "50000+.": 1}


def adult(root: Path | str | None = None, unit_norm: bool = True) -> DataBundle:
    """Adult, sparse: the official training and test rows.

    The survey weight and the number of the education level, which the level says too, are left out.
    **Privacy.** Lists and bounds are those of `adult.names`; nothing is learned from the rows. One row a person.
    """
    return _census_bundle("adult", root, _ADULT_COLUMNS, _ADULT_RULES, _ADULT_TARGETS, unit_norm)


def census_income(root: Path | str | None = None, unit_norm: bool = True) -> DataBundle:
    """Census-Income (KDD), sparse: the official training and test rows.

    The survey weight is left out. Who was not asked ("Not in universe") has zeros there.
    **Privacy.** Lists and bounds are those of `census-income.names`; nothing is learned. A row a person.
    """
    return _census_bundle("census-income", root, _CENSUS_COLUMNS, _CENSUS_RULES, _CENSUS_TARGETS, unit_norm)


def _census_bundle(
    name: str,
    root: Path | str | None,
    header: Sequence[str],
    rules: Sequence[ColumnRule],
    targets: Mapping[str, int],
    unit_norm: bool,
) -> DataBundle:
    columns = [*(column for rule in rules for column in rule.columns), "income"]
    known = {"income": (targets.__contains__, " or ".join(targets))}
    source, sides, paths = SOURCES[name], [], []
    for file in source.forms["official"]:
        path = source.find(file.names, root)
        table = read_columns(path, columns, known, header=header, member=file.names[0])
        labels = torch.tensor([targets[value] for value in table["income"]])
        sides.append(Split(encode(table, rules, unit_norm), labels))
        paths.append(path)
    return DataBundle(
        name=name,
        variant="official" + (", unit norm" if unit_norm else ""),
        train=sides[0],
        test=sides[1],
        classes=CENSUS_CLASSES,
        fingerprint=fingerprint(paths, name, unit_norm),
        unit_norm=unit_norm,
    )


COMPAS_CLASSES = ("no new charge within two years", "a new charge within two years")

_COMPAS_RULES: tuple[ColumnRule, ...] = (
    Number("age", 0, 100),
    *(
        Number(column, 0, 40, logarithmic=True)
        for column in ("priors_count", "juv_fel_count", "juv_misd_count", "juv_other_count")
    ),
    Category("age_cat", ("Less than 25", "25 - 45", "Greater than 45")),
    Category("sex", ("Female", "Male")),
    Category("race", ("African-American", "Asian", "Caucasian", "Hispanic", "Native American", "Other")),
    Category("c_charge_degree", ("F", "M")),
    Hashed("c_charge_desc", 256),
)
"""No list of the charges' descriptions is published, so they are hashed."""
_COMPAS_KNOWN: Mapping[str, Known] = {
    "two_year_recid": ({"0", "1"}.__contains__, "0 or 1"),
    "id": (str.isdigit, "a whole number"),
}


def compas(root: Path | str | None = None, unit_norm: bool = True) -> DataBundle:
    """COMPAS, sparse, from `compas-scores-two-years.csv`: charges and record, without the scores themselves.

    A fifth of the people are the test set, by a public hash of the person's number.
    **Privacy.** Bounds and lists are fixed; nothing is learned from the rows. One row a person.
    """
    (path,) = SOURCES["compas"].require(root)
    columns = [*(column for rule in _COMPAS_RULES for column in rule.columns), *_COMPAS_KNOWN]
    table = read_columns(path, columns, _COMPAS_KNOWN)
    whole = Split(
        encode(table, _COMPAS_RULES, unit_norm),
        torch.tensor([int(value) for value in table["two_year_recid"]]),
    )
    train, test = parted(whole, [f"compas:{person}" for person in table["id"]])
    return DataBundle(
        name="compas",
        variant="official" + (", unit norm" if unit_norm else ""),
        train=train,
        test=test,
        classes=COMPAS_CLASSES,
        notes=("the test set is a fifth of the people",),
        fingerprint=fingerprint([path], "compas", unit_norm),
        unit_norm=unit_norm,
    )
