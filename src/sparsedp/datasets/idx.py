"""MNIST and Fashion-MNIST: the IDX format, gzipped or not."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from sparsedp.core.errors import DataError
from sparsedp.datasets.bundle import DataBundle, Split
from sparsedp.datasets.features import UNIT, Dense, PixelScale
from sparsedp.datasets.locate import fingerprint
from sparsedp.datasets.sources import source

_UNSIGNED_BYTE = 0x08
_GZIP_MAGIC = b"\x1f\x8b"

DIGITS = tuple(str(digit) for digit in range(10))
CLOTHES = (
    "T-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)


def mnist(root: Path | str | None = None, pixels: PixelScale = UNIT) -> DataBundle:
    """MNIST, from its four IDX files."""
    return _load("mnist", DIGITS, root, pixels)


def fashion_mnist(root: Path | str | None = None, pixels: PixelScale = UNIT) -> DataBundle:
    """Fashion-MNIST, from its four IDX files."""
    return _load("fashion-mnist", CLOTHES, root, pixels)


def read_idx(path: Path, axes: int) -> npt.NDArray[np.uint8]:
    """The array of bytes in an IDX file of `axes` axes.

    Raises:
        DataError: the file is damaged, not IDX, not of bytes, or not as long as its header says. It names the file.
    """
    try:
        raw = path.read_bytes()
        content = gzip.decompress(raw) if raw[:2] == _GZIP_MAGIC else raw
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path}: cannot be read as gzip ({error}); it is truncated or damaged: fetch it again"
        ) from error
    header = 4 + 4 * axes
    if len(content) < header:
        raise DataError(
            f"{path}: got {len(content)} bytes, expected an IDX header of {header}: fetch it again"
        )
    zeros, kind, rank = struct.unpack(">HBB", content[:4])
    if zeros != 0 or kind != _UNSIGNED_BYTE or rank != axes:
        raise DataError(
            f"{path}: got magic number {content[:4].hex()}, expected 000008{axes:02x} (IDX, bytes, {axes} axes). "
            "Images and labels swapped, or not an IDX file"
        )
    shape = struct.unpack(f">{axes}I", content[4:header])
    expected = math.prod(shape)
    if len(content) - header != expected:
        raise DataError(
            f"{path}: got {len(content) - header} bytes of data, expected {expected} for {shape}: fetch it again"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape)


def _load(name: str, classes: tuple[str, ...], root: Path | str | None, pixels: PixelScale) -> DataBundle:
    spec = source(name)
    paths = [spec.search.require(file.candidates, root) for file in spec.forms["official"]]
    train_images, train_labels, test_images, test_labels = paths
    return DataBundle(
        name=name,
        variant="official",
        train=_split(train_images, train_labels, len(classes), pixels),
        test=_split(test_images, test_labels, len(classes), pixels),
        classes=classes,
        fingerprint=fingerprint(paths, name, pixels),
    )


def _split(images_path: Path, labels_path: Path, classes: int, pixels: PixelScale) -> Split:
    images = read_idx(images_path, axes=3)
    labels = read_idx(labels_path, axes=1)
    if len(images) != len(labels):
        raise DataError(
            f"{labels_path}: got {len(labels)} labels for the {len(images)} images of {images_path.name}"
        )
    if len(labels) and labels.max() >= classes:
        raise DataError(f"{labels_path}: got label {labels.max()}, expected 0 to {classes - 1}")
    values = torch.from_numpy(images.copy()).unsqueeze(1)
    return Split(Dense(values, pixels), torch.from_numpy(labels.astype(np.int64)))
