"""Periods: when the support may change within the main phase."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sparsedp.errors import SparseDPError


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


Clock = PerEpoch | EverySteps


def _check_positive(value: int, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SparseDPError(f"clock: got {value!r} {what}, expected a whole number >= 1")
