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

from sparsedp.errors import DataError
from sparsedp_experiments.data.bundle import DataBundle, Split
from sparsedp_experiments.data.features import UNIT, Dense, PixelScale
from sparsedp_experiments.data.files import fingerprint
from sparsedp_experiments.data.row import DatasetRow, PublicFiles, SourceFile, scattering_of

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
    return _load(_MNIST, DIGITS, root, pixels)


def fashion_mnist(root: Path | str | None = None, pixels: PixelScale = UNIT) -> DataBundle:
    """Fashion-MNIST, from its four IDX files."""
    return _load(_FASHION, CLOTHES, root, pixels)


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


def _load(
    source: PublicFiles, classes: tuple[str, ...], root: Path | str | None, pixels: PixelScale
) -> DataBundle:
    paths = [source.search.require(file.candidates, root) for file in source.forms["official"]]
    train_images, train_labels, test_images, test_labels = paths
    return DataBundle(
        name=source.name,
        variant="official",
        train=_split(train_images, train_labels, len(classes), pixels),
        test=_split(test_images, test_labels, len(classes), pixels),
        classes=classes,
        fingerprint=fingerprint(paths, source.name, pixels),
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


def _idx_files(base: str, sums: dict[str, tuple[str, str]]) -> tuple[SourceFile, ...]:
    """The four IDX files: for each the checksum of the original archive and of its content."""
    return tuple(
        SourceFile((f"{name}.gz", name, name.replace("-idx", ".idx")), both, f"{base}{name}.gz")
        for name, both in sums.items()
    )


_MNIST = PublicFiles(
    "mnist",
    "MNIST handwritten digits",
    "60,000 + 10,000 images, 28x28",
    "10 classes",
    "the official mirrors of the four IDX files",
    ("mnist", "MNIST/raw"),
    {
        "official": _idx_files(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            {
                "train-images-idx3-ubyte": (
                    "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                    "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
                ),
                "train-labels-idx1-ubyte": (
                    "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                    "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
                ),
                "t10k-images-idx3-ubyte": (
                    "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                    "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
                ),
                "t10k-labels-idx1-ubyte": (
                    "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
                    "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
                ),
            },
        )
    },
)

_FASHION = PublicFiles(
    "fashion-mnist",
    "Fashion-MNIST articles of clothing",
    "60,000 + 10,000 images, 28x28",
    "10 classes",
    "the official mirror (Zalando Research) of the four IDX files",
    ("fashion-mnist", "FashionMNIST/raw"),
    {
        "official": _idx_files(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            {
                "train-images-idx3-ubyte": (
                    "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
                    "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
                ),
                "train-labels-idx1-ubyte": (
                    "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
                    "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
                ),
                "t10k-images-idx3-ubyte": (
                    "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
                    "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
                ),
                "t10k-labels-idx1-ubyte": (
                    "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
                    "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
                ),
            },
        )
    },
)

_MNIST_ROW = DatasetRow(
    name="mnist",
    title="MNIST",
    source=_MNIST,
    loader=mnist,
    model="mnist-cnn",
    recipes={"mnist-cnn": {"epochs": 20, "batch_size": 1024, "lr": 1.0, "clip_norm": 0.1}},
)
_FASHION_ROW = DatasetRow(
    name="fashion-mnist",
    title="Fashion-MNIST",
    source=_FASHION,
    loader=fashion_mnist,
    model="mnist-cnn",
    recipes={"mnist-cnn": {"epochs": 20, "batch_size": 2048, "lr": 4.0, "clip_norm": 0.1}},
)
ROWS = (
    _MNIST_ROW,
    scattering_of(_MNIST_ROW, {"epochs": 30, "batch_size": 4096, "lr": 8.0, "clip_norm": 0.1}),
    _FASHION_ROW,
    scattering_of(_FASHION_ROW, {"epochs": 40, "batch_size": 8192, "lr": 16.0, "clip_norm": 0.1}),
)
