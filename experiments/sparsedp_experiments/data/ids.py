"""Data sets of ids for tables of embeddings: MovieLens, click logs in Criteo's layout, made-up texts."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch

from sparsedp.errors import DataError
from sparsedp.randomness import PublicRandomness
from sparsedp_experiments.data.bundle import DataBundle, Dense, Split
from sparsedp_experiments.data.files import Arrays, FileTree, cached_arrays, fingerprint, open_tree
from sparsedp_experiments.data.own_files import TEST_FRACTION, public_share
from sparsedp_experiments.data.spec import DatasetRow, PublicFiles, SourceFile

RATING_CLASSES = ("rated 1 to 3", "rated 4 or 5")
LIKED = 4

AGES = (18, 25, 35, 45, 50, 56)
"""Lower ends of the age groups above the first, as in the 1M set's description."""
OCCUPATIONS = (
    "administrator", "artist", "doctor", "educator", "engineer", "entertainment", "executive", "healthcare",
    "homemaker", "lawyer", "librarian", "marketing", "none", "other", "programmer", "retired", "salesman",
    "scientist", "student", "technician", "writer",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RatingsFormat:
    """How one of the sets is written: its files, what parts a line, where in a user's line age and gender stand."""

    title: str
    records: str
    films: int
    ratings: str
    users: str
    separator: str
    age: int
    gender: int
    occupation: Callable[[str], int]


_LAYOUTS: Mapping[str, RatingsFormat] = MappingProxyType(
    {
        "100k": RatingsFormat(
            "MovieLens 100K",
            "100,000 ratings of 943 users",
            1682,
            "u.data",
            "u.user",
            "|",
            1,
            2,
            OCCUPATIONS.index,
        ),
        "1m": RatingsFormat(
            "MovieLens 1M",
            "1,000,209 ratings of 6,040 users",
            3952,
            "ratings.dat",
            "users.dat",
            "::",
            2,
            1,
            int,
        ),
    }
)
FIELDS = ("film", "age group", "gender", "occupation", "first digit of the zip code")


def field_sizes(size: str) -> tuple[int, ...]:
    """How many values each field of a row can have: public, from the sets' descriptions."""
    return (_LAYOUTS[size].films, len(AGES) + 1, 2, len(OCCUPATIONS), 11)


def movielens(root: Path | str | None = None, size: str = "100k") -> DataBundle:
    """Ratings as ids of the film and of the user's group: age, gender, occupation, region. Target: rated 4 or 5.

    All fields share one table of embeddings, each with rows of its own. A fifth of the users are the test set, by a
    public hash of the user's number. A user's other ratings are no input, so privacy per rating means what it says.
    **Privacy.** The unit is the user, who has up to a few thousand ratings; `unit="row"` protects single ratings.
    """
    if size not in _LAYOUTS:
        raise DataError(f"movielens: got size {size!r}, expected one of {', '.join(_LAYOUTS)}")
    source = RATING_SOURCES[size]
    (path,) = source.require(root)
    with open_tree(path) as tree:
        users = _read_users(tree, _LAYOUTS[size])
        records = _read_ratings(tree, _LAYOUTS[size], users)
    numbers = torch.tensor([record[0] for record in records])
    starts = torch.tensor([0, *field_sizes(size)[:-1]]).cumsum(0)
    ids = torch.tensor([(film - 1, *users[user]) for user, film, _ in records]) + starts
    whole = Split(Dense(ids), torch.tensor([int(rating >= LIKED) for *_, rating in records]), numbers)
    held = {user for user in users if public_share(f"movielens-{size}:{user}") < TEST_FRACTION}
    test = torch.tensor([user in held for user in numbers.tolist()])
    return DataBundle(
        name=f"movielens-{size}",
        variant="official",
        train=whole.select((~test).nonzero().squeeze(1)),
        test=whole.select(test.nonzero().squeeze(1)),
        classes=RATING_CLASSES,
        unit="user",
        notes=("the test set is a fifth of the users",),
        fingerprint=fingerprint([path], "movielens", size),
        vocabulary=sum(field_sizes(size)),
        ranked=True,
    )


def _read_users(tree: FileTree, layout: RatingsFormat) -> dict[int, tuple[int, int, int, int]]:
    """Age group, gender, occupation and region of every user."""
    found = {}
    for line, parts in _rating_lines(tree, layout.users, layout.separator, 5):
        try:
            age = sum(int(parts[layout.age]) >= low for low in AGES)
            zip_code = parts[4][:1]
            region = int(zip_code) if zip_code.isdigit() else 10
            gender, occupation = "FM".index(parts[layout.gender]), layout.occupation(parts[3])
            if not 0 <= occupation < len(OCCUPATIONS):
                raise ValueError(f"occupation {parts[3]!r}")
            found[int(parts[0])] = (age, gender, occupation, region)
        except ValueError as error:
            raise DataError(
                f"{tree.origin}: {layout.users}, line {line}: no user's line ({error})"
            ) from error
    return found


def _read_ratings(
    tree: FileTree, layout: RatingsFormat, users: Mapping[int, Sequence[int]]
) -> list[tuple[int, int, int]]:
    """User, film and rating, in the order of the file."""
    separator = "\t" if layout.separator == "|" else layout.separator
    found = []
    for line, parts in _rating_lines(tree, layout.ratings, separator, 4):
        try:
            user, film, rating = (int(part) for part in parts[:3])
        except ValueError as error:
            raise DataError(f"{tree.origin}: {layout.ratings}, line {line}: no rating ({error})") from error
        if user not in users or not 1 <= film <= layout.films or not 1 <= rating <= 5:
            raise DataError(
                f"{tree.origin}: {layout.ratings}, line {line}: got user {user}, film {film}, rating {rating}; "
                f"expected a user of {layout.users}, a film up to {layout.films} and a rating of 1 to 5"
            )
        found.append((user, film, rating))
    if not found:
        raise DataError(f"{tree.origin}: {layout.ratings} holds no ratings")
    return found


def _rating_lines(tree: FileTree, name: str, separator: str, parts: int) -> list[tuple[int, list[str]]]:
    member = next((m for m in tree.names if m == name or m.endswith(f"/{name}")), None)
    if member is None:
        raise DataError(f"{tree.origin}: no {name} in it; expected the official archive or its folder")
    lines = tree.read(member).decode("latin-1").splitlines()
    found = [(number, line.split(separator)) for number, line in enumerate(lines, start=1) if line]
    short = next((number for number, line in found if len(line) != parts), None)
    if short is not None:
        raise DataError(f"{tree.origin}: {name}, line {short}: expected {parts} parts between {separator!r}")
    return found


def _source(size: str, layout: RatingsFormat) -> PublicFiles:
    name = f"ml-{size}"
    file = SourceFile((name, f"{name}.zip"))
    return PublicFiles(
        f"movielens-{size}",
        layout.title,
        layout.records,
        "rated 4 or 5, per user",
        "GroupLens (Harper and Konstan 2015); its terms forbid passing it on",
        ("movielens",),
        {"official": (file,)},
    )


RATING_SOURCES: Mapping[str, PublicFiles] = MappingProxyType(
    {size: _source(size, layout) for size, layout in _LAYOUTS.items()}
)

RATING_ROWS = tuple(
    DatasetRow(
        name=f"movielens-{size}",
        title=f"{layout.title}, is a film liked, by user",
        source=RATING_SOURCES[size],
        loader=movielens,
        chosen={"size": size},
        model="factorization",
    )
    for size, layout in _LAYOUTS.items()
)


CLICK_CLASSES = ("no click", "click")
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
    (path,) = _SOURCE.require(root)
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
        classes=CLICK_CLASSES,
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

CLICK_ROWS = (
    DatasetRow(
        name="criteo",
        title="click log in Criteo's layout, hashed",
        source=_SOURCE,
        loader=click_log,
        model="factorization",
    ),
)


_SEED = 20_250_101


def zipf_texts(
    root: Path | str | None = None, records: int = 20_000, length: int = 32, vocabulary: int = 2**16
) -> DataBundle:
    """Texts of `length` words; the word of rank r comes with a chance of about 1/r and has its own public mood.

    A text is more likely of the high class the better the mood of its words, which is zero over all texts. The same
    texts every time; `root` is not used, as nothing is read.
    """
    if records < 10 or length < 1 or vocabulary < 3:
        raise DataError(
            f"zipf: got {records} records of {length} words of {vocabulary}, expected at least 10, 1 and 3"
        )
    public = PublicRandomness(_SEED)
    ranks = (vocabulary - 1) ** _uniform(public, records * length, 0).reshape(records, length)
    ids = np.minimum(ranks.astype(np.int64), vocabulary - 1)
    moods = public.normal(vocabulary, (1,)).numpy()
    moods[1:] -= np.average(moods[1:], weights=1 / np.arange(1, vocabulary))
    score = 3 * moods[ids].sum(1) / np.sqrt(length)
    labels = (_uniform(public, records, 2) < 1 / (1 + np.exp(-score))).astype(np.int64)
    whole = Split(Dense(torch.from_numpy(ids)), torch.from_numpy(labels))
    cut = records - records // 5
    return DataBundle(
        name="zipf",
        variant=f"{records} texts of {length} words of {vocabulary}",
        train=whole.select(torch.arange(cut)),
        test=whole.select(torch.arange(cut, records)),
        classes=("low", "high"),
        notes=("made-up data",),
        vocabulary=vocabulary,
    )


def _uniform(public: PublicRandomness, size: int, key: int) -> npt.NDArray[np.float64]:
    """Numbers between 0 and 1: where normal ones stand in their distribution."""
    found: npt.NDArray[np.float64] = torch.special.ndtr(public.normal(size, (key,))).numpy()
    return found


ZIPF_ROWS = (
    DatasetRow(
        name="zipf",
        title="made-up texts whose words follow Zipf's law",
        source=None,
        loader=zipf_texts,
        model="embedding-bag",
    ),
)
