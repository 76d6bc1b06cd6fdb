"""Sums of clients' updates, which come as integers on the mechanism's grid: what a federated round releases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from sparsedp.core.clip import Clip, FlatClip
from sparsedp.core.errors import PrivacyError
from sparsedp.privacy.grid import Grid

MODULUS = 1 << 51
"""What secure aggregation adds modulo. An integer up to half of it that is multiplied by a grid's step in float64 and
divided by it again is off by a quarter at most: so it is rounded to what it was."""

DEVIATIONS = 10
"""Of the noise that must have room beside the clients' sum, so that an honest release does not wrap."""


def on_grid(update: Tensor, clip: Clip, grid: Grid) -> Tensor:
    """A client's own part: its update clipped and rounded to the grid, as int64.

    **Edge cases.** An update that is not finite becomes zero.
    """
    values = update.to(torch.float64)
    factor = clip.tightened(grid.bound).factors(torch.linalg.vector_norm(values))
    return (
        (values * factor / grid.step).round_().to(torch.int64)
        if factor > 0
        else values.new_zeros(len(values), dtype=torch.int64)
    )


def is_within(update: Tensor, grid: Grid) -> bool:
    """Whether an update on the grid keeps to its bound, as every client that clips does."""
    return float(torch.linalg.vector_norm(update.to(torch.float64))) * grid.step <= grid.bound


@final
@dataclass(frozen=True, slots=True, eq=False)
class UpdateSum:
    """The sum of clients' updates on the grid, each held to the clip norm here, whatever the client did.

    **Privacy.** Adding or removing one client adds or removes one vector of integers, of norm at most the grid's
    bound. Nothing is rounded after that.

    Attributes:
        updates: one vector of integers a client. Private.
        length: how many numbers each has; public.
        clip: the bound on a client.
        grid: what the integers are multiples of.
    """

    updates: Sequence[Tensor]
    length: int
    clip: FlatClip
    grid: Grid

    @property
    def size(self) -> int:
        """The length of an update."""
        return self.length

    @property
    def sensitivity(self) -> float:
        """The clip's."""
        return self.clip.sensitivity

    def parts(self, bound: float) -> Iterator[Tensor]:
        """The updates one by one: multiples of the grid's step, so that putting them on the grid changes nothing."""
        yield torch.zeros(self.length, dtype=torch.float64)
        for update in self.updates:
            yield self._clipped(update, bound).mul_(self.grid.step)

    def _clipped(self, update: Tensor, bound: float) -> Tensor:
        """An update's integers in float64; one that is too long is shortened, towards zero."""
        steps = update.to(torch.float64)
        norm = torch.linalg.vector_norm(steps) * self.grid.step
        if float(norm) <= bound:
            return steps
        return (steps * self.clip.tightened(bound).factors(norm)).trunc_()


def centred(numbers: Tensor) -> Tensor:
    """The integers nearest to zero that are the same modulo 2^51."""
    return (numbers % MODULUS + MODULUS // 2) % MODULUS - MODULUS // 2


def check_room(clients: int, grid: Grid) -> None:
    """See that the sum of all clients' updates, and its noise, lie within the modulus of secure aggregation.

    Raises:
        PrivacyError: they may not; by public numbers alone.
    """
    room = MODULUS // 2 - (DEVIATIONS << grid.noise_bits)
    most = int(room * grid.step / grid.bound)
    if clients > most:
        raise PrivacyError(
            f"secure aggregation: got {clients} clients, expected at most {max(0, most)} with this noise and number "
            "of coordinates, or their sum may wrap; make a plan for fewer clients, or for fewer coordinates"
        )


@final
@dataclass(frozen=True, slots=True, eq=False)
class AggregatedUpdates:
    """The sum of updates as secure aggregation gives it: nobody here has seen a single one.

    **Privacy.** A client that clips moves the sum by at most the clip norm. One that does not, or that lies in the
    protocol, adds some number modulo 2^51 that does not know the others' updates. Released by `Modular`, the sum has
    its noise whatever that number is; such a client gives away its own protection, and who took part.

    Attributes:
        total: the integers' sum, modulo 2^51. Private.
        clip: the bound each client keeps to.
        grid: what the integers are multiples of.
    """

    total: Tensor
    clip: FlatClip
    grid: Grid

    @property
    def size(self) -> int:
        """The length of an update."""
        return int(self.total.numel())

    @property
    def sensitivity(self) -> float:
        """The clip's."""
        return self.clip.sensitivity

    def parts(self, bound: float) -> Iterator[Tensor]:
        """The sum, in one part.

        Raises:
            PrivacyError: another bound than the clients were told.
        """
        if bound != self.grid.bound:
            raise PrivacyError(
                f"the clients clipped to {self.grid.bound:g}, the mechanism asks for {bound:g}"
            )
        yield centred(self.total).to(torch.float64).mul_(self.grid.step)


@final
class Modular:
    """An exchange for a sum that is known modulo 2^51: it is centred when it has its noise.

    **Privacy.** The release is a function of the honest clients' sum plus noise, and of what others have added,
    modulo 2^51. Centred before the noise, a sum that one client has put at the edge would tell without noise whether
    another's update takes it over.
    """

    def integers(self, local: Callable[[], Tensor], release: Callable[[Tensor], Tensor], size: int) -> Tensor:
        """Release the sum, then centre it."""
        return centred(release(local()))

    def floats(
        self, local: Callable[[], Iterable[Tensor]], release: Callable[[Tensor], Tensor], size: int
    ) -> Tensor:
        """None here.

        Raises:
            PrivacyError: always. What clients send is on a grid.
        """
        raise PrivacyError(
            "secure aggregation adds integers; a sum without noise or clip has no grid for them"
        )
