"""Proposals of rounded Gaussian integers from one random word each, in few passes over memory.

A word is a sign, the first digits of the number that chooses a cell, those of the place in it, and those of the lot
that keeps the place: 1 + 15 + 40 + 8. The cell, or its complement below zero, is written over the digits that chose
it. The word then *is* the number, in two's complement, and rounding it is one addition and one shift. Below zero the
digits of the place count backwards, which for random digits is the same.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sparsedp.core.gaussian_cells import CELL_BITS, WORD, surely_kept
from sparsedp.core.gaussian_lots import LOT_BITS, PLACE_BITS, Digits, Integers, cells_of, guide, kept

if TYPE_CHECKING:
    from sparsedp.randomness import Words


HEAD, PLACE, LOT = 16, 40, 8
"""Digits of a word for sign and cell, for the place, for the lot."""

MOST_BITS = CELL_BITS + PLACE - 1
"""The largest s: rounding takes one digit more."""

AT_ONCE = 1 << 16
"""Draws at a time, so that their words stay in the cache."""

_LITTLE = sys.byteorder == "little"
_HEADS, _LOTS = (slice(3, None, 4), slice(0, None, 8)) if _LITTLE else (slice(0, None, 4), slice(7, None, 8))
_CELL, _SURE = (slice(0, None, 2), slice(2, None, 4)) if _LITTLE else (slice(1, None, 2), slice(1, None, 4))
"""Where the parts of words, and of the table's entries, stand among 16-bit and 8-bit numbers."""


def add(bits: int, sums: Integers, words: Words) -> None:
    """Add a rounded Gaussian integer of standard deviation 2^bits to each of `sums`, in place."""
    index, room = np.empty((2, min(AT_ONCE, len(sums))), dtype=np.int64)
    where, taken, added = [], [], []
    for start in range(0, len(sums), AT_ONCE):
        part = sums[start : start + AT_ONCE]
        drawn, noise = words(len(part)), room[: len(part)]
        open_ = _propose(bits, drawn, index[: len(part)], noise)
        part += noise
        where.append(open_ + start)
        taken.append(drawn[open_])
        added.append(noise[open_])
    if any(map(len, where)):
        sums[np.concatenate(where)] += _settled(bits, np.concatenate(taken), words) - np.concatenate(added)


def _propose(bits: int, drawn: Digits, index: Integers, out: Integers) -> Integers:
    """Fill `out` from words; gives the places of those that these digits do not settle."""
    np.right_shift(drawn, np.uint64(WORD - HEAD), out=index.view(np.uint64))
    entries = _table().take(index, mode="clip")
    np.copyto(out, drawn.view(np.int64))
    out.view(np.int16)[_HEADS] = entries.view(np.int16)[_CELL]
    _round(bits, out)
    open_: Integers = np.flatnonzero(drawn.view(np.uint8)[_LOTS] >= entries.view(np.uint8)[_SURE])
    return open_


def _settled(bits: int, drawn: Digits, words: Words) -> Integers:
    """What open words come to, by further digits; those that are refused are drawn again."""
    below = drawn.view(np.int64) >> np.int64(WORD - 1)
    cells, further = _cells(drawn, words), words(len(drawn))
    numbers = (drawn & np.uint64(2 ** (WORD - HEAD) - 1)).view(np.int64)
    numbers |= (cells ^ below) << np.int64(WORD - HEAD)
    _round(bits, numbers)
    places = (drawn ^ below.view(np.uint64)) >> np.uint64(LOT) & np.uint64(2**PLACE - 1)
    places = places << np.uint64(PLACE_BITS - PLACE) | further & np.uint64(2 ** (PLACE_BITS - PLACE) - 1)
    lots = (drawn & np.uint64(2**LOT - 1)) << np.uint64(LOT_BITS - LOT)
    lots |= further >> np.uint64(WORD - LOT_BITS + LOT)
    refused = ~kept(cells, places, lots, words)
    if refused.any():
        again = np.zeros(np.count_nonzero(refused), dtype=np.int64)
        add(bits, again, words)
        numbers[refused] = again
    return numbers


def _round(bits: int, numbers: Integers) -> None:
    """Numbers whose cell stands in their first 16 digits as integers, in place."""
    dropped = CELL_BITS + WORD - HEAD - bits
    numbers += np.int64(1 << (dropped - 1))
    numbers >>= np.int64(dropped)


def _cells(drawn: Digits, words: Words) -> Integers:
    """Their cells, by further digits where the first are not enough."""
    entries = _table()[drawn >> np.uint64(WORD - HEAD)]
    signed = entries.view(np.int16)[_CELL].astype(np.int64)
    cells: Integers = signed ^ (signed >> np.int64(WORD - 1))
    split = np.flatnonzero(entries < 2**HEAD)
    if len(split):
        digits = drawn[split] << np.uint64(1) & ~np.uint64(2 ** (WORD - HEAD + 1) - 1)
        cells[split] = cells_of(digits | words(len(split)) >> np.uint64(HEAD - 1), words)
    return cells


@lru_cache(maxsize=1)
def _table() -> npt.NDArray[np.uint32]:
    """Of the first 16 digits of a word: the signed cell, and before it a lot below which any place in it is kept.

    That is 0 where further digits decide the cell.
    """
    cells = guide(HEAD - 1)
    sure = np.array([surely_kept(cell, LOT) for cell in range(int(cells.max()) + 1)], dtype=np.uint32)
    lots = np.where(cells < 0, np.uint32(0), sure[cells]) << np.uint32(HEAD)
    return np.concatenate([cell.view(np.uint16) | lots for cell in (cells, ~cells)]).astype(np.uint32)
