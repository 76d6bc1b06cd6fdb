"""The only door: where private gradients become a release."""

from __future__ import annotations

import functools
import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, Protocol, final

import torch
from torch import Tensor

from sparsedp.batch import MicroBatch
from sparsedp.core.geometry import Geometry, Identity
from sparsedp.errors import PrivacyError
from sparsedp.grad_sample.query import Engine, Query
from sparsedp.parameters import Support
from sparsedp.privacy.ledger import Charge, Ledger
from sparsedp.randomness import PrivateRandomness
from sparsedp.rounded_gaussian import MOST_BITS

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


_SEAL = object()
"""Held by the mechanism alone; a test walks the syntax tree to see that nobody else takes it."""


@final
class Released:
    """A privatized mean gradient on a support. Safe to use in any way: all that follows is post-processing.

    Attributes:
        support: the coordinates it lives on.
        mean: k-vector, noisy sum divided by the *expected* batch size, in gradient space.
        noise_scale: k-vector, standard deviation of the noise in `mean`, per coordinate.
        phase: name of the plan's phase it was charged to.
        step: index of the step in the plan.
        for_release: False when a seed was used: reproducible, not for release.
        private: False for the ablations without clipping or without noise.
    """

    __slots__ = ("_mean", "_noise_scale", "for_release", "phase", "private", "step", "support")

    _mean: Tensor
    _noise_scale: Tensor

    support: Support
    phase: str
    step: int
    for_release: bool
    private: bool

    def __init__(
        self,
        *,
        support: Support,
        mean: Tensor,
        noise_scale: Tensor,
        phase: str,
        step: int,
        for_release: bool,
        private: bool,
        seal: object,
    ) -> None:
        if seal is not _SEAL:
            raise PrivacyError("Released values are made by the mechanism alone; call privatize")
        object.__setattr__(self, "support", support)
        object.__setattr__(self, "_mean", mean)
        object.__setattr__(self, "_noise_scale", noise_scale)
        object.__setattr__(self, "phase", phase)
        object.__setattr__(self, "step", step)
        object.__setattr__(self, "for_release", for_release)
        object.__setattr__(self, "private", private)

    def __setattr__(self, name: str, value: object) -> None:
        raise PrivacyError("Released values are read-only")

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
        return f"Released(step={self.step}, phase={self.phase!r}, support={self.support})"


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


class BoundedSum(Protocol):
    """A sum over units that knows how far one unit can move it. Asked once, inside `private_sum`."""

    @property
    def size(self) -> int:
        """How many numbers the sum has. Public."""
        ...

    @property
    def sensitivity(self) -> float:
        """Largest L2 change when one unit is added or removed."""
        ...

    def parts(self, bound: float) -> Iterator[Tensor]:
        """The sum in float64, in one or more parts, clipped so that a unit moves it by at most `bound`. Private.

        Cut by unit: one that is added moves a single part, or makes two of it. The mechanism takes their memory: no
        part may be used again.
        """
        ...


def private_sum(
    query: BoundedSum,
    *,
    charge: Charge,
    ledger: Ledger,
    randomness: PrivateRandomness,
    absolute_noise_std: float = 0.0,
    exchange: Exchange = ALONE,
) -> tuple[Tensor, float]:
    """A bounded sum plus Gaussian noise, paid for first; gives the noisy sum and the noise's standard deviation.

    **Privacy.** One Poisson-subsampled Gaussian mechanism with the charge's rate and noise multiplier, under adding
    or removing one unit, rounded to a public grid: the sum is put on it first, the noise has exactly the law of a
    rounded Gaussian, and both are added as integers. The ledger is charged before anything is computed or drawn.
    Where several processes share the units (`exchange`), their integers are added first, and one of them charges and
    draws noise. Nothing is logged and no warning is shown meanwhile.
    **Edge cases.** `absolute_noise_std` is for sums without a bound (the non-private ablations) and only for them.
    """
    std = _noise_std(query.sensitivity, charge.noise_multiplier, absolute_noise_std)
    grid = (
        Grid.of(query.sensitivity, charge.noise_multiplier, query.size) if charge.noise_multiplier else None
    )
    if grid is None:
        with no_messages():
            return _float_sum(query, std, charge, ledger, randomness, exchange), std

    def local() -> Tensor:
        ledger.charge(charge)
        return grid.add_up(query.parts(grid.bound))

    def noisy(steps: Tensor) -> Tensor:
        randomness.add_rounded_gaussian(grid.noise_bits, steps, key=charge.key)
        return steps

    with no_messages():
        return grid.values(exchange.integers(local, noisy, query.size)), std


def privatize(
    engine: Engine,
    batches: Iterable[MicroBatch],
    query: Query,
    *,
    expected_batch_size: float,
    charge: Charge,
    ledger: Ledger,
    randomness: PrivateRandomness,
    absolute_noise_std: float = 0.0,
    exchange: Exchange = ALONE,
) -> Released:
    """One private step: mask, standardize, per-sample top-r, clip, sum, noise on the support, average, restore.

    **Privacy.** Sensitivity is the clip norm whatever the support, geometry and top-r, since the clip comes after
    them. The sum is divided by the *expected* batch size, a public number; the realised one is never used.
    **Edge cases.** An empty batch releases noise alone; an empty support releases an empty vector and is still
    charged.
    """
    return _mean(
        _GradientSum(engine, batches, query),
        query.support,
        query.geometry,
        expected_batch_size=expected_batch_size,
        charge=charge,
        ledger=ledger,
        randomness=randomness,
        absolute_noise_std=absolute_noise_std,
        exchange=exchange,
    )


def private_mean(
    query: BoundedSum,
    size: int,
    *,
    expected_batch_size: float,
    charge: Charge,
    ledger: Ledger,
    randomness: PrivateRandomness,
    support: Support | None = None,
    geometry: Geometry | None = None,
    exchange: Exchange = ALONE,
) -> Released:
    """The mean over units of explicit vectors of `size` numbers: bounded sum, noise, expected number of units.

    They stand for all there is, or for the coordinates of a `support`, in the space of a `geometry`.

    **Privacy.** That of `private_sum`. Every number of the vector gets noise.
    """
    return _mean(
        query,
        Support.full(size) if support is None else support,
        Identity() if geometry is None else geometry,
        expected_batch_size=expected_batch_size,
        charge=charge,
        ledger=ledger,
        randomness=randomness,
        exchange=exchange,
    )


def _mean(
    query: BoundedSum,
    support: Support,
    geometry: Geometry,
    *,
    expected_batch_size: float,
    charge: Charge,
    ledger: Ledger,
    randomness: PrivateRandomness,
    absolute_noise_std: float = 0.0,
    exchange: Exchange = ALONE,
) -> Released:
    if not (math.isfinite(expected_batch_size) and expected_batch_size > 0):
        raise PrivacyError(f"expected_batch_size: got {expected_batch_size}, expected a finite number > 0")
    total, std = private_sum(
        query,
        charge=charge,
        ledger=ledger,
        randomness=randomness,
        absolute_noise_std=absolute_noise_std,
        exchange=exchange,
    )
    return Released(
        support=support,
        mean=geometry.inverse(total.div_(expected_batch_size)),
        noise_scale=geometry.noise_scale(std / expected_batch_size, support.size),
        phase=charge.phase,
        step=charge.step,
        for_release=randomness.for_release,
        private=charge.noise_multiplier > 0,
        seal=_SEAL,
    )


@dataclass(frozen=True, slots=True)
class _GradientSum:
    engine: Engine
    batches: Iterable[MicroBatch]
    query: Query

    @property
    def size(self) -> int:
        return self.query.support.size

    @property
    def sensitivity(self) -> float:
        return self.query.clip.sensitivity

    def parts(self, bound: float) -> Iterator[Tensor]:
        query = replace(self.query, clip=self.query.clip.tightened(bound))
        empty = True
        for batch in self.batches:
            empty = False
            yield self.engine.clipped_sum([batch], query)
        if empty:
            yield self.engine.clipped_sum([], query)


_ABLATION_BITS = 30


def _float_sum(
    query: BoundedSum,
    std: float,
    charge: Charge,
    ledger: Ledger,
    randomness: PrivateRandomness,
    exchange: Exchange,
) -> Tensor:
    """For the ablations, which promise nothing: the sum as it is, and noise if there is any."""

    def local() -> Iterator[Tensor]:
        ledger.charge(charge)
        return query.parts(math.inf)

    def noisy(total: Tensor) -> Tensor:
        if std == 0:
            return total
        noise = randomness.rounded_gaussian(_ABLATION_BITS, query.size, key=charge.key)
        return total.add(noise.to(total), alpha=math.ldexp(std, -_ABLATION_BITS))

    return exchange.floats(local, noisy, query.size)


def _noise_std(sensitivity: float, noise_multiplier: float, absolute: float) -> float:
    if noise_multiplier < 0 or absolute < 0 or not math.isfinite(noise_multiplier + absolute):
        raise PrivacyError(
            f"noise: got multiplier {noise_multiplier} and std {absolute}, expected numbers >= 0"
        )
    if absolute and noise_multiplier:
        raise PrivacyError("noise: give a noise multiplier or an absolute std, not both")
    if absolute and math.isfinite(sensitivity):
        raise PrivacyError(
            "noise: an absolute std is for unclipped sums; with a clip, give a noise multiplier"
        )
    if noise_multiplier and not math.isfinite(sensitivity):
        raise PrivacyError(
            "noise: without a clip the sensitivity is infinite and no multiplier protects anyone"
        )
    return absolute if absolute else (noise_multiplier * sensitivity if noise_multiplier else 0.0)


@contextmanager
def no_messages() -> Iterator[None]:
    """Drop Python warnings and this library's log records while inside.

    A message is an output of the run. One that is written, or not, because of a record tells of that record.

    **Edge cases.** What the user's model, loss or data set print or log themselves is theirs, and passes.
    """
    logger, silence = logging.getLogger("sparsedp"), _Nothing()
    logger.addFilter(silence)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.removeFilter(silence)


class _Nothing:
    def filter(self, record: logging.LogRecord) -> bool:
        return False
