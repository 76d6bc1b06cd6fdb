"""Several releases of one step's batch, paid for by one charge."""

from __future__ import annotations

from dataclasses import replace
from typing import final

from sparsedp.errors import PrivacyError
from sparsedp.privacy.ledger import Charge, Ledger

_ROUNDING = 1e-12


@final
class SharedCharge:
    """A ledger for the releases of one step: pays for the step before the first, and sees that they add up to it.

    **Privacy.** Gaussian releases of the same sampled units with noise multipliers s_1, s_2, ..., each chosen in the
    light of those before, cost what one with `(s_1^-2 + s_2^-2 + ...)^(-1/2)` costs (Ghazi et al. 2023, Sec. 3.2).
    That one is the plan's, so a release that would exceed it is refused.
    """

    def __init__(self, ledger: Ledger, whole: Charge) -> None:
        self._ledger, self._whole = ledger, whole
        self._precision = 0.0
        self._releases: set[int] = set()

    def charge(self, charge: Charge) -> None:
        """Take one release's part of the step's charge.

        Raises:
            PrivacyError: it is of another step, would draw an earlier one's noise, or there is too little left.
        """
        whole = replace(charge, noise_multiplier=self._whole.noise_multiplier, release=self._whole.release)
        if whole != self._whole or charge.release in self._releases:
            raise PrivacyError(f"got {charge}, expected another release of {self._whole}")
        if charge.noise_multiplier <= 0:
            raise PrivacyError(f"got {charge}, expected noise in every release of the step")
        precision = self._precision + charge.noise_multiplier**-2
        if precision > self._whole.noise_multiplier**-2 * (1 + _ROUNDING):
            raise PrivacyError(
                f"{charge} and the releases before it cost more than {self._whole}; the plan says how a step's "
                "noise is shared"
            )
        if not self._releases:
            self._ledger.charge(self._whole)
        self._precision = precision
        self._releases.add(charge.release)
