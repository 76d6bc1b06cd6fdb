"""Text into numbers by a fixed rule and a fixed hash (no vocabulary is learned), movie reviews, and made-up texts."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from scipy import sparse

from sparsedp.errors import DataError
from sparsedp.randomness import PublicRandomness
from sparsedp_experiments.data.bundle import DataBundle, Dense, Features, Sparse, Split
from sparsedp_experiments.data.features import Compute, with_features
from sparsedp_experiments.data.files import Arrays, cached_arrays, fingerprint, tar_files
from sparsedp_experiments.data.spec import SOURCES
from sparsedp_experiments.models.ids import PADDING
from sparsedp_experiments.models.ids import VOCABULARY as BUCKETS
from sparsedp_experiments.models.pretrained import WORDLLAMA, WordVectors

_MARKUP = re.compile(r"<[^<>]{1,20}>")
_WORD = re.compile(r"[a-z0-9]+(?:'[a-z]+)?")

Hashes = npt.NDArray[np.uint32]


def without_markup(text: str) -> str:
    """The text with a space for each tag."""
    return _MARKUP.sub(" ", text)


def tokens(text: str) -> list[str]:
    """Lower-case words and numbers, with a contraction's tail ("don't"), without markup."""
    return _WORD.findall(without_markup(text.lower()))


@dataclass(frozen=True, slots=True, eq=False)
class HashedTexts:
    """Texts as 32-bit hashes (CRC-32) of their tokens, end to end: text i is hashes[starts[i]:starts[i+1]]."""

    hashes: Hashes
    starts: npt.NDArray[np.int64]

    @classmethod
    def of(cls, texts: Iterable[str]) -> HashedTexts:
        known: dict[str, int] = {}
        flat: list[Hashes] = []
        starts = [0]
        for text in texts:
            words = tokens(text)
            for word in words:
                if word not in known:
                    known[word] = zlib.crc32(word.encode())
            flat.append(np.fromiter((known[word] for word in words), dtype=np.uint32, count=len(words)))
            starts.append(starts[-1] + len(words))
        joined = np.concatenate(flat) if flat else np.empty(0, dtype=np.uint32)
        return cls(joined, np.array(starts, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.starts) - 1


def bag_of_words(texts: HashedTexts, buckets: int = BUCKETS) -> Sparse:
    """Which hash buckets each text has, as a unit vector.

    **Edge cases.** A text without a word is the zero vector.
    """
    owner = np.repeat(np.arange(len(texts)), np.diff(texts.starts))
    pairs = np.unique(owner * buckets + texts.hashes % buckets)
    rows, columns = pairs // buckets, pairs % buckets
    sizes = np.bincount(rows, minlength=len(texts))
    weights = (1 / np.sqrt(sizes.astype(np.float64))[rows]).astype(np.float32)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    return Sparse(sparse.csr_array((weights, columns, starts), shape=(len(texts), buckets)))


def token_ids(texts: HashedTexts, length: int, vocabulary: int = BUCKETS) -> Dense:
    """The first `length` tokens of each text as ids 1..vocabulary-1, padded with 0."""
    sizes = np.minimum(np.diff(texts.starts), length)
    rows = np.repeat(np.arange(len(texts)), sizes)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    ids = np.full((len(texts), length), PADDING, dtype=np.int64)
    ids[rows, within] = texts.hashes[texts.starts[:-1][rows] + within] % (vocabulary - 1) + 1
    return Dense(torch.from_numpy(ids))


CLASSES = ("negative", "positive")

_MEMBER = re.compile(r"(?:\./)?aclImdb/(train|test)/(neg|pos)/\d+_\d+\.txt")
_SIDES = ("train", "test")


def imdb(root: Path | str | None = None, buckets: int = BUCKETS) -> DataBundle:
    """Reviews as hashed bags of words of unit length: which words occur."""
    return _bundle(
        root, f"bag of words, {buckets} buckets, binary", lambda texts: bag_of_words(texts, buckets)
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
    bundle = imdb(root)
    (path,) = SOURCES["imdb"].require(root)
    vectors, texts = WordVectors(), cache(lambda: read_texts(path)[0])

    def compute(_: Split, side: str) -> Compute:
        return lambda indices: vectors.means([without_markup(texts()[side][i]) for i in indices.tolist()])

    found = with_features(
        bundle,
        compute,
        (vectors.width,),
        np.float32,
        key=f"{bundle.fingerprint}|means of {WORDLLAMA.name} 1",
        title="Word vectors of IMDB",
    )
    return replace(
        found, variant=f"means of {WORDLLAMA.name} word vectors", notes=(*bundle.notes, str(WORDLLAMA))
    )


def _bundle(
    root: Path | str | None,
    variant: str,
    featurize: Callable[[HashedTexts], Features],
    vocabulary: int | None = None,
) -> DataBundle:
    (path,) = SOURCES["imdb"].require(root)
    key = fingerprint([path], "imdb", 1)

    def read() -> Arrays:
        texts, labels = read_texts(path)
        found: Arrays = {}
        for side in _SIDES:
            hashed = HashedTexts.of(texts[side])
            found |= {f"{side}_hashes": hashed.hashes, f"{side}_starts": hashed.starts}
            found[f"{side}_labels"] = np.array(labels[side], dtype=np.int64)
        return found

    arrays = cached_arrays(key, read)

    def part(side: str) -> Split:
        texts = HashedTexts(arrays[f"{side}_hashes"], arrays[f"{side}_starts"])
        return Split(featurize(texts), torch.from_numpy(arrays[f"{side}_labels"]))

    train, test = part("train"), part("test")
    named = f"{key}|{variant}"
    return DataBundle("imdb", variant, train, test, CLASSES, fingerprint=named, vocabulary=vocabulary)


def read_texts(path: Path) -> tuple[dict[str, list[str]], dict[str, list[int]]]:
    """Texts and labels of both sides of the archive, read in a stream."""
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


_SEED = 20_250_101


def zipf_texts(
    root: Path | str | None = None, records: int = 20_000, length: int = 32, vocabulary: int = 2**16
) -> DataBundle:
    """Texts of `length` words; the word of rank r comes with a chance of about 1/r and has its own public mood.

    A text is more likely of the high class the better the mood of its words, which is zero over all texts. The same
    texts every time; `root` is not used, as nothing is read.
    """
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
