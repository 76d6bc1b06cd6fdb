"""scikit-learn's digits: 1,797 images of 8x8, always at hand."""

from __future__ import annotations

import numpy as np
import torch

from sparsedp_experiments.data.bundle import DataBundle, Split
from sparsedp_experiments.data.features import Dense
from sparsedp_experiments.data.idx import DIGITS
from sparsedp_experiments.data.row import DatasetRow

_LARGEST_PIXEL = 16.0
_TEST_EVERY = 5


def digits() -> DataBundle:
    """The digits of scikit-learn as 1x8x8 images in [0, 1]; every fifth record is the test set."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    images = torch.from_numpy(raw.images.astype(np.float32) / _LARGEST_PIXEL).unsqueeze(1)
    targets = torch.from_numpy(raw.target.astype(np.int64))
    test = torch.arange(len(targets)) % _TEST_EVERY == 0
    return DataBundle(
        name="digits",
        variant="scikit-learn",
        train=Split(Dense(images[~test]), targets[~test]),
        test=Split(Dense(images[test]), targets[test]),
        classes=DIGITS,
    )


ROWS = (
    DatasetRow(
        name="digits",
        title="scikit-learn's 8x8 digits, nothing to download",
        source=None,
        loader=lambda root: digits(),
        model="mlp",
        recipes={"mlp": {"epochs": 30, "batch_size": 128, "lr": 0.5, "clip_norm": 0.25}},
    ),
)
