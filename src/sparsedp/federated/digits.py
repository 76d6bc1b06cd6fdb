"""Integers as short digits, so that a protocol with small numbers can add long ones exactly, modulo 2^51."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsedp.privacy.grid import Grid
from sparsedp.privacy.updates import MODULUS, centred

BITS = 16
"""Of a digit: they lie in -2^15..2^15."""

OFFSET = 1 << BITS
"""Added to every digit of every client, so that what is masked is not negative."""


def digit_count(grid: Grid) -> int:
    """How many digits hold every number within a grid's bound. Public."""
    return -(-(int(grid.bound / grid.step).bit_length() + 1) // BITS)


def to_digits(numbers: Tensor, count: int) -> Tensor:
    """Signed digits, lowest first: [count, size] with sum over j of digit_j 2^(16 j) equal to each number."""
    rest, digits = numbers.to(torch.int64), []
    for _ in range(count - 1):
        low = (rest + (1 << BITS - 1)) % (1 << BITS) - (1 << BITS - 1)
        digits.append(low)
        rest = (rest - low) >> BITS
    return torch.stack([*digits, rest])


def from_digits(digits: Tensor) -> Tensor:
    """The numbers that digits, or sums of digits, stand for, modulo 2^51.

    **Privacy.** It adds residues, and looks at the size of none: digits that a client makes too long move the result
    by a number that knows nothing of the other clients'.
    """
    total = torch.zeros_like(digits[0], dtype=torch.int64)
    for place, sums in enumerate(digits):
        total += (sums.to(torch.int64) % (MODULUS >> BITS * place)) << BITS * place
    return centred(total)


def total_of(weights: Tensor, sums: Tensor, clients: int) -> Tensor:
    """The sum of clients' numbers, modulo 2^51, from the sums that masks were taken off.

    **Privacy.** The sum of the weights is not looked at: every client says its own, so one could scale by it what the
    others have sent.

    Args:
        weights: the sum that the protocol carries in front of the digits'.
        sums: of the digits with their offsets, modulo 2^51.
        clients: how many are in it.
    """
    del weights
    return from_digits(sums.to(torch.int64) - clients * OFFSET)
