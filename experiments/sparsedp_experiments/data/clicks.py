"""Click logs in Criteo's layout: a label, 13 counts and 26 categories a line, all hashed into one table."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from sparsedp.errors import DataError
from sparsedp_experiments.data.bundle import DataBundle, Split
from sparsedp_experiments.data.cache import Arrays, cached_arrays
from sparsedp_experiments.data.features import Dense
from sparsedp_experiments.data.files import fingerprint
from sparsedp_experiments.data.images import TEST_FRACTION, public_share
from sparsedp_experiments.data.row import DatasetRow, PublicFiles, SourceFile

CLASSES = ("no click", "click")
COUNTS, CATEGORIES = 13, 26
BUCKETS = 2**18
MOST_ROWS = 1_000_000


def click_log(root: Path | str | None = None, buckets: int = BUCKETS, rows: int = MOST_ROWS) -> DataBundle:
    """The first `rows` lines of a log as 39 ids each, hashed to `buckets` rows of one table of embeddings.

    A count v is hashed as the whole part of log(v + 1)^2; a missing value as a value of its own. A fifth of the lines
    are the test set, by a public hash of their number.
    **Privacy.** Nothing is learned from the rows: no list of categories, no bounds. The unit is the line.
    """
    if buckets < 1 or rows < 2:
        raise DataError(f"click_log: got {buckets} buckets and {rows} rows, expected at least 1 and 2")
    path = _SOURCE.search.require(_SOURCE.forms["official"][0].candidates, root)
    key = fingerprint([path], "criteo", 1, buckets, rows)
    arrays = cached_arrays(key, ("ids", "labels"), lambda: read_log(path, buckets, rows))
    ids, labels = torch.from_numpy(arrays["ids"]), torch.from_numpy(arrays["labels"])
    test = torch.tensor([public_share(f"criteo:{line}") < TEST_FRACTION for line in range(len(ids))])
    whole = Split(Dense(ids), labels)
    return DataBundle(
        name="criteo",
        variant=f"{buckets} buckets, at most {rows} lines",
        train=whole.select((~test).nonzero().squeeze(1)),
        test=whole.select(test.nonzero().squeeze(1)),
        classes=CLASSES,
        notes=("the test set is a fifth of the lines",),
        fingerprint=key,
        vocabulary=buckets,
    )


def read_log(path: Path, buckets: int, rows: int) -> Arrays:
    """Hashed ids and labels of the first lines.

    Raises:
        DataError: a line has another number of fields, or no label of 0 or 1.
    """
    ids: list[list[int]] = []
    labels: list[int] = []
    for number, line in enumerate(islice(_lines(path), rows), start=1):
        label, *fields = line.rstrip("\n").split("\t")
        if len(fields) != COUNTS + CATEGORIES or label not in ("0", "1"):
            raise DataError(
                f"{path}, line {number}: got {len(fields)} fields and label {label[:20]!r}, expected "
                f"{COUNTS + CATEGORIES} fields after a label of 0 or 1, parted by tabs"
            )
        try:
            values = [*map(_bin, fields[:COUNTS]), *fields[COUNTS:]]
        except ValueError as error:
            raise DataError(f"{path}, line {number}: a count is no whole number ({error})") from error
        ids.append([hashed(place, value, buckets) for place, value in enumerate(values)])
        labels.append(int(label))
    if len(ids) < 2:
        raise DataError(f"{path}: got {len(ids)} lines, expected at least two")
    return {"ids": np.array(ids, dtype=np.int64), "labels": np.array(labels, dtype=np.int64)}


def hashed(field: int, value: str, buckets: int) -> int:
    """The row of a field's value, by CRC-32 of both."""
    return zlib.crc32(f"{field}={value}".encode()) % buckets


def _bin(count: str) -> str:
    if not count:
        return ""
    value = int(count)
    return str(int(math.log(value + 1) ** 2)) if value > 0 else str(value)


def _lines(path: Path) -> Iterator[str]:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as stream:
            yield from stream
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as text ({error}); it is damaged") from error


_SOURCE = PublicFiles(
    "criteo",
    "Criteo display advertising, or any click log of its layout",
    "45,840,617 lines",
    "clicked, per line",
    "Criteo (the Kaggle challenge of 2014; train.txt)",
    ("criteo",),
    {"official": (SourceFile(("train.txt", "train.txt.gz", "clicks.tsv", "clicks.tsv.gz")),)},
)

ROWS = (
    DatasetRow(
        name="criteo",
        title="click log in Criteo's layout, hashed",
        source=_SOURCE,
        loader=click_log,
        model="factorization",
    ),
)
