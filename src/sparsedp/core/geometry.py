"""The space gradients are clipped in: as they are, or standardized coordinate by coordinate. Public."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsedp.errors import SparseDPError


@dataclass(frozen=True, slots=True)
class Identity:
    """Gradients are clipped as they are."""

    def forward(self, gradient: Tensor) -> Tensor:
        """Into the clipping space."""
        return gradient

    def inverse(self, value: Tensor) -> Tensor:
        """Back from the clipping space."""
        return value

    def undo(self, restored: Tensor) -> Tensor:
        """What `inverse` made this from."""
        return restored

    def noise_scale(self, noise_std: float, size: int) -> Tensor:
        """Standard deviation of the restored noise on each of `size` active coordinates."""
        return torch.tensor(noise_std, dtype=torch.float64).expand(size)


@dataclass(frozen=True, slots=True, eq=False)
class Standardized:
    """Per-coordinate centre and scale on the support: z = (g - centre) / scale (AdaDPIGU, Alg. 2 line 9).

    Both are k-vectors aligned with the support's sorted indices; the scale is positive. What is restored is
    multiplied by `gain`, a public number: `1/scale` leaves it as long as it was clipped.
    """

    centre: Tensor
    scale: Tensor
    gain: float = 1.0

    def __post_init__(self) -> None:
        if self.centre.shape != self.scale.shape or self.centre.dim() != 1:
            raise SparseDPError(
                f"Standardized: got centre {tuple(self.centre.shape)} and scale {tuple(self.scale.shape)}, "
                "expected two vectors of one length, the size of the support"
            )
        finite = self.centre.isfinite().all() and self.scale.isfinite().all()
        if not bool(finite) or not bool((self.scale > 0).all()):
            raise SparseDPError("Standardized: centre must be finite and scale finite and positive")

    def forward(self, gradient: Tensor) -> Tensor:
        """Into the clipping space: z = (g - centre) / scale, on the last axis."""
        return (gradient - self.centre.to(gradient)) / self.scale.to(gradient)

    def inverse(self, value: Tensor) -> Tensor:
        """Back from the clipping space: g = z * scale + centre (Alg. 2 line 13), times the gain."""
        restored = value * self.scale.to(value) + self.centre.to(value)
        return restored if self.gain == 1 else restored * self.gain

    def undo(self, restored: Tensor) -> Tensor:
        """What `inverse` made this from."""
        return self.forward(restored if self.gain == 1 else restored / self.gain)

    def noise_scale(self, noise_std: float, size: int) -> Tensor:
        """Standard deviation of the restored noise on each active coordinate: noise_std * scale * gain."""
        if size != self.scale.numel():
            raise SparseDPError(f"Standardized: scale has {self.scale.numel()} entries, the support {size}")
        return noise_std * self.scale.to("cpu", torch.float64) * self.gain


Geometry = Identity | Standardized
