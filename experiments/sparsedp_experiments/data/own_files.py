"""A user's own data: arrays from an NPZ file, and any tree of class folders of pictures."""

from __future__ import annotations

import hashlib
import io
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from sparsedp._validate import refuse_missing_ids
from sparsedp.errors import DataError
from sparsedp_experiments.data.bundle import UNIT, DataBundle, Dense, PixelScale, Split
from sparsedp_experiments.data.files import FileTree, cached_arrays, fingerprint, open_tree, shown

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm")
TEST_FRACTION = 0.2
_TRAIN_FOLDERS = ("train", "training")
_TEST_FOLDERS = ("test", "val", "valid", "validation")
_MODES = {1: "L", 3: "RGB"}


def decode(content: bytes, name: str, size: int, channels: int) -> npt.NDArray[np.uint8]:
    """One picture as bytes [channels, size, size]: the largest centred square, resized when it is not that size."""
    try:
        with Image.open(io.BytesIO(content)) as opened:
            picture = opened.convert(_MODES[channels])
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(
            f"{name}: cannot be decoded as a picture ({error}); it is damaged or no picture"
        ) from error
    if picture.size != (size, size):
        side = min(picture.size)
        left, top = (picture.width - side) // 2, (picture.height - side) // 2
        square = picture.crop((left, top, left + side, top + side))
        picture = square.resize(
            (size, size), Image.Resampling.BOX if side > size else Image.Resampling.BILINEAR
        )
    array = np.asarray(picture, dtype=np.uint8)
    return array[None] if channels == 1 else np.ascontiguousarray(array.transpose(2, 0, 1))


def decode_all(tree: FileTree, names: Sequence[str], size: int, channels: int) -> npt.NDArray[np.uint8]:
    """Many pictures of a tree, stacked."""
    out = np.empty((len(names), channels, size, size), dtype=np.uint8)
    for row, name in enumerate(shown(names, f"decoding {tree.origin.name}")):
        out[row] = decode(tree.read(name), f"{tree.origin}: {name}", size, channels)
    return out


def public_share(key: str) -> float:
    """A number in [0, 1) that depends on the key alone: decides sides of a split without looking at the data."""
    digest = hashlib.blake2b(key.encode(), digest_size=8, person=b"sparsedp-split").digest()
    return int.from_bytes(digest, "big") / 2**64


def image_folder(
    path: Path | str,
    size: int,
    channels: int = 3,
    pixels: PixelScale = UNIT,
    unit_of: Callable[[str], int] | None = None,
) -> DataBundle:
    """A tree (or zip) of pictures, one folder per class, with or without `train/` and `test/` above them.

    Without them a fifth goes to the test set, by a public hash of the file's name, or of its unit. `unit_of` gives
    the person behind a file from its path, where one person has several.
    **Privacy.** The folder names are the classes and are public.
    """
    if channels not in _MODES:
        raise DataError(f"image_folder: got channels={channels}, expected 1 (grey) or 3 (colour)")
    path = Path(path)
    if not path.exists():
        raise DataError(f"{path}: no such folder or zip")
    with open_tree(path) as tree:
        names = [name for name in tree.names if name.lower().endswith(SUFFIXES)]
        if not names:
            raise DataError(f"{path}: no pictures ({', '.join(SUFFIXES)}) in it")
        sides, labels, classes = _layout(path, names, unit_of)
        key = f"{fingerprint([path], 'image_folder', size, channels)}|{hash_names(tree, names)}"
        arrays = cached_arrays(key, ("images",), lambda: {"images": decode_all(tree, names, size, channels)})
    values, test = torch.from_numpy(arrays["images"]), torch.from_numpy(sides)
    targets = torch.from_numpy(labels)
    units = None if unit_of is None else torch.tensor([unit_of(name) for name in names], dtype=torch.int64)
    whole = Split(Dense(values, pixels), targets, units)
    return DataBundle(
        name=path.stem,
        variant="image folder",
        train=whole.select((~test).nonzero().squeeze(1)),
        test=whole.select(test.nonzero().squeeze(1)),
        classes=classes,
        unit="row" if unit_of is None else "unit",
        fingerprint=f"{key}|{pixels}",
    )


def hash_names(tree: FileTree, names: Sequence[str]) -> str:
    """Names, sizes and times of a folder's files, for the cache; a zip's own size and time say it already."""
    if not tree.origin.is_dir():
        return ""
    stats = (((tree.origin / name).stat(), name) for name in names)
    listing = "|".join(f"{name}:{stat.st_size}:{stat.st_mtime_ns}" for stat, name in stats)
    return hashlib.sha256(listing.encode()).hexdigest()


def _layout(
    path: Path, names: Sequence[str], unit_of: Callable[[str], int] | None
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64], tuple[str, ...]]:
    """For each picture: whether it is for testing, and its class; and the classes."""
    parts = [PurePosixPath(name).parts for name in names]
    tops = {part[0] for part in parts}
    divided = any(top in _TRAIN_FOLDERS for top in tops)
    stray = sorted(tops - {*_TRAIN_FOLDERS, *_TEST_FOLDERS}) if divided else []
    depth = 3 if divided else 2
    shallow = next((name for name, part in zip(names, parts, strict=True) if len(part) < depth), None)
    if stray or shallow:
        raise DataError(
            f"{path}: {stray[0] if stray else shallow} does not fit <class>/<picture> or "
            "train/<class>/<picture> with test/<class>/<picture>"
        )
    folders = [part[depth - 2] for part in parts]
    classes = tuple(sorted(set(folders)))
    if divided:
        test = np.array([part[0] in _TEST_FOLDERS for part in parts])
    else:
        keys = names if unit_of is None else [str(unit_of(name)) for name in names]
        test = np.array([public_share(key) < TEST_FRACTION for key in keys])
    if not test.any() or test.all():
        raise DataError(f"{path}: all pictures fall on one side of the split; add train/ and test/ folders")
    return test, np.array([classes.index(folder) for folder in folders], dtype=np.int64), classes


_REQUIRED = ("x_train", "y_train", "x_test", "y_test")
_ANY_UNIT = "unit"


def npz(
    path: Path | str, classes: tuple[str, ...], pixels: PixelScale = UNIT, unit: str = _ANY_UNIT
) -> DataBundle:
    """Arrays `x_train`, `y_train`, `x_test`, `y_test`, and `units_train`, `units_test` where a unit has several rows.

    Inputs of bytes are scaled by `pixels`, others become float32 as they are. Targets are class numbers. `unit` is
    what a unit is called.
    **Privacy.** `classes` names the classes and is public: it is asked for, because counting them would look at the
    data. Pickled arrays are refused, and so are missing ids of units.
    """
    path = Path(path)
    arrays = _read(path)
    if missing := [name for name in _REQUIRED if name not in arrays]:
        raise DataError(f"{path}: array {missing[0]!r} is missing; expected {', '.join(_REQUIRED)}")
    named = "units_train" in arrays
    if unit not in (_ANY_UNIT, "row") and not named:
        raise DataError(
            f"{path}: unit: got {unit!r}, but there is no units_train; add whose row each is, or rows are protected"
        )
    arrays = _with_numbered_units(arrays, path)
    return DataBundle(
        name=path.stem,
        variant="npz",
        train=_arrays_split(arrays, "train", path, pixels),
        test=_arrays_split(arrays, "test", path, pixels),
        classes=classes,
        unit=unit if named else "row",
        fingerprint=fingerprint([path], "npz", pixels),
        unit_norm=False if arrays["x_train"].ndim == 2 else None,
    )


def is_table(path: Path) -> bool:
    """Whether a file's training inputs are rows of numbers, by the array's header; False if it cannot be read."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open("x_train.npy") as file:
            version = np.lib.format.read_magic(file)
            form = np.lib.format
            read = form.read_array_header_1_0 if version == (1, 0) else form.read_array_header_2_0
            return len(read(file)[0]) == 2
    except (OSError, KeyError, ValueError, zipfile.BadZipFile, zlib.error):
        return False


def _read(path: Path) -> dict[str, npt.NDArray[Any]]:
    if not zipfile.is_zipfile(path):
        raise DataError(f"{path}: cannot be read as an NPZ (missing, truncated, or another kind of file)")
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: cannot be read as an NPZ of plain arrays ({error})") from error


def _with_numbered_units(arrays: dict[str, npt.NDArray[Any]], path: Path) -> dict[str, npt.NDArray[Any]]:
    """Units of any kind (names, numbers) as whole numbers, the same on both sides."""
    sides = [side for side in ("units_train", "units_test") if side in arrays]
    if not sides:
        return arrays
    for side in sides:
        ids, inputs = arrays[side], arrays[side.replace("units", "x")]
        if inputs.ndim and ids.shape != (len(inputs),):
            raise DataError(f"{path}: got {side} of {ids.dtype} {ids.shape}, expected {len(inputs)} ids")
        refuse_missing_ids(ids, f"{path}: {side}")
    numbers = np.unique(np.concatenate([arrays[side] for side in sides]), return_inverse=True)[1].astype(
        np.int64
    )
    parts = np.split(numbers, np.cumsum([len(arrays[side]) for side in sides])[:-1])
    return arrays | dict(zip(sides, parts, strict=True))


def _arrays_split(arrays: dict[str, npt.NDArray[Any]], side: str, path: Path, pixels: PixelScale) -> Split:
    inputs, targets, units = arrays[f"x_{side}"], arrays[f"y_{side}"], arrays.get(f"units_{side}")
    if inputs.dtype.kind not in "fiub" or inputs.ndim < 2:
        raise DataError(
            f"{path}: got x_{side} of {inputs.dtype} {inputs.shape}, expected numbers of shape [N, ...]"
        )
    if targets.dtype.kind not in "iub" or targets.shape != (len(inputs),):
        raise DataError(
            f"{path}: got y_{side} of {targets.dtype} {targets.shape}, expected {len(inputs)} class numbers in the "
            "order of the classes (--classes no,yes: 0 is no, 1 is yes)"
        )
    if inputs.dtype.kind == "f" and not np.isfinite(inputs).all():
        raise DataError(f"{path}: x_{side} has values that are not finite; replace them first")
    dense = (
        Dense(torch.from_numpy(inputs), pixels)
        if inputs.dtype == np.uint8
        else Dense(torch.from_numpy(inputs.astype(np.float32)))
    )
    owners = None if units is None else torch.from_numpy(units)
    return Split(dense, torch.from_numpy(targets.astype(np.int64)), owners)
