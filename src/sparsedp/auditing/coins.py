"""The audit's own coins: fair ones that decide who takes part, and fixed ones that tell the sampler whom to draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sparsedp.errors import SparseDPError
from sparsedp.randomness import SeededRandomness, StepSecret, SystemRandomness

Coins = npt.NDArray[np.bool_]


def fair_coins(count: int) -> Coins:
    """Independent coins from the operating system."""
    return SystemRandomness().bernoulli(0.5, count, key=())


@final
@dataclass(frozen=True, slots=True, eq=False)
class AbsentUnits(SystemRandomness):
    """The operating system's randomness, but for units that are not there: their coins never land.

    Attributes:
        present: one flag per unit.
    """

    present: Coins

    def bernoulli(self, probability: float, size: int, key: Sequence[int]) -> Coins:
        """Independent coins; an absent unit's is never true."""
        if size != len(self.present):
            raise SparseDPError(f"absent units: got {size} units, expected {len(self.present)}")
        return SystemRandomness.bernoulli(self, probability, size, key) & self.present


@final
@dataclass(frozen=True, slots=True, eq=False)
class FixedCoins:
    """Makes the real sampler draw the units it is told to, each with the same rows in whatever company.

    A unit's choice of rows is keyed by the unit: two draws that differ by one unit differ in nothing else.

    Attributes:
        chosen: one coin per unit.
        sizes: rows of each unit.
        seed: of the rows' lottery.
    """

    chosen: Coins
    sizes: npt.NDArray[np.int64]
    seed: int

    @property
    def for_release(self) -> bool:
        """Never."""
        return False

    def rounded_gaussian(self, bits: int, size: int, key: Sequence[int]) -> Tensor:
        """None: these are for drawing batches."""
        raise SparseDPError("fixed coins make no noise")

    def add_rounded_gaussian(self, bits: int, sums: Tensor, key: Sequence[int]) -> None:
        """None: these are for drawing batches."""
        raise SparseDPError("fixed coins make no noise")

    def bernoulli(self, probability: float, size: int, key: Sequence[int]) -> Coins:
        """The coins given."""
        if size != len(self.chosen):
            raise SparseDPError(f"fixed coins: got {size} units, expected {len(self.chosen)}")
        return self.chosen

    def below(self, bounds: npt.NDArray[np.int64], key: Sequence[int]) -> npt.NDArray[np.int64]:
        """One integer per chosen unit, or one per row of the chosen units, as the sampler asks."""
        units = np.flatnonzero(self.chosen)
        whole = SeededRandomness(self.seed)
        if len(bounds) == len(units):
            lots = whole.below(np.full(len(self.chosen), 2**52), key=(0,))[units]
        else:
            starts = np.cumsum(self.sizes) - self.sizes
            rows = np.concatenate([np.arange(starts[u], starts[u] + self.sizes[u]) for u in units])
            lots = whole.below(np.full(int(self.sizes.sum()), 2**52), key=(1,))[rows]
        return (lots % bounds).astype(np.int64)

    def secret(self, key: Sequence[int]) -> StepSecret:
        """The same whoever is drawn."""
        return SeededRandomness(self.seed).secret(key)
