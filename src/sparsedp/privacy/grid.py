"""The public grid that sums, noise and releases live on: integer arithmetic from the clipped sum to the release.

The grid's step is the noise's standard deviation over a power of two. It follows from public numbers alone: clip
norm, noise multiplier, number of coordinates. `docs/privacy.md` has the theorem.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from sparsedp.core.rounded_gaussian import MOST_BITS
from sparsedp.errors import PrivacyError

NOISE = "rounded-gaussian/1"
"""The law of the noise, and the rule of the grid, as a run's record names them."""

ROUNDINGS = 1.5
"""Steps by which rounding can move a coordinate when a unit comes or goes: one part of the sum gives way to at most
two (`data.cutting`), which makes three roundings of half a step each."""

MARGIN_BITS = 20
"""2^-20 of the sensitivity is kept for the grid: half for rounding to it, half for dividing by its step in float64.

The latter's errors are at most (2 n + 1) 2^-53 of the sensitivity with n units, so they fit for a billion units.
"""

AT_ONCE = 1 << 17
"""Numbers turned at a time, so that what lies between floats and integers stays in the cache."""

_ROOM = 2.0**61


@final
@dataclass(frozen=True, slots=True)
class Grid:
    """Multiples of `step`.

    **Privacy.** A sum of parts that one unit moves by at most `bound`, changing one part only or making two of it,
    moves on the grid by at most the sensitivity the grid was made for.

    Attributes:
        step: the distance of neighbours.
        noise_bits: the noise's standard deviation is 2^noise_bits steps.
        bound: what a unit may move the sum by before it is rounded: the sensitivity less the grid's margin.
    """

    step: float
    noise_bits: int
    bound: float

    @classmethod
    def of(cls, sensitivity: float, noise_multiplier: float, size: int) -> Grid:
        """The grid of a sum of `size` numbers: the finest part of it that the margin asks for, and no finer.

        Raises:
            PrivacyError: noise so large, or a sensitivity so small, that no grid of 64-bit integers holds it.
        """
        std = noise_multiplier * sensitivity
        _, exponent = math.frexp(noise_multiplier * ROUNDINGS * math.sqrt(size))
        bits = max(0, exponent + MARGIN_BITS + 1)
        step = math.ldexp(std, -bits)
        if bits > MOST_BITS or not sys.float_info.min <= step < math.inf:
            raise PrivacyError(
                f"noise multiplier {noise_multiplier:g}, clip norm {sensitivity:g}, {size} coordinates: no grid of "
                "64-bit integers holds this; use less noise, fewer coordinates, or scale the loss"
            )
        return cls(step, bits, sensitivity * (1 - 2.0**-MARGIN_BITS))

    def add_up(self, parts: Iterable[Tensor]) -> Tensor:
        """Round each part of a sum to the grid and add them as int64, in whatever order. Private.

        The parts are used up: in the memory of the first the sum is made.

        Raises:
            PrivacyError: a part is not finite, or the integers would overflow: about 10^11 units over the square root
                of the number of coordinates. No clipped sum of fewer does that, so to stop tells nothing.
        """
        total: Tensor | None = None
        room = torch.empty(0, dtype=torch.float64)
        for part in parts:
            if total is None:
                held = part.to(torch.float64).contiguous()
                total, room = held.view(torch.int64), held.new_empty(min(AT_ONCE, held.numel()))
                for old, new in zip(_stretches(held), _stretches(total), strict=True):
                    new.copy_(self._steps(old, room))
                continue
            for new, more in zip(_stretches(total), _stretches(part), strict=True):
                new += self._steps(more.to(torch.float64), room).to(torch.int64)
                if not within(new, int(_ROOM)):
                    raise PrivacyError("the sum has too many units for its grid; nothing was released")
        if total is None:
            raise PrivacyError("a sum without parts has no size; give at least one part, of zeros if need be")
        return total

    def _steps(self, part: Tensor, room: Tensor) -> Tensor:
        steps = torch.div(part, self.step, out=room[: part.numel()])
        if not within(steps, _ROOM):
            raise PrivacyError(
                "the clipped sum is not finite or too large for its grid; nothing was released. Without a bug in "
                "the model or the engine, that takes more units than a grid has room for"
            )
        return steps.round_()

    def values(self, steps: Tensor) -> Tensor:
        """Integers as the float64 numbers they stand for, in the same memory: the integers are used up."""
        values = steps.view(torch.float64)
        room = values.new_empty(min(AT_ONCE, values.numel()))
        for old, new in zip(_stretches(steps), _stretches(values), strict=True):
            torch.mul(room[: old.numel()].copy_(old), self.step, out=new)
        return values


def within(numbers: Tensor, room: float) -> bool:
    """Whether all are smaller than that in size; not if one is NaN."""
    if not numbers.numel():
        return True
    low, high = torch.aminmax(numbers)
    return bool(low.item() > -room and high.item() < room)


def _stretches(numbers: Tensor) -> Sequence[Tensor]:
    return (numbers,) if numbers.numel() <= AT_ONCE else torch.split(numbers, AT_ONCE)
