"""Text into numbers by a fixed rule and a fixed hash: no vocabulary is learned from the data."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch

from sparsedp.errors import DataError
from sparsedp_experiments.data.features import Dense, Sparse

BUCKETS = 2**14
"""Default number of hash buckets; for token ids, of ids with padding included."""

PADDING = 0

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
        """Tokenise and hash."""
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


def _binary(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    return np.ones(len(counts))


def _logarithmic(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    return 1.0 + np.log(counts)


WEIGHTINGS: Mapping[str, Callable[[npt.NDArray[np.int64]], npt.NDArray[np.float64]]] = MappingProxyType(
    {"binary": _binary, "log": _logarithmic}
)
"""Weight of a bucket from how often it occurs in the text, before scaling to unit length."""


def bag_of_words(texts: HashedTexts, buckets: int = BUCKETS, weighting: str = "binary") -> Sparse:
    """Each text as a unit vector over hash buckets.

    **Edge cases.** A text without a word is the zero vector.
    """
    if weighting not in WEIGHTINGS:
        raise DataError(f"bag_of_words: got weighting {weighting!r}, expected one of {', '.join(WEIGHTINGS)}")
    if buckets < 1:
        raise DataError(f"bag_of_words: got {buckets} buckets, expected at least 1")
    owner = np.repeat(np.arange(len(texts)), np.diff(texts.starts))
    pairs, counts = np.unique(owner * buckets + texts.hashes % buckets, return_counts=True)
    rows, columns = pairs // buckets, pairs % buckets
    weights = WEIGHTINGS[weighting](counts)
    squares = np.bincount(rows, weights=weights**2, minlength=len(texts))
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(texts)))])
    return Sparse(
        torch.from_numpy(starts.astype(np.int64)),
        torch.from_numpy(columns.astype(np.int32)),
        torch.from_numpy((weights / np.sqrt(squares)[rows]).astype(np.float32)),
        buckets,
    )


def token_ids(texts: HashedTexts, length: int, vocabulary: int = BUCKETS) -> Dense:
    """The first `length` tokens of each text as ids 1..vocabulary-1, padded with 0."""
    if length < 1 or vocabulary < 2:
        raise DataError(
            f"token_ids: got length {length} and vocabulary {vocabulary}, expected at least 1 and 2"
        )
    sizes = np.minimum(np.diff(texts.starts), length)
    rows = np.repeat(np.arange(len(texts)), sizes)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    ids = np.full((len(texts), length), PADDING, dtype=np.int64)
    ids[rows, within] = texts.hashes[texts.starts[:-1][rows] + within] % (vocabulary - 1) + 1
    return Dense(torch.from_numpy(ids))
