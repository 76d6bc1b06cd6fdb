"""Where the sums of several processes become one: between the integers of a sum and its noise."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Final, Protocol, final

import torch
from torch import Tensor


class Exchange(Protocol):
    """Adds up what every rank has, lets one of them release it, and gives the release to all.

    **Privacy.** `release` is called on one rank alone: the one that holds the ledger and draws the noise. What the
    ranks send each other before it is private; they are one trusted party.
    """

    def integers(self, local: Callable[[], Tensor], release: Callable[[Tensor], Tensor], size: int) -> Tensor:
        """What `release` makes of the sum of all ranks' `local()`: int64, `size` numbers, the same on every rank."""
        ...

    def floats(
        self, local: Callable[[], Iterable[Tensor]], release: Callable[[Tensor], Tensor], size: int
    ) -> Tensor:
        """The same for sums of float64 numbers, given in parts, that no grid holds."""
        ...


@final
class Alone:
    """One process: there is nothing to exchange."""

    def integers(self, local: Callable[[], Tensor], release: Callable[[Tensor], Tensor], size: int) -> Tensor:
        """Release the sum."""
        return release(local())

    def floats(
        self, local: Callable[[], Iterable[Tensor]], release: Callable[[Tensor], Tensor], size: int
    ) -> Tensor:
        """Add up the parts and release the sum."""
        return release(functools.reduce(torch.add, local()))


ALONE: Final = Alone()
