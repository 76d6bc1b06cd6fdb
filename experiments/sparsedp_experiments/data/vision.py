"""Pictures: MNIST and Fashion-MNIST (IDX), CIFAR-10, scikit-learn's digits, and EyePACS' fundus photographs."""

from __future__ import annotations

import gzip
import re
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from sparsedp.errors import DataError
from sparsedp_experiments.data.bundle import DataBundle, Dense, Split
from sparsedp_experiments.data.files import (
    Arrays,
    FileTree,
    cached_arrays,
    decode_all,
    fingerprint,
    hash_names,
    open_tree,
    parted,
    tar_files,
)
from sparsedp_experiments.data.spec import SOURCES

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
_LARGEST_DIGIT_PIXEL, _DIGITS_TEST_EVERY = 16.0, 5


def digits(root: Path | str | None = None) -> DataBundle:
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


def mnist(root: Path | str | None = None) -> DataBundle:
    """MNIST, from its four IDX files."""
    return _load_idx("mnist", DIGITS, root)


def fashion_mnist(root: Path | str | None = None) -> DataBundle:
    """Fashion-MNIST, from its four IDX files."""
    return _load_idx("fashion-mnist", CLOTHES, root)


def cifar10(root: Path | str | None = None) -> DataBundle:
    """CIFAR-10 from the first form found in a folder: binary batches, JPEG zip. Decoded once and cached."""
    source = SOURCES["cifar10"]
    by_name = {name: form for form, (file,) in source.forms.items() for name in file.names}
    path = source.find(tuple(by_name), root)
    form = by_name[path.name]
    key = fingerprint([path], "cifar10", 1)
    read = _read_jpeg if form == "jpeg" else _read_batches
    arrays = cached_arrays(key, lambda: read(path))
    return DataBundle(
        name="cifar10",
        variant=form,
        train=_split(arrays["train_images"], arrays["train_labels"]),
        test=_split(arrays["test_images"], arrays["test_labels"]),
        classes=CIFAR_CLASSES,
        notes=(JPEG_NOTE,) if form == "jpeg" else (),
        fingerprint=key,
    )


def read_idx(path: Path, axes: int) -> Bytes:
    """The array of bytes in an IDX file of `axes` axes."""
    try:
        raw = path.read_bytes()
        content = gzip.decompress(raw) if raw[:2] == _GZIP_MAGIC else raw
        zeros, kind, rank, *shape = struct.unpack_from(f">HBB{axes}I", content)
        if (zeros, kind, rank) != (0, _UNSIGNED_BYTE, axes):
            raise ValueError(f"not IDX of bytes with {axes} axes; are images and labels swapped?")
        return np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * axes).reshape(shape)
    except (OSError, EOFError, zlib.error, struct.error, ValueError) as error:
        raise DataError(f"{path}: cannot be read as IDX ({error}); fetch it again") from error


def _load_idx(name: str, classes: tuple[str, ...], root: Path | str | None) -> DataBundle:
    paths = SOURCES[name].require(root)
    return DataBundle(
        name=name,
        variant="official",
        train=_idx_split(paths[0], paths[1], len(classes)),
        test=_idx_split(paths[2], paths[3], len(classes)),
        classes=classes,
        fingerprint=fingerprint(paths, name),
    )


def _idx_split(images_path: Path, labels_path: Path, classes: int) -> Split:
    images, labels = read_idx(images_path, axes=3), read_idx(labels_path, axes=1)
    if len(images) != len(labels):
        raise DataError(
            f"{labels_path}: got {len(labels)} labels for the {len(images)} images of {images_path.name}"
        )
    if len(labels) and labels.max() >= classes:
        raise DataError(f"{labels_path}: got label {labels.max()}, expected 0 to {classes - 1}")
    return _split(images.copy()[:, None], labels)


def _split(images: Bytes, labels: Labels) -> Split:
    return Split(Dense(torch.from_numpy(images)), torch.from_numpy(labels.astype(np.int64)))


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


EYE_CLASSES = ("no retinopathy", "any retinopathy")
LABEL_FILES: Mapping[str, str] = {"all": "trainLabels.csv", "natural": "naturalLabels.csv"}
"""Which images to use: every labelled one, or a list with the prevalence of the original."""

_IMAGE = re.compile(r"^(\d+)_(?:left|right)$")


def eyepacs(root: Path | str | None = None, prevalence: str = "all", size: int = 64) -> DataBundle:
    """EyePACS, any retinopathy (grade above 0), as 3 x size x size pictures.

    A fifth of the patients are the test set, by a public hash of the patient's number; both eyes go together.
    Pictures of another size are cropped to the centred square and resized. Decoded once and cached.
    """
    if prevalence not in LABEL_FILES:
        raise DataError(f"eyepacs: got prevalence {prevalence!r}, expected one of {', '.join(LABEL_FILES)}")
    source = SOURCES["eyepacs"]
    labels_path = source.find((LABEL_FILES[prevalence],), root)
    pictures_path = source.find(source.forms["kaggle"][1].names, root)
    grades = read_grades(labels_path)
    with open_tree(pictures_path) as tree:
        by_image = _by_image(tree)
        if missing := [image for image in grades["image"] if image not in by_image]:
            raise DataError(f"{pictures_path}: no picture for {len(missing)} images, the first {missing[0]}")
        listed = sorted(by_image)
        names = [by_image[image] for image in listed]
        key = fingerprint([pictures_path], "eyepacs", size) + hash_names(tree, names)
        arrays = cached_arrays(key, lambda: {"images": decode_all(tree, names, size, channels=3)})
    row = {image: number for number, image in enumerate(listed)}
    order = torch.tensor([row[image] for image in grades["image"]])
    targets = torch.tensor((grades["level"] > 0).to_numpy().astype(np.int64))
    patients = torch.tensor(grades["patient"].to_numpy())
    whole = Split(Dense(torch.from_numpy(arrays["images"]), order), targets, patients)
    train, test = parted(whole, [f"eyepacs:{patient}" for patient in patients.tolist()])
    return DataBundle(
        name="eyepacs",
        variant=f"{prevalence}, {size}x{size}",
        train=train,
        test=test,
        classes=EYE_CLASSES,
        unit="patient",
        notes=("the test set is a fifth of the patients, not Kaggle's",),
        fingerprint=f"{key}|{prevalence}|{fingerprint([labels_path])}",
    )


def read_grades(path: Path) -> pd.DataFrame:
    """Image, grade (0 to 4) and patient of every line of a label file with the columns image and level.

    The patient's number is what stands before _left or _right: both eyes share it.
    """
    try:
        found = pd.read_csv(path, usecols=["image", "level"], dtype=str, encoding="utf-8-sig")
        found["patient"] = found["image"].str.extract(_IMAGE.pattern)[0].astype(np.int64)
        found["level"] = found["level"].astype(np.int64)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as a table of images and levels ({error})") from error
    wrong = found["image"].duplicated() | ~found["level"].between(0, 4)
    if found.empty or wrong.any():
        raise DataError(
            f"{path}: expected grades from 0 to 4, each image once; got {list(found['image'][wrong])[:3]}"
        )
    return found


def _by_image(tree: FileTree) -> dict[str, str]:
    """Image name (10_left) to file name, for every eye picture of the tree."""
    stems = ((PurePosixPath(name).stem, name) for name in tree.names)
    return {stem: name for stem, name in stems if _IMAGE.fullmatch(stem)}
