"""What leaves the mechanism: the only gradient values the rest of the code may see."""

from __future__ import annotations

from typing import final

from torch import Tensor

from sparsedp.errors import PrivacyError
from sparsedp.parameters import Support

_SEAL = object()
"""Held by the mechanism alone; a test walks the syntax tree to see that nobody else takes it."""


@final
class Released:
    """A privatized mean gradient on a support. Safe to use in any way: all that follows is post-processing.

    Attributes:
        support: the coordinates it lives on.
        mean: k-vector, noisy sum divided by the *expected* batch size, in gradient space.
        noise_scale: k-vector, standard deviation of the noise in `mean`, per coordinate.
        phase: name of the plan's phase it was charged to.
        step: index of the step in the plan.
        for_release: False when a seed was used: reproducible, not for release.
        private: False for the ablations without clipping or without noise.
    """

    __slots__ = ("_mean", "_noise_scale", "for_release", "phase", "private", "step", "support")

    _mean: Tensor
    _noise_scale: Tensor

    support: Support
    phase: str
    step: int
    for_release: bool
    private: bool

    def __init__(
        self,
        *,
        support: Support,
        mean: Tensor,
        noise_scale: Tensor,
        phase: str,
        step: int,
        for_release: bool,
        private: bool,
        seal: object,
    ) -> None:
        if seal is not _SEAL:
            raise PrivacyError("Released values are made by the mechanism alone; call privatize")
        object.__setattr__(self, "support", support)
        object.__setattr__(self, "_mean", mean)
        object.__setattr__(self, "_noise_scale", noise_scale)
        object.__setattr__(self, "phase", phase)
        object.__setattr__(self, "step", step)
        object.__setattr__(self, "for_release", for_release)
        object.__setattr__(self, "private", private)

    def __setattr__(self, name: str, value: object) -> None:
        raise PrivacyError("Released values are read-only")

    @property
    def mean(self) -> Tensor:
        """The privatized mean gradient on the support (a copy)."""
        return self._mean.clone()

    @property
    def noise_scale(self) -> Tensor:
        """Standard deviation of the noise on each active coordinate (a copy)."""
        return self._noise_scale.clone()

    @property
    def noise_variance(self) -> Tensor:
        """Its square; a single number, to be read k times, where all coordinates have the same noise."""
        alike = self._noise_scale.stride() == (0,)
        scale = self._noise_scale[:1] if alike else self._noise_scale
        return scale.square().expand_as(self._noise_scale)

    def copy_to(self, out: Tensor, start: int = 0) -> Tensor:
        """As many numbers of `mean` as `out` has, from `start` on, written into it in its shape and type."""
        return out.copy_(self._mean[start : start + out.numel()].view(out.shape))

    def dense(self) -> Tensor:
        """The mean as a d-vector, zero off the support."""
        return self.support.scatter(self._mean)

    def __repr__(self) -> str:
        return f"Released(step={self.step}, phase={self.phase!r}, support={self.support})"
