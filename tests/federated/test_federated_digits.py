"""Long integers as short digits: exact, small, and their sums stand for the numbers' sums."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsedp.federated.digits import BITS, digit_count, from_digits, to_digits
from sparsedp.privacy.grid import Grid

NUMBERS = st.lists(st.integers(-(2**40), 2**40), min_size=3, max_size=3)


@given(st.lists(NUMBERS, min_size=1, max_size=20))
def test_sums_of_digits_are_sums_of_numbers(rows):
    numbers = torch.tensor(rows)
    digits = torch.stack([to_digits(row, 3) for row in numbers])
    assert int(digits.abs().max()) <= 2 ** (BITS - 1)
    assert torch.equal(from_digits(digits.sum(dim=0)), numbers.sum(dim=0))


@given(st.floats(0.1, 10), st.integers(1, 10**9))
def test_every_number_within_the_bound_has_room(noise, size):
    grid = Grid.of(1.0, noise, size)
    largest = int(grid.bound / grid.step)
    numbers = torch.tensor([largest, -largest, 0])
    digits = to_digits(numbers, digit_count(grid))
    assert int(digits.abs().max()) <= 2 ** (BITS - 1)
    assert torch.equal(from_digits(digits), numbers)
