"""MovieLens, 100K and 1M, in its official layouts: does a user like a film? Held-out users; the unit is the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sparsedp.errors import DataError
from sparsedp_experiments.data.bundle import DataBundle, Dense, Split
from sparsedp_experiments.data.files import FileTree, fingerprint, open_tree, parted
from sparsedp_experiments.data.spec import SOURCES

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

    films: int
    ratings: str
    users: str
    separator: str
    age: int
    gender: int
    occupation: Callable[[str], int]


_LAYOUTS: Mapping[str, RatingsFormat] = {
    "100k": RatingsFormat(1682, "u.data", "u.user", "|", 1, 2, OCCUPATIONS.index),
    "1m": RatingsFormat(3952, "ratings.dat", "users.dat", "::", 2, 1, int),
}
"""Fields of a row: film, age group, gender, occupation, first digit of the zip code."""


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
    (path,) = SOURCES[f"movielens-{size}"].require(root)
    with open_tree(path) as tree:
        users = _read_users(tree, _LAYOUTS[size])
        records = _read_ratings(tree, _LAYOUTS[size], users)
    numbers = torch.tensor([record[0] for record in records])
    starts = torch.tensor([0, *field_sizes(size)[:-1]]).cumsum(0)
    ids = torch.tensor([(film - 1, *users[user]) for user, film, _ in records]) + starts
    whole = Split(Dense(ids), torch.tensor([int(rating >= LIKED) for *_, rating in records]), numbers)
    train, test = parted(whole, [f"movielens-{size}:{user}" for user in numbers.tolist()])
    return DataBundle(
        name=f"movielens-{size}",
        variant="official",
        train=train,
        test=test,
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
