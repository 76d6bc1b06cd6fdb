"""A user's own arrays from an NPZ file."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sparsedp.core.errors import DataError
from sparsedp.datasets.bundle import DataBundle, Split
from sparsedp.datasets.features import UNIT, Dense, PixelScale
from sparsedp.datasets.files import fingerprint

_REQUIRED = ("x_train", "y_train", "x_test", "y_test")


def npz(
    path: Path | str, classes: tuple[str, ...], pixels: PixelScale = UNIT, unit: str = "unit"
) -> DataBundle:
    """Arrays `x_train`, `y_train`, `x_test`, `y_test`, and `units_train`, `units_test` where a unit has several rows.

    Inputs of bytes are scaled by `pixels`, others become float32 as they are. Targets are class numbers.
    **Privacy.** `classes` names the classes and is public: it is asked for, because counting them would look at the
    data. Pickled arrays are refused.
    """
    path = Path(path)
    arrays = _with_numbered_units(_read(path))
    if missing := [name for name in _REQUIRED if name not in arrays]:
        raise DataError(f"{path}: array {missing[0]!r} is missing; expected {', '.join(_REQUIRED)}")
    named, is_table = "units_train" in arrays, arrays["x_train"].ndim == 2
    return DataBundle(
        name=path.stem,
        variant="npz",
        train=_split(arrays, "train", path, pixels),
        test=_split(arrays, "test", path, pixels),
        classes=classes,
        unit=unit if named else "row",
        fingerprint=fingerprint([path], "npz", pixels),
        unit_norm=False if is_table else None,
    )


def _read(path: Path) -> dict[str, npt.NDArray[Any]]:
    if not zipfile.is_zipfile(path):
        raise DataError(f"{path}: cannot be read as an NPZ (missing, truncated, or another kind of file)")
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: cannot be read as an NPZ of plain arrays ({error})") from error


def _with_numbered_units(arrays: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Units of any kind (names, numbers) as whole numbers, the same on both sides."""
    sides = [side for side in ("units_train", "units_test") if side in arrays]
    if not sides:
        return arrays
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
    if targets.dtype.kind not in "iu" or targets.shape != (len(inputs),):
        raise DataError(
            f"{path}: got y_{side} of {targets.dtype} {targets.shape}, expected {len(inputs)} class numbers"
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
