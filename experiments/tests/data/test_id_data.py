"""Data sets of ids: ratings in MovieLens' layouts, click logs in Criteo's, made-up texts; and what ranks them."""

from __future__ import annotations

import math
import zipfile

import numpy as np
import pytest
import torch

from sparsedp.errors import DataError
from sparsedp_experiments.data import load
from sparsedp_experiments.data.ratings import field_sizes
from sparsedp_experiments.runs.execute import execute, recall_at
from sparsedp_experiments.runs.settings import Settings

USERS = 40


def hundred_k() -> dict[str, str]:
    generator = np.random.default_rng(0)
    users = [
        f"{u}|{7 + u}|{'MF'[u % 2]}|{('writer', 'student', 'none')[u % 3]}|{'T8H1N' if u == 3 else 94043}"
        for u in range(1, USERS + 1)
    ]
    ratings = [
        f"{u}\t{film}\t{1 + int(generator.integers(5))}\t88125{u}"
        for u in range(1, USERS + 1)
        for film in generator.choice(np.arange(1, 1683), 6, replace=False)
    ]
    return {"u.data": "\n".join(ratings) + "\n", "u.user": "\n".join(users) + "\n"}


def one_m() -> dict[str, str]:
    users = [f"{u}::{'MF'[u % 2]}::{(1, 18, 56)[u % 3]}::{u % 21}::02139" for u in range(1, USERS + 1)]
    ratings = [
        f"{u}::{film}::{1 + (u + film) % 5}::97830{u}" for u in range(1, USERS + 1) for film in (1, 3952, u)
    ]
    return {"ratings.dat": "\n".join(ratings), "users.dat": "\n".join(users)}


def write(root, name, files, packed):
    if packed:
        with zipfile.ZipFile(root / f"{name}.zip", "w") as archive:
            for member, text in files.items():
                archive.writestr(f"{name}/{member}", text)
    else:
        (root / name).mkdir()
        for member, text in files.items():
            (root / name / member).write_text(text)


@pytest.mark.parametrize("packed", [False, True], ids=["folder", "zip"])
@pytest.mark.parametrize(("size", "files"), [("100k", hundred_k()), ("1m", one_m())], ids=["100k", "1m"])
def test_ratings_become_ids_of_disjoint_fields_and_users_stay_on_one_side(tmp_path, size, files, packed):
    write(tmp_path, f"ml-{size}", files, packed)
    bundle = load(f"movielens-{size}", tmp_path)
    sizes = field_sizes(size)
    starts = np.cumsum([0, *sizes[:-1]])
    ids = torch.cat([bundle.train.inputs, bundle.test.inputs]).numpy()
    assert bundle.vocabulary == sum(sizes)
    for field, (start, count) in enumerate(zip(starts, sizes, strict=True)):
        assert ids[:, field].min() >= start
        assert ids[:, field].max() < start + count
    assert bundle.unit == "user"
    assert bundle.train.unit_count + bundle.test.unit_count == USERS
    assert len(ids) == len(next(iter(files.values())).splitlines())


def test_a_rating_is_read_field_by_field(tmp_path):
    files = hundred_k()
    write(tmp_path, "ml-100k", files, packed=False)
    bundle = load("movielens-100k", tmp_path)
    for side in (bundle.train, bundle.test):
        lines = [
            line
            for line in map(str.split, files["u.data"].splitlines())
            if int(line[0]) in side.units.tolist()
        ]
        for (user, film, rating, _), ids, target in zip(
            lines, side.inputs.tolist(), side.targets.tolist(), strict=True
        ):
            age, u = 7 + int(user), int(user)
            group = sum(age >= low for low in (18, 25, 35, 45, 50, 56))
            occupation = (20, 18, 12)[u % 3]
            region = 10 if u == 3 else 9
            assert ids == [
                int(film) - 1,
                1682 + group,
                1689 + "FM".index("MF"[u % 2]),
                1691 + occupation,
                1712 + region,
            ]
            assert target == (int(rating) >= 4)


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("u.data", "1\t2000\t3\t0\n", "film 2000"),
        ("u.data", "99\t20\t3\t0\n", "user 99"),
        ("u.data", "1\t20\n", "line 1: expected 4 parts"),
        ("u.data", "", "no ratings"),
        ("u.user", "1|x|M|writer|1\n", "line 1"),
        ("u.user", "1|30|M|wizard|1\n", "line 1"),
    ],
)
def test_damaged_ratings_are_refused_by_line(tmp_path, file, text, complaint):
    write(tmp_path, "ml-100k", hundred_k() | {file: text}, packed=False)
    with pytest.raises(DataError, match=complaint):
        load("movielens-100k", tmp_path)


def test_made_up_words_follow_zipfs_law_and_tell_the_class():
    bundle = load("zipf", records=4000, vocabulary=1000)
    counts = torch.bincount(bundle.train.inputs.reshape(-1), minlength=1000).double()
    assert counts[0] == 0  # padding
    assert counts[1] / counts[10:20].mean() > 5
    assert float(counts[100:].sum() / counts.sum()) == pytest.approx(
        math.log(999 / 100) / math.log(999), abs=0.03
    )
    assert 0.3 < float(bundle.train.targets.double().mean()) < 0.7


def test_recall_counts_hits_among_each_users_best():
    scores = torch.tensor([3.0, 2.0, 1.0, 5.0, 4.0, 0.0, 9.0])
    liked = torch.tensor([True, False, True, False, True, True, False])
    units = torch.tensor([7, 7, 7, 2, 2, 2, 5])
    assert recall_at(1, scores, liked, units) == pytest.approx((1 + 0) / 2)
    assert recall_at(2, scores, liked, units) == pytest.approx((1 / 2 + 1 / 2) / 2)
    assert recall_at(3, scores, liked, units) == 1.0


@pytest.mark.filterwarnings("ignore:the data set knows which unit")  # per rating is asked for
@pytest.mark.parametrize("unit", [None, "row"])
def test_a_recommender_trains_per_user_and_per_rating(tmp_path, monkeypatch, unit):
    write(tmp_path, "ml-100k", hundred_k(), packed=False)
    monkeypatch.setenv("SPARSEDP_DATA", str(tmp_path))
    settings = Settings(
        dataset="movielens-100k", method="dp-sgd", epsilon=3.0, delta=1e-3, epochs=1, batch_size=16, lr=0.1,
        accountant="rdp", seed=0, unit=unit,
    )  # fmt: skip
    result = execute(settings)
    assert result.unit == ("user" if unit is None else "row")
    assert 0 <= result.metrics["recall_at_10"] <= 1
    assert result.d == sum(field_sizes("100k")) * 17 + 3
