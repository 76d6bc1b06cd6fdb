"""Integers with exactly the law of a rounded Gaussian, by integer comparisons of random words.

The standard deviation is a power of two, 2^s, so that rounding 2^s Z means cutting off binary digits of Z. Z is
drawn by rejection under a staircase (von Neumann 1951): |Z| falls into cells of width w = 2^-6. Cell j is
proposed with probability proportional to the density at its left edge, exp(-(j w)^2 / 2). A uniform place f in
[0, 1) inside it is kept with probability exp(-w^2 f (j + f / 2)), the density there over that at the edge.

A proposal takes one 64-bit word: a sign, the first digits of the number that chooses the cell, those of the place in
it, and those of the lot that keeps it: 1 + 15 + 40 + 8. The signed cell is written over the digits that chose it; the
word then is the number in two's complement, and rounding it is one addition and one shift. Whatever the first digits
leave open is settled by further digits, in decimal arithmetic of as much precision as that takes: the law has no
error term.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from decimal import Decimal, localcontext
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from sparsedp.errors import PrivacyError

Integers = npt.NDArray[np.int64]
Digits = npt.NDArray[np.uint64]
Words = Callable[[int], Digits]
"""Gives that many fresh, independent, uniform 64-bit words."""

WORD = 64
CELL_BITS = 6
"""Cells are 2^-6 wide."""
HEAD, PLACE, LOT = 16, 40, 8
"""Digits of a word for sign and cell, for the place, for the lot."""
MOST_BITS = CELL_BITS + PLACE - 1
"""The largest s there are digits for: rounding takes one digit more."""
AT_ONCE = 1 << 16
"""Draws at a time, so that their words stay in the cache."""

PLACE_BITS, LOT_BITS = 48, 53
"""Digits of place and lot by which most of what one word leaves open is settled in float64."""
FAR_CELL = 1 << 10
DOUBT = 2.0**-44
"""How far a lot of 53 digits must be from the chance to be kept, in float64, to settle the matter below `FAR_CELL`.

Further digits move the chance by at most 2^-12 (j + 1) 2^-48 <= 2^-50, and the lot by 2^-53. As x <= 1/4, Taylor's
remainder is at most x^12 / 12! < 2^-52; the additions and multiplications, exact to 2^-53 each, add less than 2^-48.
"""

_LITTLE = sys.byteorder == "little"
_HEADS, _LOTS = (slice(3, None, 4), slice(0, None, 8)) if _LITTLE else (slice(0, None, 4), slice(7, None, 8))
_CELL, _SURE = (slice(0, None, 2), slice(2, None, 4)) if _LITTLE else (slice(1, None, 2), slice(1, None, 4))
"""Where the parts of words, and of the table's entries, stand among 16-bit and 8-bit numbers."""


def rounded_gaussian(bits: int, size: int, words: Words) -> Integers:
    """`size` independent integers, each an ideal Gaussian number of standard deviation 2^bits, rounded."""
    noise = np.zeros(size, dtype=np.int64)
    add_rounded_gaussian(bits, noise, words)
    return noise


def add_rounded_gaussian(bits: int, sums: Integers, words: Words) -> None:
    """Add such an integer to each of `sums`, in place.

    Edge cases: How many words are taken depends on the words alone, so equal words give equal integers.
    """
    if not 0 <= bits <= MOST_BITS:
        raise PrivacyError(f"noise of 2^{bits} grid steps: expected 2^0 to 2^{MOST_BITS}")
    index, room = np.empty((2, min(AT_ONCE, len(sums))), dtype=np.int64)
    where, taken, added = [], [], []
    for start in range(0, len(sums), AT_ONCE):
        part = sums[start : start + AT_ONCE]
        drawn, noise = words(len(part)), room[: len(part)]
        unsettled = _propose(bits, drawn, index[: len(part)], noise)
        part += noise
        where.append(unsettled + start)
        taken.append(drawn[unsettled])
        added.append(noise[unsettled])
    if any(map(len, where)):
        sums[np.concatenate(where)] += _settled(bits, np.concatenate(taken), words) - np.concatenate(added)


def _propose(bits: int, drawn: Digits, index: Integers, out: Integers) -> Integers:
    """Fill `out` from words; returns the positions of those that these digits do not settle."""
    np.right_shift(drawn, np.uint64(WORD - HEAD), out=index.view(np.uint64))
    entries = _table().take(index, mode="clip")
    np.copyto(out, drawn.view(np.int64))
    out.view(np.int16)[_HEADS] = entries.view(np.int16)[_CELL]
    _round(bits, out)
    unsettled: Integers = np.flatnonzero(drawn.view(np.uint8)[_LOTS] >= entries.view(np.uint8)[_SURE])
    return unsettled


def _settled(bits: int, drawn: Digits, words: Words) -> Integers:
    """The integers that unsettled words give with further digits; refused ones are drawn again."""
    below = drawn.view(np.int64) >> np.int64(WORD - 1)
    cells, further = _cells(drawn, words), words(len(drawn))
    numbers = (drawn & np.uint64(2 ** (WORD - HEAD) - 1)).view(np.int64)
    numbers |= (cells ^ below) << np.int64(WORD - HEAD)
    _round(bits, numbers)
    places = (drawn ^ below.view(np.uint64)) >> np.uint64(LOT) & np.uint64(2**PLACE - 1)
    places = places << np.uint64(PLACE_BITS - PLACE) | further & np.uint64(2 ** (PLACE_BITS - PLACE) - 1)
    lots = (drawn & np.uint64(2**LOT - 1)) << np.uint64(LOT_BITS - LOT)
    lots |= further >> np.uint64(WORD - LOT_BITS + LOT)
    refused = ~_kept(cells, places, lots, words)
    if refused.any():
        numbers[refused] = rounded_gaussian(bits, int(np.count_nonzero(refused)), words)
    return numbers


def _round(bits: int, numbers: Integers) -> None:
    """Round numbers whose cell stands in their first 16 digits to integers, in place."""
    dropped = CELL_BITS + WORD - HEAD - bits
    numbers += np.int64(1 << (dropped - 1))
    numbers >>= np.int64(dropped)


def _kept(cells: Integers, places: Digits, lots: Digits, words: Words) -> npt.NDArray[np.bool_]:
    """Which proposals are kept: those whose lot is below exp(-w^2 f (j + f/2))."""
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


def keeps(cell: int, place: tuple[int, int], lot: tuple[int, int], words: Words) -> bool:
    """Whether a lot in [0, 1) keeps a place in a cell; both are given as (first digits, how many), binary."""
    (f, f_bits), (u, u_bits) = place, lot
    while True:
        more = words(2)
        f, f_bits = f << WORD | int(more[0]), f_bits + WORD
        u, u_bits = u << WORD | int(more[1]), u_bits + WORD
        with localcontext() as context:
            context.prec = _decimals(f_bits + u_bits)
            slack = Decimal(2) ** -(u_bits + 16)
            most, least = (_chance(cell, Decimal(end) / 2**f_bits) for end in (f, f + 1))
            if Decimal(u + 1) / 2**u_bits <= least - slack:
                return True
            if Decimal(u) / 2**u_bits >= most + slack:
                return False


def _chance(cell: int, place: Decimal) -> Decimal:
    return (-place * (cell + place / 2) / Decimal(4) ** CELL_BITS).exp()


def _cells(drawn: Digits, words: Words) -> Integers:
    """The cells that words fall into, by further digits where the first 15 are not enough."""
    entries = _table()[drawn >> np.uint64(WORD - HEAD)]
    signed = entries.view(np.int16)[_CELL].astype(np.int64)
    cells: Integers = signed ^ (signed >> np.int64(WORD - 1))
    split = np.flatnonzero(entries < 2**HEAD)
    if len(split):
        digits = drawn[split] << np.uint64(1) & ~np.uint64(2 ** (WORD - HEAD + 1) - 1)
        digits |= words(len(split)) >> np.uint64(HEAD - 1)
        ends = cell_ends()
        found = np.searchsorted(ends, digits).astype(np.int64)
        for hit in np.flatnonzero((ends[found] == digits) | (found == len(ends) - 1)):
            found[hit] = cell_of(int(digits[hit]), words)
        cells[split] = found
    return cells


def cell_of(word: int, words: Words) -> int:
    """The cell of the real number in [0, 1) whose first 64 binary digits are `word`, the others drawn as needed."""
    lots, bits = word, WORD
    while True:
        lots, bits = lots << WORD | int(words(1)[0]), bits + WORD
        for cell, (start, end) in enumerate(pairwise((-2, *boundaries(bits)))):
            if start + 1 < lots < end - 1:
                return cell


@lru_cache(maxsize=4)
def boundaries(bits: int) -> tuple[int, ...]:
    """Where the cells end among 2^bits equal lots: cell j has the lots from boundary j-1 to boundary j.

    Rounded down, from numbers whose error is below 2^-32 lots; the cells past the last boundary share its last lots.
    """
    with localcontext() as context:
        context.prec = _decimals(bits)
        half_square = Decimal(2) ** -(2 * CELL_BITS + 1)
        heights: list[Decimal] = []
        least = Decimal(2) ** -(bits + 48)
        while not heights or heights[-1] > least:
            heights.append((-half_square * len(heights) ** 2).exp())
        sums = list(accumulate(heights))
        return tuple(int(part / sums[-1] * 2**bits) for part in sums[:-1])


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


@lru_cache(maxsize=1)
def _table() -> npt.NDArray[np.uint32]:
    """For the first 16 digits of a word: the signed cell, and before it a lot below which any place in it is kept.

    That lot is 0 where further digits decide the cell.
    """
    ends, digits = cell_ends(), HEAD - 1
    starts = np.arange(2**digits, dtype=np.uint64) << np.uint64(WORD - digits)
    cells = np.searchsorted(ends, starts)
    cells[ends[cells] <= starts + np.uint64(2 ** (WORD - digits) - 1)] = -1
    sure = np.array([_surely_kept(cell) for cell in range(int(cells.max()) + 1)], dtype=np.uint32)
    lots = np.where(cells < 0, np.uint32(0), sure[cells]) << np.uint32(HEAD)
    signed = cells.astype(np.int16)
    return np.concatenate([cell.view(np.uint16) | lots for cell in (signed, ~signed)]).astype(np.uint32)


def _surely_kept(cell: int) -> int:
    """A whole number below 2^LOT times the chance to be kept anywhere in the cell, by less than 2."""
    with localcontext() as context:
        context.prec = _decimals(LOT)
        return int(_chance(cell, Decimal(1)) * 2**LOT - Decimal(2) ** -32)


def _decimals(bits: int) -> int:
    """Decimal digits that hold so many bits, and 30 to spare for the rounding of some thousand additions."""
    return bits * 302 // 1000 + 30
