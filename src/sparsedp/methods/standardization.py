"""AdaDPIGU's running statistics: the centre and scale gradients are standardized with, from released values alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsedp.core.geometry import Standardized
from sparsedp.errors import SparseDPError
from sparsedp.parameters import Support
from sparsedp.privacy.mechanism import Released


@dataclass(frozen=True, slots=True)
class Decays:
    """The constants of AdaDPIGU Alg. 2: `gamma_1`, `gamma_2` and `mu`."""

    centre: float = 0.9
    variance: float = 0.999
    stabilizer: float = 1e-6

    def __post_init__(self) -> None:
        for name, value in (("centre_decay", self.centre), ("variance_decay", self.variance)):
            if not 0 <= value < 1:
                raise SparseDPError(f"{name}: got {value}, expected a number in [0, 1)")
        if not 0 < self.stabilizer < float("inf"):
            raise SparseDPError(f"stabilizer: got {self.stabilizer}, expected a small number > 0")


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """Running mean `alpha` and variance `beta` of the released gradient, k numbers each on a support, float64.

    Off the support they are 0 and 1: a coordinate that enters, or comes back, starts afresh.
    """

    support: Support
    alpha: Tensor
    beta: Tensor

    @classmethod
    def fresh(cls, support: Support) -> Statistics:
        """`alpha = 0`, `beta = 1`: as at the switch from the warm-up."""
        alpha = torch.zeros(support.size, dtype=torch.float64)
        return cls(support, alpha, torch.ones_like(alpha))

    def geometry(self, decays: Decays) -> Standardized:
        """`z = (g - alpha) / (sqrt(beta) + mu)` on the support (Alg. 2 line 9)."""
        return Standardized(centre=self.alpha, scale=torch.sqrt(self.beta) + decays.stabilizer)

    def moved_to(self, support: Support) -> Statistics:
        """The statistics on another support: coordinates in both keep theirs, the others start."""
        if support == self.support:
            return self
        there = Statistics.fresh(support)
        old, new = self.support.indices, support.indices
        if old.numel() and new.numel():
            place = torch.searchsorted(new, old).clamp_(max=new.numel() - 1)
            both = new[place] == old
            there.alpha[place[both]], there.beta[place[both]] = self.alpha[both], self.beta[both]
        return there

    def updated(self, released: Released, decays: Decays) -> Statistics:
        """The moving averages after a release (Alg. 2 line 15); `beta` moves with the old `alpha`."""
        gradient, alpha = released.mean.to("cpu", torch.float64), self.alpha
        beta = decays.variance * self.beta + (1 - decays.variance) * (gradient - alpha) ** 2
        return Statistics(self.support, decays.centre * alpha + (1 - decays.centre) * gradient, beta)
