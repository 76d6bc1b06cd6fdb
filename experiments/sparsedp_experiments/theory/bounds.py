"""The papers' bounds as functions of measured numbers.

TP-TopK (Theorem 6.3, Lemma 6.4, Corollary 6.6), AdaDPIGU (Theorems 13, 16, 17), RS (Theorems 3.2 to 3.5, best rate).
In RS's words G is the smoothness, gamma the learning rate, r the share of frozen coordinates, and its bounds are on
`mean_t P(||xi|| < 3C/4) h(grad) ||grad||` with `h(grad) = min(||grad||, C/4)` and xi an example's deviation from the
mean gradient; Theorem 3.2 is on `mean_t ||grad||^2`. `loss_gap` is the starting loss less the least possible one;
`deviation_bound` bounds the norm of a sample's deviation; `noise_std` is that of each coordinate of the sum
(in Theorem 6.3: of the mean, nu_2); `retained` is the least energy-retention ratio, `active` k, `dimension` d,
`batch_size` B, `steps` T, and `rate` the share of frozen coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from sparsedp.errors import SparseDPError
from sparsedp.parameters import Support
from sparsedp.randomness import PublicRandomness


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
        return self.progress + self.clipping_bias + self.mini_batch + self.dp_noise

    def full_gradient(self, energy_capture: float) -> float:
        """The bound on `mean_t ||grad L||^2` of Corollary 6.6: the total over alpha_T."""
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
    """The terms of Theorem 6.3, for plain SGD.

    `squared_biases` are `||b_t||^2` at some or all steps, `batch_variance` is `tau^2/B`, that of the mean clipped
    gradient over batches, and `mean_active` is k averaged over steps. A rate over `1/beta` is refused.
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

    **Deviations.** The paper multiplies the noise by alpha (its Corollary 15) and cancels it, which leaves
    `d noise^2`; a fixed mask keeps k/d of isotropic noise, whatever alpha is. So the spread here has k for d and is
    over alpha too.
    """
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


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Descent:
    """A run of DP-SGD as the bounds see it."""

    loss_gap: float
    smoothness: float
    learning_rate: float
    clip_norm: float
    noise_multiplier: float  # the noise on the sum over C
    dimension: int
    batch_size: float
    steps: int
    symmetry_error: float = 0.0  # mean over steps of `E_m[b'_t]`, what the asymmetry of the deviations adds

    @property
    def enlarged(self) -> float:
        """Delta_C (RS, App. G): the terms that sparsification enlarges."""
        progress = self.loss_gap / (self.learning_rate * self.steps)
        return progress + self.learning_rate * self.smoothness * self.clip_norm**2 / 2 - self.symmetry_error

    @property
    def noise(self) -> float:
        """Delta_sigma (RS, Lemma 3.4): `C^2 noise_multiplier^2 d G / (2 B^2)`."""
        noise_energy = (self.clip_norm * self.noise_multiplier / self.batch_size) ** 2 * self.dimension
        return noise_energy * self.smoothness / 2

    @property
    def best_rate(self) -> float:
        """`r* = max(0, 1 - Delta_C/(gamma Delta_sigma))`, the rate of the least bound when kappa is sqrt(1 - r).

        **Deviations.** RS, eq. 114 to 116 drop the gamma that Theorem 3.5 has before Delta_sigma.
        """
        scaled = self.learning_rate * self.noise
        return max(0.0, 1 - self.enlarged / scaled) if scaled else 0.0

    def clipped_bound(self, kappa: float) -> float:
        """The bound of RS, Theorem 3.4 (clipping, no noise): `Delta_C/kappa`."""
        return self.enlarged / kappa

    def private_bound(self, rate: float, kappa: float) -> float:
        """The bound of RS, Theorem 3.5: `(Delta_C + (1-r) gamma Delta_sigma)/kappa`; with r=0, kappa=1 its eq. 15."""
        return (self.enlarged + (1 - rate) * self.learning_rate * self.noise) / kappa


def best_rate_at_most(*, noise_multiplier: float, dimension: int, batch_size: float) -> float:
    """A bound on r* from public numbers alone: `max(0, 1 - B^2/(noise_multiplier^2 d))`.

    Delta_C is at least `gamma G C^2/2`, as no loss is below the least one, if the deviations are symmetric. Over
    `gamma Delta_sigma` the smoothness, learning rate and clip cancel.
    """
    noise = noise_multiplier**2 * dimension
    return max(0.0, 1 - batch_size**2 / noise) if noise else 0.0


def noisy_bound(
    *,
    loss_gap: float,
    smoothness: float,
    deviation_bound: float,
    noise_std: float,
    dimension: int,
    batch_size: float,
    steps: int,
    rate: float,
) -> float:
    """The bound of RS, Theorem 3.2 on `mean_t ||grad||^2` of noisy SGD, unclipped, with rate `1/(G sqrt(T))`."""
    spread = deviation_bound**2 / batch_size + dimension * noise_std**2 / batch_size**2
    return (2 * smoothness * loss_gap / (1 - rate) + spread) / math.sqrt(steps)


def budget_bound(
    run: Descent,
    rate: float,
    kappa: float,
    *,
    epsilon: float,
    delta: float,
    sampling_rate: float,
    constant: float,
) -> float:
    """The bound of RS, Corollary C.1.1, where learning rate, batch size and noise follow from T and the budget.

    They are `1/(G sqrt(T))`, `sqrt(T)` and `u q sqrt(T log(1/delta))/epsilon`, with `constant` the u of Abadi et al.,
    Theorem 1; those of `run` are not used.
    """
    root = math.sqrt(run.steps)
    private = (
        run.dimension
        * (run.clip_norm * constant * sampling_rate / epsilon) ** 2
        * math.log(1 / delta)
        / (2 * root)
    )
    rest = run.loss_gap * run.smoothness / root + run.clip_norm**2 / (2 * root) - run.symmetry_error
    return (rest + (1 - rate) * private) / kappa


def progress_measure(gradient: Tensor, deviations: Tensor, clip_norm: float) -> float:
    """`P(||xi|| < 3C/4) min(||grad||, C/4) ||grad||`: the left side of the bounds at one step."""
    norm = float(torch.linalg.vector_norm(gradient))
    near = float((torch.linalg.vector_norm(deviations, dim=1) < 0.75 * clip_norm).double().mean())
    return near * min(norm, clip_norm / 4) * norm


def kappa(
    gradient: Tensor,
    deviations: Tensor,
    clip_norm: float,
    rate: float,
    public: PublicRandomness,
    masks: int = 64,
) -> float:
    """kappa_t of RS, Lemma 3.3, averaged over random masks: how much of the progress measure sparsification leaves.

    **Edge cases.** Over all masks it is at least 1 - r, and at most 1 when P(||xi|| < 3C/4) is at least sqrt(1 - r).
    """
    whole = progress_measure(gradient, deviations, clip_norm)
    if whole == 0:
        raise SparseDPError("kappa: no deviation is within 3/4 of clip_norm, or the gradient is zero")
    d = gradient.numel()
    kept = round((1 - rate) * d)
    total = 0.0
    for mask in range(masks):
        active = public.permutation(d, (mask,))[:kept]
        total += progress_measure(gradient[active], deviations[:, active], clip_norm)
    return total / masks / whole
