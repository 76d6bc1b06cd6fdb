"""Public scores in a file: arrays by parameter name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load_file

from sparsedp.errors import DataError


def read_scores(path: Path) -> Mapping[str, Any]:
    """The arrays of an `.npz` or `.safetensors` file, by name.

    Raises:
        DataError: there is no such file, or it is neither.
    """
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, ValueError, BadZipFile, SafetensorError, TypeError) as error:
        raise DataError(
            f"public_scores: {path} cannot be read ({error}); expected an .npz or .safetensors file of arrays by "
            "parameter name"
        ) from error
