"""Coins and whole numbers, settled exactly: on crafted words, so that nothing here is left to chance."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from sparsedp.errors import SparseDPError
from sparsedp.randomness import below, coins

LAST = 2**64 - 1


def given(*words: int):
    """These words, in order, and no more."""
    left = list(words)

    def take(count: int) -> np.ndarray:
        taken = [left.pop(0) for _ in range(count)]
        return np.array(taken, dtype=np.uint64)

    return take


@pytest.mark.parametrize(
    "probability", [0.1, 1 / 3, 1024 / 60_000, 2.0**-13 * 1.1, 1e-9, 3e-21, 1e-300, 5e-324, 0.0]
)
def test_a_coin_is_the_comparison_with_the_floats_exact_value(probability):
    """True for every number whose digits come before those of the probability; the next digits settle a tie."""
    exact, words = Fraction(probability), []
    while exact:
        digit, exact = divmod(exact * 2**64, 1)
        words.append(digit)
    assert sum(Fraction(word, 2 ** (64 * (i + 1))) for i, word in enumerate(words)) == Fraction(probability)
    assert not coins(probability, 1, given(*words, 0))[0] if words else not coins(0.0, 1, given(0))[0]
    for place, word in enumerate(words):
        if word:
            assert coins(probability, 1, given(*words[:place], word - 1))[0]
        assert not coins(probability, 1, given(*words[:place], word + 1))[0]


def test_only_tied_coins_ask_for_more():
    probability = 2.0**-60 * 1.3
    digit = int(Fraction(probability) * 2**64)
    assert coins(probability, 4, given(digit, 0, digit, LAST, 0, LAST)).tolist() == [True, True, False, False]


def test_certain_coins():
    assert coins(1.0, 2, given(0, LAST)).all()
    with pytest.raises(SparseDPError, match="probability"):
        coins(1.5, 1, given(0))


@pytest.mark.parametrize("bound", [1, 2, 3, 7, 2**52, 2**62 + 1, 2**63 - 1])
def test_every_whole_number_has_as_many_words_as_any_other(bound):
    """Full rounds are kept, the words past them drawn again."""
    rounds = 2**64 // bound
    bounds = np.array([bound])
    assert below(bounds, given(rounds * bound - 1)).tolist() == [bound - 1]
    if rounds * bound <= LAST:
        assert below(bounds, given(rounds * bound, LAST, 0)).tolist() == [0]


def test_bounds_are_kept_apart():
    assert below(np.array([3, 5, 1]), given(LAST, 7, 9, 4)).tolist() == [1, 2, 0]
    with pytest.raises(SparseDPError, match="bounds"):
        below(np.array([3, 0]), given(1, 1))
