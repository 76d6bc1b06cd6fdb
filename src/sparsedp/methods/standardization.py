"""AdaDPIGU's running statistics: the centre and scale gradients are standardized with, from released values alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsedp.core.errors import SparseDPError
from sparsedp.core.geometry import Standardized
from sparsedp.core.support import Support
from sparsedp.privacy.released import Released


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
    """Running mean `alpha` and variance `beta` of the released gradient, d numbers each, float64.

    Off the support they are 0 and 1: a coordinate that enters, or comes back, starts afresh.
    """

    alpha: Tensor
    beta: Tensor

    @classmethod
    def fresh(cls, dimension: int) -> Statistics:
        """`alpha = 0`, `beta = 1`: as at the switch from the warm-up."""
        return cls(torch.zeros(dimension, dtype=torch.float64), torch.ones(dimension, dtype=torch.float64))

    def geometry(self, support: Support, decays: Decays) -> Standardized:
        """`z = (g - alpha) / (sqrt(beta) + mu)` on the support (Alg. 2 line 9)."""
        scale = torch.sqrt(support.gather(self.beta)) + decays.stabilizer
        return Standardized(centre=support.gather(self.alpha), scale=scale)

    def restricted(self, support: Support) -> Statistics:
        """The statistics with every coordinate off `support` back at its start."""
        alpha, beta = support.gather(self.alpha), support.gather(self.beta)
        return Statistics(support.scatter(alpha), support.scatter(beta, fill=1.0))

    def updated(self, released: Released, decays: Decays) -> Statistics:
        """After one release (Alg. 2 line 15); `beta` moves with the old `alpha`. Only the support moves."""
        support = released.support
        gradient = released.mean.to("cpu", torch.float64)
        alpha, beta = support.gather(self.alpha), support.gather(self.beta)
        beta = decays.variance * beta + (1 - decays.variance) * (gradient - alpha) ** 2
        alpha = decays.centre * alpha + (1 - decays.centre) * gradient
        return Statistics(
            self.alpha.index_copy(0, support.indices, alpha), self.beta.index_copy(0, support.indices, beta)
        )
