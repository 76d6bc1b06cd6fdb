"""The convergence bounds of TP-TopK (Theorem 6.3, Lemma 6.4, Corollary 6.6) and of AdaDPIGU (Theorems 13, 16, 17)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from sparsedp.errors import SparseDPError
from sparsedp.parameters import Support


@final
@dataclass(frozen=True, slots=True)
class ProjectedBound:
    """The four terms of TP-TopK, Theorem 6.3, whose sum bounds `mean_t ||P_t grad L||^2`."""

    progress: float
    clipping_bias: float
    mini_batch: float
    dp_noise: float

    @property
    def total(self) -> float:
        """The bound."""
        return self.progress + self.clipping_bias + self.mini_batch + self.dp_noise

    def full_gradient(self, energy_capture: float) -> float:
        """The bound on `mean_t ||grad L||^2` of Corollary 6.6: the total over alpha_T."""
        if not 0 < energy_capture <= 1:
            raise SparseDPError(f"alpha_T: got {energy_capture}, expected a number in (0, 1]")
        return self.total / energy_capture


def projected_bound(
    *,
    loss_gap: float,
    smoothness: float,
    learning_rate: float,
    steps: int,
    squared_biases: Sequence[float],
    batch_variance: float,
    mean_active: float,
    noise_std: float,
) -> ProjectedBound:
    """The terms of Theorem 6.3.

    Args:
        loss_gap: `L_0 - L*`, the loss at the start of the phase less the least possible.
        smoothness: beta.
        learning_rate: eta, constant; plain SGD, no momentum.
        steps: T_2.
        squared_biases: `||b_t||^2` at some or all steps; their mean is used.
        batch_variance: `tau^2/B`, the variance of the mean clipped gradient over batches.
        mean_active: k averaged over steps.
        noise_std: nu_2, on each coordinate of a released mean gradient.

    Raises:
        SparseDPError: the learning rate is over `1/beta`, where the theorem says nothing.
    """
    if not 0 < learning_rate * smoothness <= 1 + 1e-9:
        raise SparseDPError(
            f"learning_rate: got {learning_rate} with smoothness {smoothness}, expected 0 < eta <= 1/beta = "
            f"{1 / smoothness if smoothness else math.inf:.3g}; the theorem does not cover larger ones"
        )
    scale = smoothness * learning_rate
    return ProjectedBound(
        progress=2 * loss_gap / (learning_rate * steps),
        clipping_bias=math.fsum(squared_biases) / len(squared_biases),
        mini_batch=scale * batch_variance,
        dp_noise=scale * mean_active * noise_std**2,
    )


def clipping_bias_bound(norms: Tensor, clip_norm: float) -> float:
    """`E(||g_i|| - C)+` of Lemma 6.4 from the norms of per-sample gradients on the support: a bound on `||b||`."""
    return float((norms.double() - clip_norm).clamp(min=0).mean())


def retained_energy(gradient: Tensor, support: Support) -> float:
    """AdaDPIGU's energy-retention ratio alpha, `||m . u||^2/||u||^2` (Lemma 14); 1 for a zero vector."""
    squares = gradient.double() ** 2
    total = float(squares.sum())
    return float(support.gather(squares).sum()) / total if total else 1.0


def alignment_bound(
    *, loss_gap: float, smoothness: float, learning_rate: float, steps: int, clip_norm: float
) -> float:
    """The bound of AdaDPIGU, Theorem 13 on `mean_t <grad L, clipped gradient>` of clipped SGD.

    **Deviations.** The paper prints `eta loss_gap/T + eta G C^2/(2T)`; the first eta belongs in the denominator, and
    averaging a constant over T steps does not divide it by T. This is `loss_gap/(eta T) + eta G C^2/2`.
    """
    return loss_gap / (learning_rate * steps) + learning_rate * smoothness * clip_norm**2 / 2


def retention_bound(
    *,
    loss_gap: float,
    smoothness: float,
    steps: int,
    retained: float,
    deviation_bound: float,
    noise_std: float,
    active: int,
    batch_size: float,
) -> float:
    """The bound of AdaDPIGU, Theorem 16 on `mean_t ||grad L||^2` of noisy SGD on k coordinates, rate `1/(G sqrt(T))`.

    Args:
        loss_gap: starting loss less the least loss.
        smoothness: G.
        steps: T.
        retained: the least energy-retention ratio over the steps.
        deviation_bound: bound on the norm of a sample's deviation from the mean gradient.
        noise_std: of the noise on each coordinate of the summed gradient.
        active: k.
        batch_size: B.

    **Deviations.** The paper multiplies the noise by alpha (its Corollary 15) and cancels it, which leaves
    `d noise^2`; a fixed mask keeps k/d of isotropic noise, whatever alpha is. So the spread here has k for d and is
    over alpha too.
    """
    if not 0 < retained <= 1:
        raise SparseDPError(f"retained: got {retained}, expected an energy-retention ratio in (0, 1]")
    spread = deviation_bound**2 / batch_size + active * noise_std**2 / batch_size**2
    return (2 * smoothness * loss_gap + spread) / (retained * math.sqrt(steps))


def private_alignment_bound(
    *,
    loss_decrease: float,
    smoothness: float,
    learning_rate: float,
    clip_norm: float,
    noise_multiplier: float,
    active: int,
    batch_size: float,
) -> float:
    """The bound of AdaDPIGU, Theorem 17 on `<grad L, clipped masked gradient>` in a step of DP-SGD on k coordinates.

    **Deviations.** The paper's noise term is `alpha d noise^2 C^2/B`; noise is added once to the sum and on k
    coordinates, which makes it `k noise^2 C^2/B^2`.
    """
    noise = active * (noise_multiplier * clip_norm / batch_size) ** 2
    return loss_decrease / learning_rate + smoothness * learning_rate / 2 * (clip_norm**2 + noise)
