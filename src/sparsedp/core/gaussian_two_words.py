"""Proposals of rounded Gaussian integers from two random words each: one for the cell, one for the place in it."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sparsedp.core import gaussian_lots
from sparsedp.core.gaussian_cells import CELL_BITS, WORD, surely_kept
from sparsedp.core.gaussian_lots import PLACE_BITS, Digits, Integers, cell_ends, cells_of, guide, kept

if TYPE_CHECKING:
    from sparsedp.randomness import Words


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

_Open = tuple[Integers, Integers, Digits, Digits]
"""Proposals by place in the output, cell, place in the cell, and lot."""


def add(bits: int, sums: Integers, words: Words) -> None:
    """Add a rounded Gaussian integer of standard deviation 2^bits to each of `sums`, in place."""
    noise = np.empty(len(sums), dtype=np.int64)
    waiting = _propose(bits, noise, words)
    while len(waiting):
        again = np.empty(len(waiting), dtype=np.int64)
        refused = _propose(bits, again, words)
        noise[waiting] = again
        waiting = waiting[refused]
    sums += noise


def _propose(bits: int, out: Integers, words: Words) -> Integers:
    """Fill `out` with proposals of standard deviation 2^bits; gives the places of those that were not kept."""
    starts = range(0, len(out), AT_ONCE)
    open_ = [_propose_some(bits, out[start : start + AT_ONCE], start, words) for start in starts]
    where, cells, places, lots = (
        open_[0] if len(open_) == 1 else map(np.concatenate, zip(*open_, strict=True))
    )
    if not len(where):
        return where
    missing = np.uint64(gaussian_lots.LOT_BITS - LOT_BITS)
    lots = (lots << missing) | (words(len(cells)) >> (np.uint64(WORD) - missing))
    return where[~kept(cells, places, lots, words)]


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
    (open_,) = (lots >= _sure().take(cells, mode="clip")).nonzero()
    return first + open_, cells[open_].astype(np.int64), within[open_], lots[open_].astype(np.uint64)


def _choose_cells(drawn: Digits, words: Words) -> npt.NDArray[np.int16]:
    cells = _guide().take(_quarter(drawn, _FIRST))
    (split,) = (cells < 0).nonzero()
    cells[split] = cells_of(drawn[split], words)
    return cells


def _quarter(drawn: Digits, which: int) -> npt.NDArray[np.uint16]:
    return drawn.view(np.uint16)[which::_QUARTERS]


@lru_cache(maxsize=1)
def _guide() -> npt.NDArray[np.int16]:
    return guide(GUIDE_BITS)


@lru_cache(maxsize=1)
def _sure() -> npt.NDArray[np.uint16]:
    """Of a cell, a lot below which any place in it is kept; 0 in the last, which stands for all further ones."""
    last = len(cell_ends()) - 1
    return np.array([*(surely_kept(cell, LOT_BITS) for cell in range(last)), 0], dtype=np.uint16)
