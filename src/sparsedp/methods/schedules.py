"""Ratio schedules and refresh intervals: the share of coordinates that is active in each period."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from itertools import pairwise
from typing import Literal

from sparsedp._validate import exact_ratio, share_of, whole
from sparsedp.errors import SparseDPError


@dataclass(frozen=True, slots=True)
class Constant:
    """The active ratio itself, throughout (TP-TopK)."""

    name: Literal["constant"] = "constant"

    def ratio(self, period: int, periods: int, target: Fraction) -> Fraction:
        """The ratio of one of `periods` periods (0 is the first), given the method's `active_ratio`: `rho`."""
        return target


@dataclass(frozen=True, slots=True)
class GradualCooling:
    """From 1 down to the active ratio: `1 - r(e)`, `r(e) = r* e/(E-1)`, `r* = 1 - rho` (RS, Sec. 4.1).

    Edge cases: With a single period the ratio is `rho`.
    """

    name: Literal["cooling"] = "cooling"

    def ratio(self, period: int, periods: int, target: Fraction) -> Fraction:
        if periods == 1:
            return target
        return 1 - (1 - target) * Fraction(period, periods - 1)


@dataclass(frozen=True, slots=True)
class ProgressiveUnfreezing:
    """From the active ratio up along a list, whose last value stays (AdaDPIGU, Sec. 4, progressive unfreezing).

    Period 0 has the active ratio, period e the e-th of `ratios`, or the active ratio where that is larger.
    """

    ratios: tuple[float, ...] = ()
    name: Literal["release"] = "release"

    def __post_init__(self) -> None:
        exact = [exact_ratio(value, "release") for value in self.ratios]
        if any(later < earlier for earlier, later in pairwise(exact)):
            raise SparseDPError(f"release: got {list(self.ratios)}, expected ratios that never fall")

    def ratio(self, period: int, periods: int, target: Fraction) -> Fraction:
        if period == 0 or not self.ratios:
            return target
        return max(target, exact_ratio(self.ratios[min(period, len(self.ratios)) - 1]))


Schedule = Constant | GradualCooling | ProgressiveUnfreezing


def active_count(ratio: Fraction, dimension: int) -> int:
    """`k = floor(rho * d)`."""
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
    """So many equal periods in each epoch (RS: per-epoch randomization, and its code's `--refresh`).

    Epochs are counted from the start of the phase; the last may be cut short.
    """

    per_epoch: int = 1

    def __post_init__(self) -> None:
        whole(self.per_epoch, "clock: per_epoch", at_least=1)

    def starts(self, steps: int, steps_per_epoch: int) -> tuple[int, ...]:
        """First step of each period: the steps t with `t*n/S` just past a whole number, S steps to an epoch."""
        if self.per_epoch > steps_per_epoch:
            raise SparseDPError(
                f"clock: got {self.per_epoch} periods per epoch of {steps_per_epoch} steps, expected at most one "
                "period per step; the support is fixed within a step"
            )
        within = [-(-part * steps_per_epoch // self.per_epoch) for part in range(self.per_epoch)]
        epochs = range(0, steps, steps_per_epoch)
        return tuple(epoch + start for epoch in epochs for start in within if epoch + start < steps)


@dataclass(frozen=True, slots=True)
class EverySteps:
    """A period every so many steps, counted from the start of the phase."""

    every_steps: int

    def __post_init__(self) -> None:
        whole(self.every_steps, "clock: every_steps", at_least=1)

    def starts(self, steps: int, steps_per_epoch: int) -> tuple[int, ...]:
        return tuple(range(0, steps, self.every_steps))


@dataclass(frozen=True, slots=True)
class EqualParts:
    """So many periods of equal length, over the whole phase; as many as it has steps, if these are fewer."""

    parts: int

    def __post_init__(self) -> None:
        whole(self.parts, "clock: parts", at_least=1)

    def starts(self, steps: int, steps_per_epoch: int) -> tuple[int, ...]:
        return tuple(sorted({part * steps // self.parts for part in range(self.parts)}))


Clock = PerEpoch | EverySteps | EqualParts
