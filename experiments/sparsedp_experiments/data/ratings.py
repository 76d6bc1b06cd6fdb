"""MovieLens 100K in its official layout: does a user like a film? Held-out users; the unit is the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


FILMS, RATINGS, USERS = 1682, "u.data", "u.user"
FIELD_SIZES = (FILMS, len(AGES) + 1, 2, len(OCCUPATIONS), 11)
"""How many values each field of a row can have: film, age group, gender, occupation, first digit of the zip code."""


def movielens(root: Path | str | None = None) -> DataBundle:
    """Ratings as ids of the film and of the user's group: age, gender, occupation, region. Target: rated 4 or 5.

    All fields share one table of embeddings, each with rows of its own. A fifth of the users are the test set, by a
    public hash of the user's number. A user's other ratings are no input, so privacy per rating means what it says.
    **Privacy.** The unit is the user, who has up to a few thousand ratings; `unit="row"` protects single ratings.
    """
    (path,) = SOURCES["movielens-100k"].require(root)
    with open_tree(path) as tree:
        users = _read_users(tree)
        records = _read_ratings(tree, users)
    numbers = torch.tensor([record[0] for record in records])
    starts = torch.tensor([0, *FIELD_SIZES[:-1]]).cumsum(0)
    ids = torch.tensor([(film - 1, *users[user]) for user, film, _ in records]) + starts
    whole = Split(Dense(ids), torch.tensor([int(rating >= LIKED) for *_, rating in records]), numbers)
    train, test = parted(whole, [f"movielens-100k:{user}" for user in numbers.tolist()])
    return DataBundle(
        name="movielens-100k",
        variant="official",
        train=train,
        test=test,
        classes=RATING_CLASSES,
        unit="user",
        notes=("the test set is a fifth of the users",),
        fingerprint=fingerprint([path], "movielens", "100k"),
        vocabulary=sum(FIELD_SIZES),
        ranked=True,
    )


def _read_users(tree: FileTree) -> dict[int, tuple[int, int, int, int]]:
    """Age group, gender, occupation and region of every user."""
    found = {}
    for line, (user, age, gender, occupation, zip_code) in _rating_lines(tree, USERS, "|", 5):
        try:
            group, region = sum(int(age) >= low for low in AGES), zip_code[:1]
            found[int(user)] = (
                group, "FM".index(gender), OCCUPATIONS.index(occupation), int(region) if region.isdigit() else 10,
            )  # fmt: skip
        except ValueError as error:
            raise DataError(f"{tree.origin}: {USERS}, line {line}: no user's line ({error})") from error
    return found


def _read_ratings(tree: FileTree, users: Mapping[int, Sequence[int]]) -> list[tuple[int, int, int]]:
    """User, film and rating, in the order of the file."""
    found = []
    for line, parts in _rating_lines(tree, RATINGS, "\t", 4):
        try:
            user, film, rating = (int(part) for part in parts[:3])
        except ValueError as error:
            raise DataError(f"{tree.origin}: {RATINGS}, line {line}: no rating ({error})") from error
        if user not in users or not 1 <= film <= FILMS or not 1 <= rating <= 5:
            raise DataError(
                f"{tree.origin}: {RATINGS}, line {line}: got user {user}, film {film}, rating {rating}; expected a "
                f"user of {USERS}, a film up to {FILMS} and a rating of 1 to 5"
            )
        found.append((user, film, rating))
    if not found:
        raise DataError(f"{tree.origin}: {RATINGS} holds no ratings")
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
