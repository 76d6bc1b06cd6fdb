"""Integers with exactly the law of a rounded Gaussian, by integer comparisons of random words.

The standard deviation is a power of two, 2^s, so that to round 2^s Z is to cut off binary digits of Z. Z itself is
drawn by rejection under a staircase (`gaussian_cells`). Whatever the first digits leave open, less than once in 2^40
draws, is settled by further random digits at as much precision as that takes: the law has no error term.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sparsedp.core import gaussian_one_word, gaussian_two_words
from sparsedp.core.gaussian_lots import Integers
from sparsedp.errors import PrivacyError

if TYPE_CHECKING:
    from sparsedp.randomness import Words

MOST_BITS = gaussian_two_words.MOST_BITS
"""The largest s there are digits for."""

AT_ONCE = gaussian_two_words.AT_ONCE
"""Draws before the refused are drawn again, for those who do not say."""


def rounded_gaussian(bits: int, size: int, words: Words) -> Integers:
    """`size` independent integers, each an ideal Gaussian number of standard deviation 2^bits, rounded.

    **Edge cases.** How many words are taken depends on the words alone, so equal words give equal integers.

    Raises:
        PrivacyError: 2^bits is finer than the digits drawn.
    """
    noise = np.zeros(size, dtype=np.int64)
    add_rounded_gaussian(bits, noise, words)
    return noise


def add_rounded_gaussian(
    bits: int, sums: Integers, words: Words, lot: int = AT_ONCE, *, thrifty: bool = False
) -> None:
    """Add such an integer to each of `sums`, in place; `lot` of them are drawn before the refused are drawn again.

    `thrifty` takes one word for a draw wherever its digits suffice, in a third of the time. Seeded noise is not: it
    stays what it was when runs were recorded.

    Raises:
        PrivacyError: 2^bits is finer than the digits drawn.
    """
    if not 0 <= bits <= MOST_BITS:
        raise PrivacyError(f"noise of 2^{bits} grid steps: expected 2^0 to 2^{MOST_BITS}")
    one = thrifty and bits <= gaussian_one_word.MOST_BITS
    for start in range(0, len(sums), lot):
        (gaussian_one_word if one else gaussian_two_words).add(bits, sums[start : start + lot], words)
