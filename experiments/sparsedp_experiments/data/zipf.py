"""Made-up texts whose words follow Zipf's law: for trying tables of any size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from sparsedp.errors import DataError
from sparsedp.randomness import PublicRandomness
from sparsedp_experiments.data.bundle import DataBundle, Split
from sparsedp_experiments.data.features import Dense
from sparsedp_experiments.data.row import DatasetRow

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


ROWS = (
    DatasetRow(
        name="zipf",
        title="made-up texts whose words follow Zipf's law",
        source=None,
        loader=zipf_texts,
        model="embedding-bag",
    ),
)
