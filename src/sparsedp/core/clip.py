"""Clipping: how one unit's contribution is bounded, and the sensitivity that follows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsedp.errors import PrivacyError

ROUNDING_MARGIN = 1e-3
"""The clip aims this much below its bound, so that float32 rounding of norms and sums cannot carry one unit over it.

docs/engine.md says what is bounded by it.
"""


@dataclass(frozen=True, slots=True)
class FlatClip:
    """Scale a contribution down to L2 norm at most `norm`.

    **Privacy.** The sensitivity of the sum to adding or removing one unit is `norm`.
    **Edge cases.** A contribution whose norm is not finite gets factor 0: it counts as absent.
    """

    norm: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.norm) and self.norm > 0):
            raise PrivacyError(f"clip_norm: got {self.norm}, expected a finite number > 0")

    @property
    def sensitivity(self) -> float:
        """Largest L2 change of the clipped sum when one unit comes or goes."""
        return self.norm

    def tightened(self, bound: float) -> FlatClip:
        """The same clip with a smaller bound, so as to leave room for what comes after it."""
        return FlatClip(min(bound, self.norm))

    def factors(self, norms: Tensor) -> Tensor:
        """min(1, C/norm) for each contribution, from its norm."""
        bound = self.norm / (1 + ROUNDING_MARGIN)
        factors = torch.clamp(bound / norms, max=1.0)
        return torch.where(norms.isfinite(), factors, torch.zeros_like(norms))


@dataclass(frozen=True, slots=True)
class NoClip:
    """No bound: for the non-private ablations only.

    **Privacy.** None: the sensitivity is infinite.
    """

    @property
    def sensitivity(self) -> float:
        """Infinite."""
        return math.inf

    def tightened(self, bound: float) -> NoClip:
        """Itself."""
        return self

    def factors(self, norms: Tensor) -> Tensor:
        """One for every finite contribution."""
        return norms.isfinite().to(norms.dtype)


Clip = FlatClip | NoClip
