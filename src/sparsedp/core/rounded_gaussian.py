"""Integers with exactly the law of a rounded Gaussian, by integer comparisons of random words.

The standard deviation is a power of two, 2^s, so that to round 2^s Z is to cut off binary digits of Z. Z itself is
drawn by rejection under a staircase (`gaussian_cells`). Whatever the first digits leave open, less than once in 2^40
draws, is settled by further random digits at as much precision as that takes: the law has no error term.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from sparsedp.core.errors import PrivacyError
from sparsedp.core.gaussian_cells import CELL_BITS, WORD, boundaries, cell_of, keeps, surely_kept
from sparsedp.core.uniform import Words

PLACE_BITS = 48
LOT_BITS = WORD - 1 - PLACE_BITS
"""A word is a sign, the first digits of a place in a cell, and the first digits of the lot that keeps the place."""

MOST_BITS = CELL_BITS + PLACE_BITS - 1
"""The largest s: rounding takes one digit more."""

AT_ONCE = 1 << 15
"""Draws at a time, so that their words stay in the cache."""

GUIDE_BITS = 16
"""First digits of a word, which settle its cell but for the few in whose range one ends."""

_QUARTERS = 4
_FIRST, _LAST = (3, 0) if sys.byteorder == "little" else (0, 3)
"""Where a word's first and last 16 digits stand among its quarters."""

FAR_CELL = 1 << 10
DOUBT = 2.0**-44
"""How far a lot of 53 digits must be from the chance to be kept, in float64, to settle the matter below `FAR_CELL`.

Further digits move the chance by at most 2^-12 (j + 1) 2^-48 <= 2^-50, and the lot by 2^-53. As x <= 1/4, Taylor's
remainder is at most x^12 / 12! < 2^-52; the additions and multiplications, exact to 2^-53 each, add less than 2^-48.
"""

Integers = npt.NDArray[np.int64]
_Digits = npt.NDArray[np.uint64]
_Open = tuple[Integers, Integers, _Digits, _Digits]
"""Proposals by place in the output, cell, place in the cell, and lot."""


def rounded_gaussian(bits: int, size: int, words: Words) -> Integers:
    """`size` independent integers, each an ideal Gaussian number of standard deviation 2^bits, rounded.

    **Edge cases.** How many words are taken depends on the words alone, so equal words give equal integers.

    Raises:
        PrivacyError: 2^bits is finer than the digits drawn.
    """
    noise = np.zeros(size, dtype=np.int64)
    add_rounded_gaussian(bits, noise, words)
    return noise


def add_rounded_gaussian(bits: int, sums: Integers, words: Words, lot: int = AT_ONCE) -> None:
    """Add such an integer to each of `sums`, in place; `lot` of them are drawn before the refused are drawn again.

    Raises:
        PrivacyError: 2^bits is finer than the digits drawn.
    """
    room = np.empty(min(lot, len(sums)), dtype=np.int64)
    for start in range(0, len(sums), lot):
        part = sums[start : start + lot]
        noise = room[: len(part)]
        _draw(bits, noise, words)
        part += noise


def _draw(bits: int, out: Integers, words: Words) -> None:
    """Fill `out` with independent rounded Gaussian integers; those that are refused are drawn again together."""
    if not 0 <= bits <= MOST_BITS:
        raise PrivacyError(f"noise of 2^{bits} grid steps: expected 2^0 to 2^{MOST_BITS}")
    waiting = _propose(bits, out, words)
    while len(waiting):
        again = np.empty(len(waiting), dtype=np.int64)
        refused = _propose(bits, again, words)
        out[waiting] = again
        waiting = waiting[refused]


def _propose(bits: int, out: Integers, words: Words) -> Integers:
    """Fill `out` with proposals; gives the places of those that were not kept."""
    starts = range(0, len(out), AT_ONCE)
    open_ = [_propose_some(bits, out[start : start + AT_ONCE], start, words) for start in starts]
    where, cells, places, lots = (
        open_[0] if len(open_) == 1 else map(np.concatenate, zip(*open_, strict=True))
    )
    return where[~_kept(cells, places, lots, words)] if len(where) else where


def _propose_some(bits: int, out: Integers, first: int, words: Words) -> _Open:
    """Fill `out`, which starts at place `first`; gives those that the first digits of their lot do not settle."""
    drawn = words(2 * len(out))
    cells, digits = _choose_cells(drawn[: len(out)], words), drawn[len(out) :]
    within = digits >> np.uint64(LOT_BITS)
    within &= np.uint64(2**PLACE_BITS - 1)
    dropped = CELL_BITS + PLACE_BITS - bits
    np.copyto(out, cells)
    out <<= np.int64(PLACE_BITS)
    out += within.view(np.int64)
    out += np.int64(1 << (dropped - 1))
    out >>= np.int64(dropped)
    sign = digits.view(np.int64) >> np.int64(WORD - 1)
    out ^= sign
    out -= sign
    lots = _quarter(digits, _LAST) & np.uint16(2**LOT_BITS - 1)
    (open_,) = (lots >= _table().sure.take(cells, mode="clip")).nonzero()
    return first + open_, cells[open_].astype(np.int64), within[open_], lots[open_].astype(np.uint64)


def _choose_cells(drawn: _Digits, words: Words) -> npt.NDArray[np.int16]:
    """The cells that random numbers in [0, 1) fall into, from their first 64 digits and more where an end is hit.

    Sixteen bits hold any cell that fewer than a hundred thousand random digits can lead to.
    """
    table = _table()
    cells = table.guide.take(_quarter(drawn, _FIRST))
    (split,) = (cells < 0).nonzero()
    near = drawn[split]
    found = np.searchsorted(table.ends, near)
    cells[split] = found
    for hit in split[(table.ends[found] == near) | (found == len(table.ends) - 1)]:
        cells[hit] = cell_of(int(drawn[hit]), words)
    return cells


def _quarter(drawn: _Digits, which: int) -> npt.NDArray[np.uint16]:
    return drawn.view(np.uint16)[which::_QUARTERS]


def _kept(cells: Integers, places: _Digits, lots: _Digits, words: Words) -> npt.NDArray[np.bool_]:
    """Which proposals are kept: the lot is below exp(-w^2 f (j + f/2))."""
    lots = (lots << np.uint64(53 - LOT_BITS)) | (words(len(cells)) >> np.uint64(WORD - 53 + LOT_BITS))
    f: npt.NDArray[np.float64] = places.astype(np.float64) * 2.0**-PLACE_BITS
    chance = _exp_of_minus(f * (cells + 0.5 * f) * 0.25**CELL_BITS)
    distance = chance - lots.astype(np.float64) * 2.0**-53
    kept: npt.NDArray[np.bool_] = distance > 0
    for i in np.flatnonzero((np.abs(distance) <= DOUBT) | (cells >= FAR_CELL)):
        kept[i] = keeps(int(cells[i]), (int(places[i]), PLACE_BITS), (int(lots[i]), 53), words)
    return kept


def _exp_of_minus(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Taylor's polynomial of degree 11, since an error bound is known for it."""
    result = np.ones_like(x)
    for power in range(11, 0, -1):
        result *= x
        result *= -1.0 / power
        result += 1.0
    return result


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """What 64 digits settle.

    Attributes:
        ends: the words in which a cell ends. The last word of all stands for the end of all further cells together.
        guide: of the first digits of a word, its cell; -1 where further digits decide.
        sure: of a cell, a lot below which any place in it is kept; 0 in the last.
    """

    ends: _Digits
    guide: npt.NDArray[np.int16]
    sure: npt.NDArray[np.uint16]


@lru_cache(maxsize=1)
def _table() -> _Table:
    fine = boundaries(2 * WORD)
    last = next(i for i, end in enumerate(fine) if end >> WORD >= 2**WORD - 2**10)
    settled = all(2**32 < end % 2**WORD < 2**WORD - 2**32 for end in fine[:last])
    tops = [end >> WORD for end in fine[:last]]
    if not settled or any(left >= right for left, right in pairwise(tops)):
        raise PrivacyError("the sampler's table is ambiguous in its last digit; this is a bug in sparsedp")
    ends = np.array([*tops, 2**WORD - 1], dtype=np.uint64)
    starts = np.arange(2**GUIDE_BITS, dtype=np.uint64) << np.uint64(WORD - GUIDE_BITS)
    stops = starts + np.uint64(2 ** (WORD - GUIDE_BITS) - 1)
    guide = np.searchsorted(ends, starts)
    guide[ends[guide] <= stops] = -1
    sure = [surely_kept(cell, LOT_BITS) for cell in range(last)]
    return _Table(ends, guide.astype(np.int16), np.array([*sure, 0], dtype=np.uint16))
