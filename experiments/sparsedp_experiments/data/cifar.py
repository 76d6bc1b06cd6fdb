"""CIFAR-10: the official python or binary batches, or a zip of JPEG pictures."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sparsedp.errors import DataError
from sparsedp_experiments.data.bundle import DataBundle, Split
from sparsedp_experiments.data.cache import Arrays, cached_arrays
from sparsedp_experiments.data.features import UNIT, Dense, PixelScale
from sparsedp_experiments.data.files import fingerprint, open_tree, tar_files
from sparsedp_experiments.data.images import decode_all
from sparsedp_experiments.data.row import DatasetRow, PublicFiles, SourceFile, lite0_of, scattering_of

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
JPEG_NOTE = (
    "CIFAR-10 from a JPEG-compressed copy: lossy, figures are not comparable with exact pixels to the decimal"
)

_TRAIN_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_TEST_BATCHES = ("test_batch",)
_RECORD_BYTES = 3 * 32 * 32
_ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")


def cifar10(root: Path | str | None = None, pixels: PixelScale = UNIT) -> DataBundle:
    """CIFAR-10 from the first form found in a folder: python batches, binary batches, JPEG zip.

    Decoded once and cached.
    """
    by_name = {name: form for form, (file,) in _CIFAR10.forms.items() for name in file.candidates}
    path = _CIFAR10.search.require(tuple(by_name), root)
    form = by_name[path.name]
    key = fingerprint([path], "cifar10", 1)
    arrays = cached_arrays(key, _ARRAYS, lambda: _READERS[form](path))
    return DataBundle(
        name="cifar10",
        variant=form,
        train=_split(arrays, "train", pixels),
        test=_split(arrays, "test", pixels),
        classes=CLASSES,
        notes=(JPEG_NOTE,) if form == "jpeg" else (),
        fingerprint=f"{key}|{pixels}",
    )


def _split(arrays: Arrays, side: str, pixels: PixelScale) -> Split:
    images = torch.from_numpy(arrays[f"{side}_images"])
    return Split(Dense(images, pixels), torch.from_numpy(arrays[f"{side}_labels"]))


class _CifarUnpickler(pickle.Unpickler):
    """Builds numpy arrays and builtin containers and nothing else: a pickle may otherwise run any code it likes."""

    _allowed: Mapping[tuple[str, str], Any] = MappingProxyType(
        {
            ("numpy.core.multiarray", "_reconstruct"): np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
            ("numpy._core.multiarray", "_reconstruct"): np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        """The few names an array needs; any other is refused."""
        if (module, name) not in self._allowed:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR batch needs")
        return self._allowed[module, name]


def read_python_batch(content: bytes, name: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Images [N, 3, 32, 32] and labels of a pickled batch, without running anything it might contain."""
    try:
        batch = _CifarUnpickler(io.BytesIO(content), encoding="bytes").load()
    except (
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        TypeError,
        AttributeError,
        IndexError,
        KeyError,
    ) as error:
        raise DataError(f"{name}: not a CIFAR-10 python batch ({error}); fetch it again") from error
    fields = {
        key.decode() if isinstance(key, bytes) else key: value for key, value in _as_dict(batch, name).items()
    }
    if not {"data", "labels"} <= set(fields):
        raise DataError(f"{name}: got fields {sorted(map(str, fields))}, expected data and labels")
    data = np.asarray(fields["data"])
    if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != _RECORD_BYTES:
        raise DataError(
            f"{name}: got data of {data.dtype} {data.shape}, expected bytes of shape [N, {_RECORD_BYTES}]"
        )
    return data.reshape(-1, 3, 32, 32), _labels(np.asarray(fields["labels"]), len(data), name)


def _as_dict(batch: Any, name: str) -> dict[Any, Any]:
    if not isinstance(batch, dict):
        raise DataError(f"{name}: got a pickled {type(batch).__name__}, expected a dictionary")
    return batch


def read_binary_batch(content: bytes, name: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Images [N, 3, 32, 32] and labels of a binary batch: one label byte, then 3,072 pixels, per record."""
    if not content or len(content) % (1 + _RECORD_BYTES):
        raise DataError(
            f"{name}: got {len(content)} bytes, expected a multiple of {1 + _RECORD_BYTES}: fetch it again"
        )
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, 1 + _RECORD_BYTES)
    return records[:, 1:].reshape(-1, 3, 32, 32), _labels(records[:, 0], len(records), name)


def _labels(values: npt.NDArray[Any], records: int, name: str) -> npt.NDArray[np.int64]:
    if values.shape != (records,) or values.dtype.kind not in "iu":
        raise DataError(
            f"{name}: got labels of {values.dtype} {values.shape}, expected one integer per {records} records"
        )
    if records and not 0 <= values.min() <= values.max() < len(CLASSES):
        raise DataError(
            f"{name}: got a label in {values.min()}..{values.max()}, expected 0 to {len(CLASSES) - 1}"
        )
    return values.astype(np.int64)


Reader = Callable[[bytes, str], tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]]


def _read_batches(path: Path, suffix: str, read: Reader) -> Arrays:
    """The six batches of a folder or a tar, put together."""
    wanted = {name + suffix for name in (*_TRAIN_BATCHES, *_TEST_BATCHES)}
    contents: dict[str, bytes] = {}
    if path.is_dir():
        contents = {name: (path / name).read_bytes() for name in wanted if (path / name).exists()}
    else:
        for member, content in tar_files(path):
            if (name := member.rsplit("/", 1)[-1]) in wanted:
                contents[name] = content
    if missing := sorted(wanted - set(contents)):
        raise DataError(f"{path}: {', '.join(missing)} is missing; fetch it again")
    arrays: Arrays = {}
    for side, batches in (("train", _TRAIN_BATCHES), ("test", _TEST_BATCHES)):
        parts = [read(contents[name + suffix], f"{path}: {name}{suffix}") for name in batches]
        arrays[f"{side}_images"] = np.concatenate([images for images, _ in parts])
        arrays[f"{side}_labels"] = np.concatenate([labels for _, labels in parts])
    return arrays


def _read_jpeg(path: Path) -> Arrays:
    """Every picture of `train/<class>/` and `test/<class>/`."""
    arrays: Arrays = {}
    with open_tree(path) as tree:
        for side in ("train", "test"):
            names, labels = [], []
            for name in tree.names:
                parts = name.split("/")
                if parts[0] != side or not name.lower().endswith((".jpg", ".jpeg")):
                    continue
                if len(parts) != 3 or parts[1] not in CLASSES:
                    raise DataError(f"{path}: {name} is not {side}/<class>/<picture> of a CIFAR-10 class")
                names.append(name)
                labels.append(CLASSES.index(parts[1]))
            if not names:
                raise DataError(f"{path}: no pictures under {side}/")
            arrays[f"{side}_images"] = decode_all(tree, names, size=32, channels=3)
            arrays[f"{side}_labels"] = np.array(labels, dtype=np.int64)
    return arrays


_READERS: Mapping[str, Callable[[Path], Arrays]] = MappingProxyType(
    {
        "official": lambda path: _read_batches(path, "", read_python_batch),
        "official binary": lambda path: _read_batches(path, ".bin", read_binary_batch),
        "jpeg": _read_jpeg,
    }
)


_CIFAR10 = PublicFiles(
    "cifar10",
    "CIFAR-10 small colour photographs",
    "50,000 + 10,000 images, 3x32x32",
    "10 classes",
    "the University of Toronto (Krizhevsky); a JPEG copy loses some of each picture",
    ("cifar10",),
    {
        "official": (
            SourceFile(
                ("cifar-10-batches-py", "cifar-10-python.tar.gz"),
                ("6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",),
                "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
            ),
        ),
        "official binary": (
            SourceFile(
                ("cifar-10-batches-bin", "cifar-10-binary.tar.gz"),
                ("c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",),
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            ),
        ),
        "jpeg": (SourceFile(("cifar10-jpeg.zip",)),),
    },
)

_ROW = DatasetRow(
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
ROWS = (
    _ROW,
    scattering_of(_ROW, {"epochs": 40, "batch_size": 8192, "lr": 4.0, "clip_norm": 0.1}),
    lite0_of(_ROW),
)
