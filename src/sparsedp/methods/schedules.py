"""Ratio schedules and refresh intervals: the share of coordinates that is active in each period."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from itertools import pairwise
from typing import Protocol

from sparsedp._validate import exact_ratio, share_of
from sparsedp.errors import SparseDPError
from sparsedp.methods.registry import Registry


class Schedule(Protocol):
    """The active ratio, period by period."""

    @property
    def name(self) -> str:
        """What options and reports call it."""
        ...

    def ratio(self, period: int, periods: int, target: Fraction) -> Fraction:
        """The ratio of one of `periods` periods (0 is the first), given the method's `active_ratio`."""
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    """The active ratio itself, throughout (TP-TopK)."""

    name: str = "constant"

    def ratio(self, period: int, periods: int, target: Fraction) -> Fraction:
        """`rho`."""
        return target


@dataclass(frozen=True, slots=True)
class GradualCooling:
    """From 1 down to the active ratio: `1 - r(e)`, `r(e) = r* e/(E-1)`, `r* = 1 - rho` (RS, Sec. 4.1).

    Edge cases: With a single period the ratio is `rho`.
    """

    name: str = "cooling"

    def ratio(self, period: int, periods: int, target: Fraction) -> Fraction:
        """`1 - r(e)`."""
        if periods == 1:
            return target
        return 1 - (1 - target) * Fraction(period, periods - 1)


@dataclass(frozen=True, slots=True)
class ProgressiveUnfreezing:
    """From the active ratio up along a list, whose last value stays (AdaDPIGU, Sec. 4, progressive unfreezing).

    Period 0 has the active ratio, period e the e-th of `ratios`. An empty list keeps the active ratio.
    """

    ratios: tuple[float, ...] = ()
    name: str = "release"

    def __post_init__(self) -> None:
        exact = [exact_ratio(value, "release") for value in self.ratios]
        if any(later < earlier for earlier, later in pairwise(exact)):
            raise SparseDPError(
                f"release: got {list(self.ratios)}, expected ratios that never fall; "
                "for other schedules give PiecewiseConstant(ratios)"
            )

    def ratio(self, period: int, periods: int, target: Fraction) -> Fraction:
        """`r`, then the list; never less than `r`."""
        if period == 0 or not self.ratios:
            return target
        return max(target, exact_ratio(self.ratios[min(period, len(self.ratios)) - 1], "release"))


@dataclass(frozen=True, slots=True)
class PiecewiseConstant:
    """Any ratios: period e has the e-th of the list, and the last value stays. The active ratio is not used."""

    ratios: tuple[float, ...]
    name: str = "listed"

    def __post_init__(self) -> None:
        if not self.ratios:
            raise SparseDPError("listed schedule: got no ratios, expected at least one")
        for value in self.ratios:
            exact_ratio(value, "listed schedule")

    def ratio(self, period: int, periods: int, target: Fraction) -> Fraction:
        """The list's value."""
        return exact_ratio(self.ratios[min(period, len(self.ratios) - 1)], "listed schedule")


_SCHEDULES: Registry[Schedule] = Registry(
    "schedule", "register_schedule", same=lambda one, other: type(one) is type(other)
)
register_schedule, get_schedule = _SCHEDULES.register, _SCHEDULES.get
"""Make a schedule available by name: to methods in JSON, and to plans read from their files; find it. It is a frozen
dataclass; other values of its fields, such as `ratios`, are put in as they are read."""
for _schedule in (Constant(), GradualCooling(), ProgressiveUnfreezing(), PiecewiseConstant((1.0,))):
    register_schedule(_schedule)


def active_count(ratio: Fraction, dimension: int) -> int:
    """`k = floor(rho * d)`.

    Raises:
        SparseDPError: no coordinate would be active.
    """
    count = share_of(ratio, dimension)
    if count == 0:
        raise SparseDPError(
            f"active_ratio: {float(ratio):.3g} of d={dimension} coordinates is none; "
            f"expected at least 1/d = {1 / dimension:.3g}"
        )
    return count


class Refresh(Enum):
    """Whether a new period brings a new ranking; the ratio moves with the periods either way."""

    ONCE = "once"
    EVERY_PERIOD = "every period"


@dataclass(frozen=True, slots=True)
class PerEpoch:
    """`times` equal periods in each epoch (RS: per-epoch randomization, and its code's `--refresh`).

    Epochs are counted from the start of the phase; the last may be cut short.
    """

    times: int = 1

    def __post_init__(self) -> None:
        _check_positive(self.times, "periods per epoch")

    def starts(self, steps: int, steps_per_epoch: int) -> tuple[int, ...]:
        """First step of each period: the steps t with `t*n/S` just past a whole number, S steps to an epoch."""
        if self.times > steps_per_epoch:
            raise SparseDPError(
                f"clock: got {self.times} periods per epoch of {steps_per_epoch} steps, expected at most one "
                "period per step; the support is fixed within a step"
            )
        within = [-(-part * steps_per_epoch // self.times) for part in range(self.times)]
        epochs = range(0, steps, steps_per_epoch)
        return tuple(epoch + start for epoch in epochs for start in within if epoch + start < steps)


@dataclass(frozen=True, slots=True)
class EverySteps:
    """A period every `steps` steps, counted from the start of the phase."""

    steps: int

    def __post_init__(self) -> None:
        _check_positive(self.steps, "steps per period")

    def starts(self, steps: int, steps_per_epoch: int) -> tuple[int, ...]:
        """First step of each period."""
        return tuple(range(0, steps, self.steps))


@dataclass(frozen=True, slots=True)
class EqualParts:
    """So many periods of equal length, over the whole phase; as many as it has steps, if these are fewer."""

    parts: int

    def __post_init__(self) -> None:
        _check_positive(self.parts, "parts")

    def starts(self, steps: int, steps_per_epoch: int) -> tuple[int, ...]:
        """First step of each period."""
        return tuple(sorted({part * steps // self.parts for part in range(self.parts)}))


Clock = PerEpoch | EverySteps | EqualParts


def _check_positive(value: int, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SparseDPError(f"clock: got {value!r} {what}, expected a whole number >= 1")
