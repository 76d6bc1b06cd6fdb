"""Which proposals of a place under the staircase are kept, and which cell a word falls into: many at a time.

What float64 or 64 digits leave open is settled by `gaussian_cells`, one by one, with as many further digits as it
takes.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sparsedp.core.gaussian_cells import CELL_BITS, WORD, boundaries, cell_of, keeps
from sparsedp.errors import PrivacyError

if TYPE_CHECKING:
    from sparsedp.randomness import Words


PLACE_BITS = 48
LOT_BITS = 53
"""Digits of a place in a cell, and of the lot that keeps it, by which most are settled."""

FAR_CELL = 1 << 10
DOUBT = 2.0**-44
"""How far a lot of 53 digits must be from the chance to be kept, in float64, to settle the matter below `FAR_CELL`.

Further digits move the chance by at most 2^-12 (j + 1) 2^-48 <= 2^-50, and the lot by 2^-53. As x <= 1/4, Taylor's
remainder is at most x^12 / 12! < 2^-52; the additions and multiplications, exact to 2^-53 each, add less than 2^-48.
"""

Integers = npt.NDArray[np.int64]
Digits = npt.NDArray[np.uint64]


def kept(cells: Integers, places: Digits, lots: Digits, words: Words) -> npt.NDArray[np.bool_]:
    """Which proposals are kept: the lot is below exp(-w^2 f (j + f/2))."""
    f: npt.NDArray[np.float64] = places.astype(np.float64) * 2.0**-PLACE_BITS
    chance = _exp_of_minus(f * (cells + 0.5 * f) * 0.25**CELL_BITS)
    distance = chance - lots.astype(np.float64) * 2.0**-LOT_BITS
    below: npt.NDArray[np.bool_] = distance > 0
    for i in np.flatnonzero((np.abs(distance) <= DOUBT) | (cells >= FAR_CELL)):
        below[i] = keeps(int(cells[i]), (int(places[i]), PLACE_BITS), (int(lots[i]), LOT_BITS), words)
    return below


def _exp_of_minus(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Taylor's polynomial of degree 11, since an error bound is known for it."""
    result = np.ones_like(x)
    for power in range(11, 0, -1):
        result *= x
        result *= -1.0 / power
        result += 1.0
    return result


def cells_of(numbers: Digits, words: Words) -> Integers:
    """The cells that random numbers in [0, 1) fall into, from their first 64 digits and more where an end is hit."""
    ends = cell_ends()
    found: Integers = np.searchsorted(ends, numbers).astype(np.int64)
    for hit in np.flatnonzero((ends[found] == numbers) | (found == len(ends) - 1)):
        found[hit] = cell_of(int(numbers[hit]), words)
    return found


@lru_cache(maxsize=1)
def cell_ends() -> Digits:
    """The words in which a cell ends. The last word of all stands for the end of all further cells together."""
    fine = boundaries(2 * WORD)
    last = next(i for i, end in enumerate(fine) if end >> WORD >= 2**WORD - 2**10)
    settled = all(2**32 < end % 2**WORD < 2**WORD - 2**32 for end in fine[:last])
    tops = [end >> WORD for end in fine[:last]]
    if not settled or any(left >= right for left, right in pairwise(tops)):
        raise PrivacyError("the sampler's table is ambiguous in its last digit; this is a bug in sparsedp")
    return np.array([*tops, 2**WORD - 1], dtype=np.uint64)


def guide(digits: int) -> npt.NDArray[np.int16]:
    """Of the first so many digits of a number in [0, 1) its cell; -1 where further digits decide.

    Sixteen bits hold any cell that fewer than a hundred thousand random digits can lead to.
    """
    ends = cell_ends()
    starts = np.arange(2**digits, dtype=np.uint64) << np.uint64(WORD - digits)
    stops = starts + np.uint64(2 ** (WORD - digits) - 1)
    cells = np.searchsorted(ends, starts)
    cells[ends[cells] <= stops] = -1
    return cells.astype(np.int16)
