"""MovieLens 100K in its official layout: does a user like a film? Held-out users; the unit is the user."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pandas as pd
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
FILMS = 1682
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
        users = _read(tree, "u.user", "|", ["user", "age", "gender", "occupation", "zip"]).set_index("user")
        ratings = _read(tree, "u.data", "\t", ["user", "film", "rating", "time"])
    try:
        fields = _fields(ratings, users.loc[ratings["user"]])
    except (KeyError, ValueError) as error:
        raise DataError(f"{path}: not the ratings of MovieLens 100K ({error})") from error
    starts = np.cumsum([0, *FIELD_SIZES[:-1]])
    numbers = torch.tensor(ratings["user"].to_numpy())
    targets = torch.from_numpy((ratings["rating"] >= LIKED).to_numpy().astype(np.int64))
    whole = Split(Dense(torch.from_numpy(fields + starts)), targets, numbers)
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


def _read(tree: FileTree, name: str, separator: str, columns: list[str]) -> pd.DataFrame:
    member = next((m for m in tree.names if m == name or m.endswith(f"/{name}")), None)
    if member is None:
        raise DataError(f"{tree.origin}: no {name} in it; expected the official archive or its folder")
    try:
        return pd.read_csv(
            io.BytesIO(tree.read(member)),
            sep=separator,
            names=columns,
            encoding="latin-1",
            dtype={"zip": str},
        )
    except ValueError as error:
        raise DataError(f"{tree.origin}: {name} cannot be read as a table ({error})") from error


def _fields(ratings: pd.DataFrame, who: pd.DataFrame) -> np.ndarray:
    """Film, age group, gender, occupation and region of each rating, each counted from 0."""
    if ratings.empty or not (ratings["film"].between(1, FILMS) & ratings["rating"].between(1, 5)).all():
        raise ValueError(f"expected films up to {FILMS} and ratings of 1 to 5")
    region = who["zip"].str[0]
    fields = [
        ratings["film"] - 1,
        np.searchsorted(AGES, who["age"], side="right"),
        pd.Categorical(who["gender"], ("F", "M")).codes,
        pd.Categorical(who["occupation"], OCCUPATIONS).codes,
        region.where(region.str.isdigit(), "10").astype(int),
    ]
    found = np.stack([np.asarray(field, dtype=np.int64) for field in fields], axis=1)
    if (found < 0).any():
        raise ValueError("expected a gender F or M, and an occupation of the list")
    return found
