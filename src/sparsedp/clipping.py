"""How one unit's contribution is bounded: the clip, the sensitivity that follows, and the space clipped in.

Gradients are clipped as they are (`Identity`), or standardized coordinate by coordinate (`Standardized`). All public.
The clip is applied where sums are made: `grad_sample.accumulate.ClippedSum.add`, and
`grad_sample.query.sum_clipped_rows` for the reference engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Self

import torch
from torch import Tensor

from sparsedp.errors import PrivacyError, SparseDPError

ROUNDING_MARGIN = 1e-3
"""The clip aims this much below its bound, so that float32 rounding of norms and sums cannot carry one unit over it.

docs/privacy.md ("The grid") says what is bounded by it.
"""


@dataclass(frozen=True, slots=True)
class FlatClip:
    """Scale a contribution down to L2 norm at most `norm`.

    Formal guarantees: The sensitivity of the sum to adding or removing one unit is `norm`.
    Edge cases: A contribution whose norm is not finite gets factor 0: it counts as absent.
    """

    norm: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.norm) and self.norm > 0):
            raise PrivacyError(f"clip_norm: got {self.norm}, expected a finite number > 0")

    @property
    def sensitivity(self) -> float:
        """Largest L2 change of the clipped sum when one unit comes or goes."""
        return self.norm

    def tightened(self, bound: float) -> Self:
        """The same clip with a smaller bound, so as to leave room for what comes after it."""
        return replace(self, norm=min(bound, self.norm))

    def factors(self, norms: Tensor) -> Tensor:
        """min(1, C/norm) for each contribution, from its norm."""
        bound = self.norm / (1 + ROUNDING_MARGIN)
        factors = torch.clamp(bound / norms, max=1.0)
        return torch.where(norms.isfinite(), factors, torch.zeros_like(norms))


GAMMA = 0.01
"""The stability constant of automatic clipping, as Bu et al. (2023) set it."""


@dataclass(frozen=True, slots=True)
class AutomaticClip(FlatClip):
    """Scale every contribution to nearly the same length: the factor is `norm / (its norm + GAMMA)` (AUTO-S).

    Formal guarantees and edge cases: as `FlatClip`.
    """

    norm: float = 1.0

    def factors(self, norms: Tensor) -> Tensor:
        """C/(norm + GAMMA) for each contribution, from its norm."""
        factors = self.norm / (1 + ROUNDING_MARGIN) / (norms + GAMMA)
        return torch.where(norms.isfinite(), factors, torch.zeros_like(norms))


@dataclass(frozen=True, slots=True)
class LayerClip:
    """Scale the part of a contribution that lies in each group of parameters down to that group's norm.

    Formal guarantees: Each group moves by at most its own norm when one unit comes or goes, so the sum moves by at
    most the root of their squares.
    Edge cases: A part whose norm is not finite gets factor 0; the contribution's other parts stay.

    Attributes:
        norms: a pattern of parameter names (`fnmatch`) and a norm for each group; a parameter belongs to the first
            pattern that matches its name.
    """

    norms: tuple[tuple[str, float], ...]

    def __post_init__(self) -> None:
        if not self.norms or len({pattern for pattern, _ in self.norms}) < len(self.norms):
            raise PrivacyError(
                f"max_grad_norm: got {self.norms}, expected patterns of names, none of them twice"
            )
        for _, norm in self.norms:
            FlatClip(norm)

    @property
    def sensitivity(self) -> float:
        """Largest L2 change of the clipped sum when one unit comes or goes."""
        return math.hypot(*(norm for _, norm in self.norms))

    def tightened(self, bound: float) -> LayerClip:
        """The same clip with every norm made smaller by one factor, so that the sensitivity is at most `bound`."""
        scale = min(1.0, bound / self.sensitivity)
        return LayerClip(tuple((pattern, norm * scale) for pattern, norm in self.norms))

    def factors(self, norms: Tensor) -> Tensor:
        """min(1, C/norm) for each group's part of each contribution: [groups, contributions], as the norms."""
        pairs = zip(self.norms, norms, strict=True)
        return torch.stack([FlatClip(norm).factors(part) for (_, norm), part in pairs])

    def group(self, name: str) -> int:
        """The number of the group that a parameter belongs to."""
        for number, (pattern, _) in enumerate(self.norms):
            if fnmatchcase(name, pattern):
                return number
        patterns = [pattern for pattern, _ in self.norms]
        raise PrivacyError(
            f"max_grad_norm: no pattern matches the parameter {name!r}; got {patterns}. "
            'End with a pattern for all others: {..., "*": 1.0}'
        )

    def check(self, names: Sequence[str]) -> None:
        """Refuse a trainable parameter without a group, and a group without a parameter."""
        unused = set(range(len(self.norms))) - {self.group(name) for name in names}
        if unused:
            patterns = [self.norms[number][0] for number in sorted(unused)]
            raise PrivacyError(
                f"max_grad_norm: the patterns {patterns} are the first match of no trainable parameter, and would "
                f"only add noise; remove them, or move them up. The parameters are {list(names)}"
            )


Clip = FlatClip | AutomaticClip | LayerClip


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
        finite = self.centre.isfinite().all() and self.scale.isfinite().all()
        if self.centre.shape != self.scale.shape or not bool(finite and (self.scale > 0).all()):
            raise SparseDPError(
                "Standardized: centre must be finite, scale finite and positive, and both alike in shape"
            )

    def forward(self, gradient: Tensor) -> Tensor:
        """Into the clipping space: z = (g - centre) / scale, on the last axis."""
        return (gradient - self.centre.to(gradient)) / self.scale.to(gradient)

    def inverse(self, value: Tensor) -> Tensor:
        """Back from the clipping space: g = z * scale + centre (Alg. 2 line 13), times the gain."""
        return (value * self.scale.to(value) + self.centre.to(value)) * self.gain

    def undo(self, restored: Tensor) -> Tensor:
        """What `inverse` made this from."""
        return self.forward(restored / self.gain)

    def noise_scale(self, noise_std: float, size: int) -> Tensor:
        """Standard deviation of the restored noise on each active coordinate: noise_std * scale * gain."""
        if size != self.scale.numel():
            raise SparseDPError(f"Standardized: scale has {self.scale.numel()} entries, the support {size}")
        return noise_std * self.scale.to("cpu", torch.float64) * self.gain


Geometry = Identity | Standardized
