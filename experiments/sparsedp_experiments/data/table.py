"""The data sets by name. A row stands in its loader's file; a new data set is such a file and its name here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sparsedp.errors import DataError
from sparsedp_experiments.data import (
    census,
    cifar,
    clicks,
    compas,
    hospital,
    house_numbers,
    idx,
    ratings,
    retinopathy,
    reviews,
    sklearn_digits,
    zipf,
)
from sparsedp_experiments.data.bundle import DataBundle
from sparsedp_experiments.data.row import DatasetRow, PublicFiles

_ROWS: tuple[DatasetRow, ...] = (
    *sklearn_digits.ROWS,
    *idx.ROWS,
    *cifar.ROWS,
    *house_numbers.ROWS,
    *retinopathy.ROWS,
    *hospital.ROWS,
    *census.ROWS,
    *compas.ROWS,
    *reviews.ROWS,
    *ratings.ROWS,
    *clicks.ROWS,
    *zipf.ROWS,
)

DATASETS: Mapping[str, DatasetRow] = MappingProxyType({row.name: row for row in _ROWS})
SOURCES: Mapping[str, PublicFiles] = MappingProxyType(
    {row.source.name: row.source for row in _ROWS if row.source is not None}
)


def load(name: str, root: Path | str | None = None, **options: Any) -> DataBundle:
    """A data set by its name in `DATASETS`, with the options of its loader.

    Looked for in `root` if given, else in SPARSEDP_DATA and then in the per-user cache.
    """
    row = DATASETS.get(name.replace("_", "-"))
    if row is None:
        raise DataError(f"no data set named {name!r}; there are {', '.join(DATASETS)}")
    return row.load(root, **options)


def source(name: str) -> PublicFiles:
    """The public files of that name."""
    if name not in SOURCES:
        raise DataError(f"no data set named {name!r}; there are {', '.join(SOURCES)}")
    return SOURCES[name]
