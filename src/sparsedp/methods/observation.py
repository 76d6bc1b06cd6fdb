"""What a step shows to a score: a released gradient as d numbers, with the noise variance in each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsedp.errors import SparseDPError
from sparsedp.privacy.mechanism import Released


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """A d-vector to score and the variance of the Gaussian noise in each of its coordinates (float64, CPU).

    **Privacy.** Made from a `Released` and public numbers alone, so all that follows is post-processing.
    """

    gradient: Tensor
    noise_variance: Tensor


def observe_released(released: Released, frozen_noise: Tensor, frozen_std: float) -> Observation:
    """The released gradient on its support and, on frozen coordinates, fresh public noise (RS Alg. 4, line 22).

    A frozen coordinate then looks like an active one without signal, and can come back.

    Args:
        released: one step's release.
        frozen_noise: d standard normal numbers, public; those on the support are not used.
        frozen_std: their scale, the noise an active coordinate would have had.
    """
    support = released.support
    if frozen_noise.shape != (support.dimension,):
        raise SparseDPError(
            f"frozen_noise: got shape {tuple(frozen_noise.shape)}, expected d={support.dimension} numbers"
        )
    gradient = frozen_noise.to("cpu", torch.float64) * frozen_std
    variance = torch.full((support.dimension,), frozen_std**2, dtype=torch.float64)
    gradient[support.indices] = released.mean.to("cpu", torch.float64)
    variance[support.indices] = released.noise_scale.to("cpu", torch.float64) ** 2
    return Observation(gradient, variance)


def observe_dense(released: Released) -> Observation:
    """A release on the full support, as it is."""
    if not released.support.is_full:
        raise SparseDPError(
            f"step {released.step} was released on {released.support}, expected the full support; "
            "use observe_released, which says what frozen coordinates look like"
        )
    return Observation(
        released.mean.to("cpu", torch.float64), released.noise_variance.to("cpu", torch.float64)
    )
