"""A user's own arrays from an NPZ file."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sparsedp._validate import refuse_missing_ids
from sparsedp.errors import DataError
from sparsedp_experiments.data.bundle import DataBundle, Split
from sparsedp_experiments.data.features import UNIT, Dense, PixelScale
from sparsedp_experiments.data.files import fingerprint

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
        train=_split(arrays, "train", path, pixels),
        test=_split(arrays, "test", path, pixels),
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


def _split(arrays: dict[str, npt.NDArray[Any]], side: str, path: Path, pixels: PixelScale) -> Split:
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
