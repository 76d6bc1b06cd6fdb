"""The Large Movie Review data, from the official archive, hashed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch

from sparsedp.errors import DataError
from sparsedp_experiments.data.bundle import DataBundle, Split
from sparsedp_experiments.data.cache import Arrays, cached_arrays
from sparsedp_experiments.data.features import Features
from sparsedp_experiments.data.files import fingerprint, tar_files
from sparsedp_experiments.data.kept import Compute, with_features
from sparsedp_experiments.data.row import DatasetRow, PublicFiles, SourceFile
from sparsedp_experiments.data.text import BUCKETS, HashedTexts, bag_of_words, token_ids, without_markup
from sparsedp_experiments.models.pretrained import PRETRAINED
from sparsedp_experiments.models.word_vectors import WordVectors

CLASSES = ("negative", "positive")

_MEMBER = re.compile(r"(?:\./)?aclImdb/(train|test)/(neg|pos)/\d+_\d+\.txt")
_SIDES = ("train", "test")
_ARRAYS = tuple(f"{side}_{part}" for side in _SIDES for part in ("hashes", "starts", "labels"))


def imdb(root: Path | str | None = None, buckets: int = BUCKETS, weighting: str = "binary") -> DataBundle:
    """Reviews as hashed bags of words of unit length: which words occur ("binary"), or how often ("log")."""
    return _bundle(
        root,
        f"bag of words, {buckets} buckets, {weighting}",
        lambda texts: bag_of_words(texts, buckets, weighting),
    )


def imdb_tokens(root: Path | str | None = None, length: int = 256, vocabulary: int = BUCKETS) -> DataBundle:
    """Reviews as their first `length` tokens, hashed to ids 1..vocabulary-1; 0 is padding."""
    return _bundle(
        root,
        f"token ids, length {length}, vocabulary {vocabulary}",
        lambda texts: token_ids(texts, length, vocabulary),
        vocabulary,
    )


def imdb_vectors(root: Path | str | None = None) -> DataBundle:
    """Reviews as the mean of public word vectors (WordLlama's), of unit length."""
    weights, bundle = PRETRAINED["wordllama"], imdb(root)
    path = _SOURCE.search.require(_SOURCE.forms["official"][0].candidates, root)
    vectors, texts = WordVectors(), cache(lambda: read_texts(path)[0])

    def compute(_: Split, side: str) -> Compute:
        return lambda indices: vectors.means([without_markup(texts()[side][i]) for i in indices.tolist()])

    found = with_features(
        bundle,
        compute,
        (vectors.width,),
        np.float32,
        key=f"{bundle.fingerprint}|means of {weights.name} 1",
        title="Word vectors of IMDB",
    )
    return replace(
        found,
        variant=f"means of {weights.name} word vectors",
        notes=(*bundle.notes, str(weights)),
    )


def _bundle(
    root: Path | str | None,
    variant: str,
    featurize: Callable[[HashedTexts], Features],
    vocabulary: int | None = None,
) -> DataBundle:
    path = _SOURCE.search.require(_SOURCE.forms["official"][0].candidates, root)
    key = fingerprint([path], "imdb", 1)
    arrays = cached_arrays(key, _ARRAYS, lambda: read_archive(path))

    def part(side: str) -> Split:
        texts = HashedTexts(arrays[f"{side}_hashes"], arrays[f"{side}_starts"])
        return Split(featurize(texts), torch.from_numpy(arrays[f"{side}_labels"]))

    train, test = part("train"), part("test")
    named = f"{key}|{variant}"
    return DataBundle("imdb", variant, train, test, CLASSES, fingerprint=named, vocabulary=vocabulary)


def read_archive(path: Path) -> Arrays:
    """Hashed tokens and labels of both sides of the archive.

    Raises:
        DataError: as `read_texts`.
    """
    texts, labels = read_texts(path)
    arrays: Arrays = {}
    for side in _SIDES:
        hashed = HashedTexts.of(texts[side])
        arrays[f"{side}_hashes"], arrays[f"{side}_starts"] = hashed.hashes, hashed.starts
        arrays[f"{side}_labels"] = np.array(labels[side], dtype=np.int64)
    return arrays


def read_texts(path: Path) -> tuple[dict[str, list[str]], dict[str, list[int]]]:
    """Texts and labels of both sides of the archive, read in a stream.

    Raises:
        DataError: the archive is damaged, a review is not UTF-8, or one side has no reviews of one label.
    """
    texts: dict[str, list[str]] = {side: [] for side in _SIDES}
    labels: dict[str, list[int]] = {side: [] for side in _SIDES}
    for name, content in tar_files(path):
        match = _MEMBER.fullmatch(name)
        if match is None:
            continue
        try:
            texts[match[1]].append(content.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: review {name} is not UTF-8 ({error})") from error
        labels[match[1]].append(int(match[2] == "pos"))
    for side in _SIDES:
        if len(set(labels[side])) < 2:
            raise DataError(
                f"{path}: expected reviews under aclImdb/{side}/pos and aclImdb/{side}/neg, got {len(labels[side])}"
            )
    return texts, labels


_SOURCE = PublicFiles(
    "imdb",
    "Large Movie Review data",
    "25,000 + 25,000 reviews",
    "positive or negative",
    "Stanford (Maas et al. 2011)",
    ("imdb",),
    {
        "official": (
            SourceFile(
                ("aclImdb_v1.tar.gz",),
                ("c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe",),
                "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
            ),
        )
    },
)

ROWS = (
    DatasetRow(
        name="imdb",
        title="movie reviews, hashed bag of words",
        source=_SOURCE,
        loader=imdb,
        model="bag-of-words",
        recipes={"bag-of-words": {"epochs": 10, "batch_size": 1024, "lr": 8.0, "clip_norm": 0.5}},
    ),
    DatasetRow(
        name="imdb-vectors",
        title="movie reviews, means of public word vectors",
        source=_SOURCE,
        loader=imdb_vectors,
        model="logistic",
    ),
    DatasetRow(
        name="imdb-tokens",
        title="movie reviews, hashed token ids",
        source=_SOURCE,
        loader=imdb_tokens,
        model="embedding-bag",
    ),
    *(
        DatasetRow(
            name=f"imdb-words-{bits}",
            title=f"movie reviews, words hashed to 2^{bits} rows",
            source=_SOURCE,
            loader=imdb_tokens,
            chosen={"vocabulary": 2**bits},
            model="embedding-bag",
        )
        for bits in (15, 18)
    ),
)
