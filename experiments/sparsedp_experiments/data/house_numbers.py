"""Street View House Numbers: the official cropped-digit MATLAB files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from sparsedp.errors import DataError
from sparsedp_experiments.data.bundle import DataBundle, Split
from sparsedp_experiments.data.features import UNIT, Dense, PixelScale
from sparsedp_experiments.data.files import fingerprint
from sparsedp_experiments.data.idx import DIGITS
from sparsedp_experiments.data.row import DatasetRow, PublicFiles, SourceFile


def svhn(root: Path | str | None = None, pixels: PixelScale = UNIT) -> DataBundle:
    """SVHN, format 2 (32x32), from `train_32x32.mat` and `test_32x32.mat`."""
    train, test = (_SVHN.search.require(file.candidates, root) for file in _SVHN.forms["official"])
    return DataBundle(
        name="svhn",
        variant="official",
        train=_split(train, pixels),
        test=_split(test, pixels),
        classes=DIGITS,
        fingerprint=fingerprint([train, test], "svhn", pixels),
    )


def read_svhn(path: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Images [N, 3, 32, 32] and digits of one file; the label 10 means the digit 0."""
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    try:
        content = loadmat(path, variable_names=["X", "y"])
    except (MatReadError, ValueError, TypeError, NotImplementedError, OSError, EOFError, IndexError) as error:
        raise DataError(
            f"{path}: cannot be read as a MATLAB file ({error}); it is truncated or damaged"
        ) from error
    if not {"X", "y"} <= set(content):
        raise DataError(f"{path}: got no variables X and y; expected the cropped-digit file (format 2)")
    images, labels = content["X"], content["y"].reshape(-1)
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[:3] != (32, 32, 3):
        raise DataError(
            f"{path}: got X of {images.dtype} {images.shape}, expected bytes of shape (32, 32, 3, N)"
        )
    if labels.shape != (images.shape[3],) or (len(labels) and not 1 <= labels.min() <= labels.max() <= 10):
        raise DataError(f"{path}: expected one label from 1 to 10 for each of {images.shape[3]} images")
    return np.ascontiguousarray(images.transpose(3, 2, 0, 1)), labels.astype(np.int64) % 10


def _split(path: Path, pixels: PixelScale) -> Split:
    images, labels = read_svhn(path)
    return Split(Dense(torch.from_numpy(images), pixels), torch.from_numpy(labels))


_SVHN = PublicFiles(
    "svhn",
    "Street View House Numbers, cropped digits",
    "73,257 + 26,032 images, 3x32x32",
    "10 classes",
    "Stanford (Netzer et al.)",
    ("svhn",),
    {
        "official": (
            SourceFile(
                ("train_32x32.mat",),
                ("435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",),
                "http://ufldl.stanford.edu/housenumbers/train_32x32.mat",
            ),
            SourceFile(
                ("test_32x32.mat",),
                ("cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",),
                "http://ufldl.stanford.edu/housenumbers/test_32x32.mat",
            ),
        )
    },
)

ROWS = (
    DatasetRow(name="svhn", title="SVHN, cropped digits", source=_SVHN, loader=svhn, model="adadpigu-cnn"),
)
