"""The ledger: what has been spent, written down before it is spent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from sparsedp.privacy.events import Spend, merged


@dataclass(frozen=True, slots=True)
class Charge:
    """The privacy cost of one release: one step of a Poisson-subsampled Gaussian mechanism.

    `step` counts from 0 over the whole plan. A `sampling_rate` of 1 is a plain Gaussian release (feature statistics).
    A `noise_multiplier` of 0 means no protection: the release is not private. `release` tells apart several releases
    of one step, which share its charge (`SharedCharge`).
    """

    phase: str
    step: int
    sampling_rate: float
    noise_multiplier: float
    release: int = 0

    @property
    def key(self) -> tuple[int, ...]:
        """What a seeded run's noise is drawn by: no two releases have the same."""
        return (self.step, self.release) if self.release else (self.step,)


class Ledger(Protocol):
    """Takes a charge before the release it pays for, or raises and so prevents the release."""

    def charge(self, charge: Charge) -> None:
        """Record the cost; on return it is durable."""
        ...


class RunLedger(Ledger, Protocol):
    """The ledger of a whole run: what a mechanism needs, and what a run asks of it."""

    @property
    def charged(self) -> int:
        """Steps paid for; an open block counts whole."""
        ...

    @property
    def next_step(self) -> int:
        """The first step that can still be released."""
        ...

    @property
    def head(self) -> str | None:
        """Hash of the last line; None without a file."""
        ...

    @property
    def length(self) -> int:
        """Number of lines; 0 without a file."""
        ...

    def spends(self) -> tuple[Spend, ...]:
        """Everything charged, equal mechanisms added up."""
        ...

    def close(self) -> None:
        """Charging is over."""
        ...


@dataclass(slots=True)
class MemoryLedger:
    """A ledger that lives as long as the process: for runs without a folder, tests and short scripts."""

    charges: list[Charge] = field(default_factory=list)

    def charge(self, charge: Charge) -> None:
        """Append the charge."""
        self.charges.append(charge)

    @property
    def charged(self) -> int:
        """Steps paid for."""
        return len(self.charges)

    @property
    def next_step(self) -> int:
        """The step after the last one charged."""
        return self.charges[-1].step + 1 if self.charges else 0

    @property
    def head(self) -> None:
        """There is no file."""
        return None

    @property
    def length(self) -> int:
        """There is no file."""
        return 0

    def spends(self) -> tuple[Spend, ...]:
        """Everything charged, equal mechanisms added up."""
        return merged(Spend(c.sampling_rate, c.noise_multiplier, 1) for c in self.charges)

    def close(self) -> None:
        """Nothing to release."""
