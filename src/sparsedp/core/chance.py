"""Random numbers inside a row's computation (dropout, augmentation): a function of the step's secret and the row."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b, shake_128
from typing import final

import torch
from torch import Tensor

from sparsedp.core.generators import SEED_BYTES


@final
@dataclass(frozen=True, slots=True, eq=False)
class StepSecret:
    """What all random numbers inside one step's model and data set are computed from.

    **Privacy.** Drawn from the run's private randomness, never stored or shown, nor computed from anything that is.
    Given it, a row's numbers are fixed, whoever else is in the batch; without it, they are independent of each other.
    """

    key: bytes = field(repr=False)

    def seed(self, row: int | None = None) -> bytes:
        """For the global generators while this row is at work; without a row, for what all rows share."""
        return blake2b(_name(row), key=self.key, digest_size=SEED_BYTES).digest()

    def words(self, rows: Tensor | None, draw: int, count: int) -> Tensor:
        """Uniform 32-bit words, [rows, count]: those of one draw for each of these rows, or one line that all share.

        SHAKE-128 of secret, draw and row.
        """
        start = shake_128(b"draw" + self.key + draw.to_bytes(8, "little"))
        lines = bytearray()
        names = [None] if rows is None else rows.tolist()
        for row in names:
            line = start.copy()
            line.update(_name(row))
            lines += line.digest(4 * count)
        if not lines:
            return torch.empty(len(names), count, dtype=torch.int32)
        return torch.frombuffer(lines, dtype=torch.int32).reshape(len(names), count)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Chance:
    """The step's secret, and which row of the data set each row of a batch is. Private."""

    secret: StepSecret
    rows: Tensor

    def part(self, span: slice) -> Chance:
        """That of some of the rows."""
        return Chance(self.secret, self.rows[span])


def _name(row: int | None) -> bytes:
    return b"shared" if row is None else b"row" + row.to_bytes(8, "little")
