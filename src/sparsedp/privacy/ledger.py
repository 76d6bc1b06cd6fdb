"""The ledger: what has been spent, written down before it is spent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Charge:
    """The privacy cost of one release: one step of a Poisson-subsampled Gaussian mechanism.

    A `noise_multiplier` of 0 means no protection: the release is not private.
    """

    phase: str
    step: int
    sampling_rate: float
    noise_multiplier: float


class Ledger(Protocol):
    """Takes a charge before the release it pays for, or raises and so prevents the release."""

    def charge(self, charge: Charge) -> None:
        """Record the cost; on return it is durable."""
        ...


@dataclass(slots=True)
class MemoryLedger:
    """A ledger that lives as long as the process: for tests and short scripts."""

    charges: list[Charge] = field(default_factory=list)

    def charge(self, charge: Charge) -> None:
        """Append the charge."""
        self.charges.append(charge)
