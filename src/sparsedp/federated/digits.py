"""Integers as short digits, so that a protocol with small numbers can add long ones exactly."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsedp.privacy.grid import Grid

BITS = 16
"""Of a digit. Digits lie in -2^15..2^15, so 2^16 clients' sums fit into 32 bits."""


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
    """The numbers that digits, or sums of digits, stand for."""
    places = torch.tensor([1 << BITS * place for place in range(digits.shape[0])])
    return (digits.to(torch.int64) * places.unsqueeze(1)).sum(dim=0)
