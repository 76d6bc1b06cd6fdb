"""Pictures: MNIST and Fashion-MNIST (IDX), CIFAR-10, scikit-learn's digits."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sparsedp.errors import DataError
from sparsedp_experiments.data.bundle import UNIT, DataBundle, Dense, PixelScale, Split
from sparsedp_experiments.data.files import (
    Arrays,
    cached_arrays,
    decode_all,
    fingerprint,
    open_tree,
    tar_files,
)
from sparsedp_experiments.data.spec import DatasetRow, PublicFiles, SourceFile, lite0_of, scattering_of

Bytes = npt.NDArray[np.uint8]
Labels = npt.NDArray[Any]

DIGITS = tuple(str(digit) for digit in range(10))
CLOTHES = (
    "T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
JPEG_NOTE = (
    "CIFAR-10 from a JPEG-compressed copy: lossy, figures are not comparable with exact pixels to the decimal"
)

_UNSIGNED_BYTE = 0x08
_GZIP_MAGIC = b"\x1f\x8b"
_BATCHES = {"train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)), "test": ("test_batch.bin",)}
_CIFAR_BYTES = 3 * 32 * 32
_CIFAR_ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")
_LARGEST_DIGIT_PIXEL, _DIGITS_TEST_EVERY = 16.0, 5


def digits() -> DataBundle:
    """The digits of scikit-learn as 1x8x8 images in [0, 1]; every fifth record is the test set."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    images = torch.from_numpy(raw.images.astype(np.float32) / _LARGEST_DIGIT_PIXEL).unsqueeze(1)
    targets = torch.from_numpy(raw.target.astype(np.int64))
    test = torch.arange(len(targets)) % _DIGITS_TEST_EVERY == 0
    train_split = Split(Dense(images[~test]), targets[~test])
    return DataBundle(
        "digits", "scikit-learn", train_split, Split(Dense(images[test]), targets[test]), DIGITS
    )


def mnist(root: Path | str | None = None, pixels: PixelScale = UNIT) -> DataBundle:
    """MNIST, from its four IDX files."""
    return _load_idx(_MNIST, DIGITS, root, pixels)


def fashion_mnist(root: Path | str | None = None, pixels: PixelScale = UNIT) -> DataBundle:
    """Fashion-MNIST, from its four IDX files."""
    return _load_idx(_FASHION, CLOTHES, root, pixels)


def cifar10(root: Path | str | None = None, pixels: PixelScale = UNIT) -> DataBundle:
    """CIFAR-10 from the first form found in a folder: binary batches, JPEG zip. Decoded once and cached."""
    by_name = {name: form for form, (file,) in _CIFAR10.forms.items() for name in file.candidates}
    path = _CIFAR10.search.require(tuple(by_name), root)
    form = by_name[path.name]
    key = fingerprint([path], "cifar10", 1)
    read = _read_jpeg if form == "jpeg" else _read_batches
    arrays = cached_arrays(key, _CIFAR_ARRAYS, lambda: read(path))
    return DataBundle(
        name="cifar10",
        variant=form,
        train=_split(arrays["train_images"], arrays["train_labels"], pixels),
        test=_split(arrays["test_images"], arrays["test_labels"], pixels),
        classes=CIFAR_CLASSES,
        notes=(JPEG_NOTE,) if form == "jpeg" else (),
        fingerprint=f"{key}|{pixels}",
    )


def read_idx(path: Path, axes: int) -> Bytes:
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


def _load_idx(
    source: PublicFiles, classes: tuple[str, ...], root: Path | str | None, pixels: PixelScale
) -> DataBundle:
    paths = source.require(root)
    return DataBundle(
        name=source.name,
        variant="official",
        train=_idx_split(paths[0], paths[1], len(classes), pixels),
        test=_idx_split(paths[2], paths[3], len(classes), pixels),
        classes=classes,
        fingerprint=fingerprint(paths, source.name, pixels),
    )


def _idx_split(images_path: Path, labels_path: Path, classes: int, pixels: PixelScale) -> Split:
    images, labels = read_idx(images_path, axes=3), read_idx(labels_path, axes=1)
    if len(images) != len(labels):
        raise DataError(
            f"{labels_path}: got {len(labels)} labels for the {len(images)} images of {images_path.name}"
        )
    if len(labels) and labels.max() >= classes:
        raise DataError(f"{labels_path}: got label {labels.max()}, expected 0 to {classes - 1}")
    return _split(images.copy()[:, None], labels, pixels)


def _split(images: Bytes, labels: Labels, pixels: PixelScale) -> Split:
    return Split(Dense(torch.from_numpy(images), pixels), torch.from_numpy(labels.astype(np.int64)))


def read_batch(content: bytes, name: str) -> tuple[Bytes, Labels]:
    """Images [N, 3, 32, 32] and labels of a binary batch: one label byte, then 3,072 pixels, per record."""
    if not content or len(content) % (1 + _CIFAR_BYTES):
        raise DataError(
            f"{name}: got {len(content)} bytes, expected a multiple of {1 + _CIFAR_BYTES}: fetch it again"
        )
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, 1 + _CIFAR_BYTES)
    if records[:, 0].max() >= len(CIFAR_CLASSES):
        raise DataError(f"{name}: got label {records[:, 0].max()}, expected 0 to {len(CIFAR_CLASSES) - 1}")
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].astype(np.int64)


def _read_batches(path: Path) -> Arrays:
    """The six batches of a folder or a tar, put together."""
    wanted = {name for names in _BATCHES.values() for name in names}
    if path.is_dir():
        contents = {name: (path / name).read_bytes() for name in wanted if (path / name).exists()}
    else:
        members = ((member.rsplit("/", 1)[-1], content) for member, content in tar_files(path))
        contents = {name: content for name, content in members if name in wanted}
    if missing := sorted(wanted - set(contents)):
        raise DataError(f"{path}: {', '.join(missing)} is missing; fetch it again")
    arrays: Arrays = {}
    for side, names in _BATCHES.items():
        parts = [read_batch(contents[name], f"{path}: {name}") for name in names]
        arrays[f"{side}_images"] = np.concatenate([images for images, _ in parts])
        arrays[f"{side}_labels"] = np.concatenate([labels for _, labels in parts])
    return arrays


def _read_jpeg(path: Path) -> Arrays:
    """Every picture of `train/<class>/` and `test/<class>/`."""
    arrays: Arrays = {}
    with open_tree(path) as tree:
        for side in _BATCHES:
            names, labels = [], []
            for name in tree.names:
                parts = name.split("/")
                if parts[0] != side or not name.lower().endswith((".jpg", ".jpeg")):
                    continue
                if len(parts) != 3 or parts[1] not in CIFAR_CLASSES:
                    raise DataError(f"{path}: {name} is not {side}/<class>/<picture> of a CIFAR-10 class")
                names.append(name)
                labels.append(CIFAR_CLASSES.index(parts[1]))
            if not names:
                raise DataError(f"{path}: no pictures under {side}/")
            arrays[f"{side}_images"] = decode_all(tree, names, size=32, channels=3)
            arrays[f"{side}_labels"] = np.array(labels, dtype=np.int64)
    return arrays


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
IDX_ROWS = (
    _MNIST_ROW,
    scattering_of(_MNIST_ROW, {"epochs": 30, "batch_size": 4096, "lr": 8.0, "clip_norm": 0.1}),
    _FASHION_ROW,
    scattering_of(_FASHION_ROW, {"epochs": 40, "batch_size": 8192, "lr": 16.0, "clip_norm": 0.1}),
)

_CIFAR10 = PublicFiles(
    "cifar10", "CIFAR-10 small colour photographs", "50,000 + 10,000 images, 3x32x32", "10 classes",
    "the University of Toronto (Krizhevsky); a JPEG copy loses some of each picture", ("cifar10",),
    {
        "official binary": (SourceFile(("cifar-10-batches-bin", "cifar-10-binary.tar.gz"),
                                       ("c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",),
                                       "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"),),
        "jpeg": (SourceFile(("cifar10-jpeg.zip",)),),
    },
)  # fmt: skip
_CIFAR_ROW = DatasetRow(
    name="cifar10",
    title="CIFAR-10, exact or from JPEG",
    source=_CIFAR10,
    loader=cifar10,
    model="adadpigu-cnn",
    recipes={
        "adadpigu-cnn": {"epochs": 30, "batch_size": 1024, "lr": 1.0, "clip_norm": 0.1},
        "dp-cnn": {"epochs": 30, "batch_size": 1024, "lr": 1.0, "clip_norm": 0.1},
    },
)
CIFAR_ROWS = (
    _CIFAR_ROW,
    scattering_of(_CIFAR_ROW, {"epochs": 40, "batch_size": 8192, "lr": 4.0, "clip_norm": 0.1}),
    lite0_of(_CIFAR_ROW),
)

DIGIT_ROWS = (
    DatasetRow(
        name="digits",
        title="scikit-learn's 8x8 digits, nothing to download",
        source=None,
        loader=lambda root: digits(),
        model="mlp",
        recipes={"mlp": {"epochs": 30, "batch_size": 128, "lr": 0.5, "clip_norm": 0.25}},
    ),
)
