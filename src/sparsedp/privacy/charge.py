"""Charges: what one release costs, and who may be asked to pay for it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol, final

from sparsedp.errors import PrivacyError


@dataclass(frozen=True, slots=True)
class Charge:
    """The privacy cost of one release: one step of a Poisson-subsampled Gaussian mechanism.

    `step` counts from 0 over the whole plan. A `sampling_rate` of 1 is a plain Gaussian release, a `noise_multiplier`
    of 0 is no protection. `release` tells apart several releases of one step, which share its charge (`SplitCharge`).
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


class Chargeable(Protocol):
    """Takes a charge before the release it pays for, or raises and so prevents the release."""

    def charge(self, charge: Charge) -> None:
        """Record the cost; on return it is durable."""


@final
@dataclass(slots=True)
class ChargeLog:
    """A list of charges that no plan is checked against: for audits and experiments that make single releases."""

    charges: list[Charge] = field(default_factory=list)

    def charge(self, charge: Charge) -> None:
        """Append the charge."""
        self.charges.append(charge)


_ROUNDING = 1e-12


@final
class SplitCharge:
    """A ledger for the releases of one step: pays for the step before the first, and sees that they add up to it.

    Formal guarantees:
        Gaussian releases of the same sampled units with noise multipliers s_1, s_2, ..., each chosen in the light of
        those before, cost what one with `(s_1^-2 + s_2^-2 + ...)^(-1/2)` costs (Ghazi et al. 2023, Sec. 3.2). That
        one is the plan's, so a release that would exceed it is refused.
    """

    def __init__(self, ledger: Chargeable, whole: Charge) -> None:
        self._ledger, self._whole = ledger, whole
        self._precision = 0.0
        self._releases: set[int] = set()

    def charge(self, charge: Charge) -> None:
        """Take one release's part: of this step, with noise of its own, and no more than is left."""
        whole = replace(charge, noise_multiplier=self._whole.noise_multiplier, release=self._whole.release)
        if whole != self._whole or charge.release in self._releases:
            raise PrivacyError(f"got {charge}, expected another release of {self._whole}")
        if charge.noise_multiplier <= 0:
            raise PrivacyError(f"got {charge}, expected noise in every release of the step")
        precision = self._precision + charge.noise_multiplier**-2
        if precision > self._whole.noise_multiplier**-2 * (1 + _ROUNDING):
            raise PrivacyError(f"{charge} and the releases before it cost more than {self._whole}")
        if not self._releases:
            self._ledger.charge(self._whole)
        self._precision = precision
        self._releases.add(charge.release)
