"""What callbacks, logs and results may know: released values and public quantities only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sparsedp.privacy.released import Released
from sparsedp.runs.history import EpochReport


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step is done.

    Attributes:
        step: its index in the plan.
        epoch: the epoch it belongs to, from 1.
        phase: the plan's phase.
        released: the privatized gradient.
        learning_rates: one per parameter group.
    """

    step: int
    epoch: int
    phase: str
    released: Released
    learning_rates: tuple[float, ...]


Event = StepReport | EpochReport
Callback = Callable[[Event], None]
"""Called after each step and each epoch, in order."""
