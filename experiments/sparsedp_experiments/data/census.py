"""Two census tables from the UCI repository: does a person earn more than 50,000 dollars a year?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from sparsedp_experiments.data.bundle import DataBundle, Split
from sparsedp_experiments.data.census_lists import ADULT, CENSUS_INCOME, COUNTRIES
from sparsedp_experiments.data.delimited import read_columns
from sparsedp_experiments.data.encoding import Category, ColumnRule, Number, encode
from sparsedp_experiments.data.files import fingerprint
from sparsedp_experiments.data.row import DatasetRow, PublicFiles, SourceFile

CLASSES = ("at most 50,000 dollars", "more than 50,000 dollars")

_ADULT_COLUMNS = (
    "age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship",
    "race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country", "income",
)  # fmt: skip
_ADULT_RULES: tuple[ColumnRule, ...] = (
    Number("age", 0, 90),
    Number("hours-per-week", 0, 99),
    Number("capital-gain", 0, 100_000, logarithmic=True),
    Number("capital-loss", 0, 5_000, logarithmic=True),
    *(Category(column, levels) for column, levels in ADULT.items()),
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
        for column, levels in CENSUS_INCOME.items()
    ),
    *(Category(f"country of birth {whose}", COUNTRIES) for whose in ("self", "father", "mother")),
)
_CENSUS_TARGETS = {"- 50000.": 0, "50000+.": 1}


def adult(root: Path | str | None = None, unit_norm: bool = True) -> DataBundle:
    """Adult, sparse: the official training and test rows.

    The survey weight and the number of the education level, which the level says too, are left out.
    **Privacy.** Lists and bounds are those of `adult.names`; nothing is learned from the rows. One row a person.
    """
    return _bundle(_ADULT, root, _ADULT_COLUMNS, _ADULT_RULES, _ADULT_TARGETS, unit_norm)


def census_income(root: Path | str | None = None, unit_norm: bool = True) -> DataBundle:
    """Census-Income (KDD), sparse: the official training and test rows.

    The survey weight is left out. Who was not asked ("Not in universe") has zeros there.
    **Privacy.** Lists and bounds are those of `census-income.names`; nothing is learned. A row a person.
    """
    return _bundle(_CENSUS, root, _CENSUS_COLUMNS, _CENSUS_RULES, _CENSUS_TARGETS, unit_norm)


def _bundle(
    source: PublicFiles,
    root: Path | str | None,
    header: Sequence[str],
    rules: Sequence[ColumnRule],
    targets: Mapping[str, int],
    unit_norm: bool,
) -> DataBundle:
    columns = [*(column for rule in rules for column in rule.columns), "income"]
    known = {"income": (targets.__contains__, " or ".join(targets))}
    sides, paths = [], []
    for file in source.forms["official"]:
        path = source.search.require(file.candidates, root)
        table = read_columns(path, columns, header=header, member=file.candidates[0], known=known)
        labels = torch.tensor([targets[value] for value in table["income"]])
        sides.append(Split(encode(table, rules, unit_norm), labels))
        paths.append(path)
    return DataBundle(
        name=source.name,
        variant="official" + (", unit norm" if unit_norm else ""),
        train=sides[0],
        test=sides[1],
        classes=CLASSES,
        fingerprint=fingerprint(paths, source.name, unit_norm),
        unit_norm=unit_norm,
    )


def _file(name: str, sha256: str, archive: str) -> SourceFile:
    return SourceFile((name, f"{name}.gz", archive), (sha256,))


_ADULT = PublicFiles(
    "adult",
    "Adult: the US census of 1994",
    "48,842 people",
    "earns more than 50,000 dollars, per row",
    "the UCI repository, data set 2 (Kohavi and Becker 1996)",
    ("adult",),
    {
        "official": (
            _file(
                "adult.data", "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d", "adult.zip"
            ),
            _file(
                "adult.test", "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05", "adult.zip"
            ),
        )
    },
)
_CENSUS = PublicFiles(
    "census-income",
    "Census-Income (KDD): the US population surveys of 1994 and 1995",
    "299,285 people",
    "earns more than 50,000 dollars, per row",
    "the UCI repository, data set 117",
    ("census-income",),
    {
        "official": (
            _file(
                "census-income.data",
                "3676a81db7d3528f3f8b9f3c699d0f0aa28db45e6e994fa0b8ed38327539ee86",
                "census-income.zip",
            ),
            _file(
                "census-income.test",
                "98402b1ab879573d0a7f38a699a40258080e25e33d3401e7bf9c96d3fa0fab8c",
                "census-income.zip",
            ),
        )
    },
)

ROWS = (
    DatasetRow(
        name="adult",
        title="Adult, earns more than 50,000 dollars",
        source=_ADULT,
        loader=adult,
        model="logistic",
    ),
    DatasetRow(
        name="census-income",
        title="Census-Income (KDD), earns more than 50,000 dollars",
        source=_CENSUS,
        loader=census_income,
        model="logistic",
    ),
)
