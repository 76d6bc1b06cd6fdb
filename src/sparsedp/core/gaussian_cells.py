"""The staircase above the half normal density, and its two questions answered exactly, by as many bits as they take.

|Z| falls into cells of width w = 2^-6. Cell j is proposed with probability proportional to the density at its left
edge, exp(-(j w)^2 / 2); a uniform place f in [0, 1) inside it is kept with probability exp(-w^2 f (j + f / 2)), which
is the density there over that at the edge. What is kept has the half normal law (rejection, von Neumann 1951).
"""

from __future__ import annotations

from decimal import Decimal, localcontext
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparsedp.randomness import Words


CELL_BITS = 6
"""Cells are 2^-6 wide."""

WORD = 64


def _digits(bits: int) -> int:
    """Decimal digits that hold so many bits, and 30 to spare for the rounding of some thousand additions."""
    return bits * 302 // 1000 + 30


@lru_cache(maxsize=4)
def boundaries(bits: int) -> tuple[int, ...]:
    """Where the cells end among 2^bits equal lots: cell j has the lots from boundary j-1 to boundary j.

    Rounded down, from numbers whose error is below 2^-32 lots; the cells past the last boundary share its last lots.
    """
    with localcontext() as context:
        context.prec = _digits(bits)
        half_square = Decimal(2) ** -(2 * CELL_BITS + 1)
        heights: list[Decimal] = []
        least = Decimal(2) ** -(bits + 48)
        while not heights or heights[-1] > least:
            heights.append((-half_square * len(heights) ** 2).exp())
        sums = list(accumulate(heights))
        return tuple(int(part / sums[-1] * 2**bits) for part in sums[:-1])


def cell_of(word: int, words: Words) -> int:
    """The cell of the real number in [0, 1) whose first 64 binary digits are `word`, the others drawn as needed."""
    lots, bits = word, WORD
    while True:
        lots, bits = lots << WORD | int(words(1)[0]), bits + WORD
        for cell, (start, end) in enumerate(pairwise((-2, *boundaries(bits)))):
            if start + 1 < lots < end - 1:
                return cell


def keeps(cell: int, place: tuple[int, int], lot: tuple[int, int], words: Words) -> bool:
    """Whether a place in a cell is kept by a lot in [0, 1); both are given as (first digits, how many), binary."""
    (f, f_bits), (u, u_bits) = place, lot
    while True:
        more = words(2)
        f, f_bits = f << WORD | int(more[0]), f_bits + WORD
        u, u_bits = u << WORD | int(more[1]), u_bits + WORD
        with localcontext() as context:
            context.prec = _digits(f_bits + u_bits)
            slack = Decimal(2) ** -(u_bits + 16)
            most, least = (_kept(cell, Decimal(end) / 2**f_bits) for end in (f, f + 1))
            if Decimal(u + 1) / 2**u_bits <= least - slack:
                return True
            if Decimal(u) / 2**u_bits >= most + slack:
                return False


def _kept(cell: int, place: Decimal) -> Decimal:
    exponent = place * (cell + place / 2) / Decimal(4) ** CELL_BITS
    return (-exponent).exp()


def surely_kept(cell: int, bits: int) -> int:
    """A whole number below 2^bits times the chance to be kept anywhere in the cell, by less than 2."""
    with localcontext() as context:
        context.prec = _digits(bits)
        return int(_kept(cell, Decimal(1)) * 2**bits - Decimal(2) ** -32)
