"""The Gaussian mechanism: the only place where private sums become releases.

A release is paid for, summed, rounded to a public grid, added up over processes, and given integer noise. The grid's
step is the noise's standard deviation over a power of two, a public number. `docs/privacy.md` has the theorem.
"""

from __future__ import annotations

import logging
import math
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from sparsedp import _validate as checks
from sparsedp import distributed
from sparsedp.errors import PrivacyError
from sparsedp.parameters import Support
from sparsedp.privacy.charge import Charge, Chargeable
from sparsedp.privacy.queries import BoundedSum
from sparsedp.randomness import PrivateRandomness
from sparsedp.rounded_gaussian import MOST_BITS


@final
@dataclass(frozen=True, slots=True)
class GaussianMechanism:
    """Releases bounded sums over units with Gaussian noise, paid for by `ledger`, drawn from `randomness`.

    Formal guarantees:
        Each release is one Poisson-subsampled Gaussian mechanism with the charge's sampling rate and noise
        multiplier, under adding or removing one unit. Its sensitivity is the query's, whatever support, geometry
        and top-r, since the clip comes after them. The noise has exactly the law of a rounded Gaussian and is
        added to integers. The ledger is charged before anything is computed or drawn, and nothing is logged and
        no warning shown meanwhile. The main process alone draws noise.
    """

    ledger: Chargeable
    randomness: PrivateRandomness

    def release(self, query: BoundedSum, charge: Charge, *, expected_batch_size: float = 1.0) -> Release:
        """The mean over units of a bounded sum, with noise.

        The sum is divided by the *expected* batch size (sampling rate times number of units; 1 for the sum itself), a
        public number; the realised one is never used.

        Edge cases:
            An empty batch releases noise alone; an empty support releases an empty vector and is still charged.
        """
        checks.number(expected_batch_size, "expected_batch_size", above=0.0)
        noise, sensitivity = charge.noise_multiplier, query.sensitivity
        if not (0 < noise < math.inf and 0 < sensitivity < math.inf):
            raise PrivacyError(
                f"got noise multiplier {noise} and sensitivity {sensitivity}, expected finite numbers > 0 for both"
            )
        grid = Grid.for_mechanism(sensitivity, noise, query.size)
        with no_messages():
            self.ledger.charge(charge)
            total = distributed.reduce_sum(grid.round_and_sum(query.partial_sums(grid.bound)))
            if distributed.is_main_process():
                self.randomness.add_rounded_gaussian(grid.noise_bits, total, key=charge.key)
            total = distributed.broadcast(total)
        mean, std = grid.dequantize(total).div_(expected_batch_size), noise * sensitivity
        return Release(
            support=query.support,
            mean=query.geometry.inverse(mean),
            noise_scale=query.geometry.noise_scale(std / expected_batch_size, query.size),
            phase=charge.phase,
            step=charge.step,
            publishable=self.randomness.publishable,
            seal=_SEAL,
        )


_SEAL = object()
"""Held by the mechanism alone; a test walks the syntax tree to see that nobody else takes it."""


@final
class Release:
    """A privatized mean gradient on a support. Safe to use in any way: all that follows is post-processing.

    `mean` is the noisy sum divided by the *expected* batch size, in gradient space, `phase` and `step` what it was
    charged to; not `publishable` if a seed was used: reproducible, not for release.
    """

    __slots__ = ("_mean", "_noise_scale", "phase", "publishable", "step", "support")

    support: Support
    phase: str
    step: int
    publishable: bool
    _mean: Tensor
    _noise_scale: Tensor

    def __init__(
        self,
        *,
        support: Support,
        mean: Tensor,
        noise_scale: Tensor,
        phase: str,
        step: int,
        publishable: bool,
        seal: object,
    ) -> None:
        if seal is not _SEAL:
            raise PrivacyError("A Release is made by the mechanism alone; call GaussianMechanism.release")
        values = (mean, noise_scale, phase, publishable, step, support)
        for name, value in zip(self.__slots__, values, strict=True):
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise PrivacyError("a Release is read-only")

    @property
    def mean(self) -> Tensor:
        """The privatized mean gradient on the support (a copy)."""
        return self._mean.clone()

    @property
    def noise_scale(self) -> Tensor:
        """Standard deviation of the noise on each active coordinate (a copy)."""
        return self._noise_scale.clone()

    @property
    def noise_variance(self) -> Tensor:
        """Its square; a single number, to be read k times, where all coordinates have the same noise."""
        alike = self._noise_scale.stride() == (0,)
        scale = self._noise_scale[:1] if alike else self._noise_scale
        return scale.square().expand_as(self._noise_scale)

    def copy_to(self, out: Tensor, start: int = 0) -> Tensor:
        """As many numbers of `mean` as `out` has, from `start` on, written into it in its shape and type."""
        return out.copy_(self._mean[start : start + out.numel()].view(out.shape))

    def dense(self) -> Tensor:
        """The mean as a d-vector, zero off the support."""
        return self.support.scatter(self._mean)

    def __repr__(self) -> str:
        return f"Release(step={self.step}, phase={self.phase!r}, support={self.support})"


NOISE = "rounded-gaussian/1"
"""The law of the noise, and the rule of the grid, as a run's record names them."""

ROUNDINGS = 1.5
"""Steps by which rounding can move a coordinate when a unit comes or goes: one part of the sum is replaced by at most
two (`sampling.split_microbatches`), which makes three roundings of half a step each."""

MARGIN_BITS = 20
"""2^-20 of the sensitivity is kept for the grid: half for rounding to it, half for dividing by its step in float64,
whose errors are at most (2 n + 1) 2^-53 of the sensitivity with n units: they fit for a billion units."""

AT_ONCE = 1 << 17
"""Numbers turned at a time, so that what lies between floats and integers stays in the cache."""

_ROOM = 2.0**61


@final
@dataclass(frozen=True, slots=True)
class Grid:
    """Multiples of `step`; the noise's standard deviation is 2^noise_bits of them.

    Formal guarantees:
        A sum of parts that one unit moves by at most `bound` (the sensitivity less the grid's margin), changing one
        part only or making two of it, moves on the grid by at most the sensitivity the grid was made for.
    """

    step: float
    noise_bits: int
    bound: float

    @classmethod
    def for_mechanism(cls, sensitivity: float, noise_multiplier: float, size: int) -> Grid:
        """The grid of a sum of `size` numbers: the finest part of it that the margin asks for, and no finer."""
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

    def round_and_sum(self, parts: Iterable[Tensor]) -> Tensor:
        """Round each part of a sum to the grid and add them as int64, in the memory of the first. Private."""
        total: Tensor | None = None
        most = int(_ROOM) // distributed.world_size()
        room = torch.empty(0, dtype=torch.float64)
        for part in parts:
            if total is None:
                held = part.to(torch.float64).contiguous()
                total, room = held.view(torch.int64), held.new_empty(min(AT_ONCE, held.numel()))
                for old, new in zip(_stretches(held), _stretches(total), strict=True):
                    new.copy_(self._steps(old, room, most))
                continue
            for new, more in zip(_stretches(total), _stretches(part), strict=True):
                new += self._steps(more.to(torch.float64), room, most).to(torch.int64)
                if not within(new, most):
                    raise PrivacyError("the sum has too many units for its grid; nothing was released")
        if total is None:
            raise PrivacyError("a sum without parts has no size; give at least one part, of zeros if need be")
        return total

    def _steps(self, part: Tensor, room: Tensor, most: float) -> Tensor:
        steps = torch.div(part, self.step, out=room[: part.numel()])
        if not within(steps, most):
            raise PrivacyError(
                "the clipped sum is not finite or too large for its grid; nothing was released"
            )
        return steps.round_()

    def dequantize(self, steps: Tensor) -> Tensor:
        """Integers as the float64 numbers they stand for, in the same memory."""
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


@contextmanager
def no_messages() -> Iterator[None]:
    """Drop Python warnings and this library's log records while inside, not what the user's model or data set log.

    A message is an output of the run. One that is written, or not, because of a record tells of that record.
    """
    logger, silence = logging.getLogger("sparsedp"), logging.Filter("nobody")
    logger.addFilter(silence)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.removeFilter(silence)
