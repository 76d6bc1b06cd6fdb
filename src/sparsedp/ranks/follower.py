"""What ranks have that do not lead: coins but no noise, and a ledger that only remembers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sparsedp.errors import PrivacyError
from sparsedp.privacy.ledger import Charge, VerifiedLedger
from sparsedp.privacy.plan import Spend
from sparsedp.randomness import PrivateRandomness, StepSecret


@final
@dataclass(frozen=True, slots=True)
class FollowerRandomness:
    """Coins and secrets of this rank's own units; noise is drawn once, elsewhere."""

    private: PrivateRandomness

    @property
    def for_release(self) -> bool:
        """Whether what it touches may be released with its guarantee."""
        return self.private.for_release

    def rounded_gaussian(self, bits: int, size: int, key: Sequence[int]) -> Tensor:
        """None here.

        Raises:
            PrivacyError: always. A second noise would belong to a second release.
        """
        raise _no_noise_here()

    def add_rounded_gaussian(self, bits: int, sums: Tensor, key: Sequence[int]) -> None:
        """None here.

        Raises:
            PrivacyError: always. A second noise would belong to a second release.
        """
        raise _no_noise_here()

    def bernoulli(self, probability: float, size: int, key: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Coins."""
        return self.private.bernoulli(probability, size, key)

    def below(self, bounds: npt.NDArray[np.int64], key: Sequence[int]) -> npt.NDArray[np.int64]:
        """Uniform integers."""
        return self.private.below(bounds, key)

    def secret(self, key: Sequence[int]) -> StepSecret:
        """What the random numbers inside a step's model and data set are computed from."""
        return self.private.secret(key)


def _no_noise_here() -> PrivacyError:
    return PrivacyError(
        "this rank draws no noise: the leading rank does, once for all. A sum was released past the exchange; "
        "this is a bug in sparsedp"
    )


@final
@dataclass(slots=True)
class FollowerLedger:
    """Knows what the leading rank's ledger file says, and writes nothing.

    Attributes:
        record: the file, as it was when the run began or went on.
        next_step: the first step that can still be released.
    """

    record: VerifiedLedger
    next_step: int

    def charge(self, charge: Charge) -> None:
        """Count what the leading rank pays for before it releases anything."""
        if charge.step == self.record.charged:
            self.record = self.record.extended(self.record.next_block(), self.record.head)
        self.next_step = max(self.next_step, charge.step + 1)

    @property
    def charged(self) -> int:
        """Steps paid for; an open block counts whole."""
        return self.record.charged

    @property
    def head(self) -> None:
        """There is no file here."""
        return None

    @property
    def length(self) -> int:
        """There is no file here."""
        return 0

    def spends(self) -> tuple[Spend, ...]:
        """Everything charged, equal mechanisms added up."""
        return self.record.spends()

    def close(self) -> None:
        """Nothing to release."""
