"""How a step's units are cut into micro-batches: by who they are, so that one unit more or less moves no other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt


def cut(units: npt.NDArray[np.int64], most: int | None) -> list[slice]:
    """Cut increasing unit numbers into runs of at most `most`; without a limit, one run. No run is empty.

    Ranges of numbers with the same first binary digits are halved until no more than `most` units are in one.

    **Privacy.** A unit that is added joins one run, or makes two of it; no other run changes. So each micro-batch's
    sum may be rounded by itself (`privacy.grid`). The rule knows neither N nor how many machines share the work.
    """
    if most is not None and most < 1:
        raise ValueError(f"most: got {most}, expected a whole number >= 1")
    return list(_halve(units, 0, len(units), len(units) if most is None else most))


def _halve(units: npt.NDArray[np.int64], start: int, stop: int, most: int) -> Iterator[slice]:
    if start == stop:
        return
    if stop - start <= most:
        yield slice(start, stop)
        return
    first, last = int(units[start]), int(units[stop - 1])
    digit = (first ^ last).bit_length() - 1
    middle = start + int(np.searchsorted(units[start:stop], last >> digit << digit))
    yield from _halve(units, start, middle, most)
    yield from _halve(units, middle, stop, most)
