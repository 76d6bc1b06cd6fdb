"""ProPublica's COMPAS table: is somebody charged with a crime again within two years?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from sparsedp_experiments.data.bundle import DataBundle, Split
from sparsedp_experiments.data.delimited import Known, read_columns
from sparsedp_experiments.data.encoding import Category, ColumnRule, Hashed, Number, encode
from sparsedp_experiments.data.files import fingerprint
from sparsedp_experiments.data.images import TEST_FRACTION, public_share
from sparsedp_experiments.data.row import DatasetRow, PublicFiles, SourceFile

CLASSES = ("no new charge within two years", "a new charge within two years")

_RULES: tuple[ColumnRule, ...] = (
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
_KNOWN: Mapping[str, Known] = MappingProxyType(
    {"two_year_recid": ({"0", "1"}.__contains__, "0 or 1"), "id": (str.isdigit, "a whole number")}
)


def compas(root: Path | str | None = None, unit_norm: bool = True) -> DataBundle:
    """COMPAS, sparse, from `compas-scores-two-years.csv`: charges and record, without the scores themselves.

    A fifth of the people are the test set, by a public hash of the person's number.
    **Privacy.** Bounds and lists are fixed; nothing is learned from the rows. One row a person.
    """
    path = _SOURCE.search.require(_SOURCE.forms["official"][0].candidates, root)
    columns = [*(column for rule in _RULES for column in rule.columns), *_KNOWN]
    table = read_columns(path, columns, known=_KNOWN)
    whole = Split(
        encode(table, _RULES, unit_norm), torch.tensor([int(value) for value in table["two_year_recid"]])
    )
    test = torch.tensor([public_share(f"compas:{person}") < TEST_FRACTION for person in table["id"]])
    return DataBundle(
        name="compas",
        variant="official" + (", unit norm" if unit_norm else ""),
        train=whole.select((~test).nonzero().squeeze(1)),
        test=whole.select(test.nonzero().squeeze(1)),
        classes=CLASSES,
        notes=("the test set is a fifth of the people",),
        fingerprint=fingerprint([path], "compas", unit_norm),
        unit_norm=unit_norm,
    )


_SOURCE = PublicFiles(
    "compas",
    "COMPAS: defendants in Broward County, 2013 and 2014",
    "7,214 people",
    "charged again within two years, per row",
    "ProPublica's repository compas-analysis (Larson et al. 2016)",
    ("compas",),
    {
        "official": (
            SourceFile(
                ("compas-scores-two-years.csv",),
                ("c451db85908b2f7fef1d83203bedf6b71ecda0d5af468d82ae62178f91d0cc7d",),
            ),
        )
    },
)
ROWS = (
    DatasetRow(
        name="compas",
        title="COMPAS, charged again within two years",
        source=_SOURCE,
        loader=compas,
        model="logistic",
    ),
)
