"""Ids of people: every row has one."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sparsedp.core.errors import DataError

_MISSING = ("", "nan", "NaN", "None", "NaT", "<NA>")
"""A missing id as text; the words are those of Python, NumPy and pandas."""


def refuse_missing_ids(ids: npt.NDArray[Any], name: str) -> None:
    """Refuse ids of which some are missing, also where that was turned into text.

    **Privacy.** All missing ids would be one unit, and a person with ids on some rows only would be in two.

    Raises:
        DataError: how many are missing.
    """
    if ids.dtype.kind in "iub":
        return
    texts = np.char.decode(ids, "latin-1") if ids.dtype.kind == "S" else ids.astype(str)
    missing = int(np.isin(np.char.strip(texts), _MISSING).sum())
    if missing:
        raise DataError(
            f"{name}: {missing} ids are missing; every row needs one (give each unknown its own, if unknown rows "
            "belong to different people)"
        )
