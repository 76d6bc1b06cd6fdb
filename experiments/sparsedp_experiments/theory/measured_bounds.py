"""The papers' bounds with measured numbers put in. They say what theory promises a run like this, not how it did.

The learning rate is `eta/(1 - momentum)`, the least loss is taken as zero, the smoothness is that of one point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

from sparsedp.diagnostics import RunView
from sparsedp.methods.support_scheduler import noise_on_mean
from sparsedp.privacy.plan import Phase, Plan
from sparsedp_experiments.theory.bounds import (
    Descent,
    ProjectedBound,
    alignment_bound,
    budget_bound,
    noisy_bound,
    private_alignment_bound,
    projected_bound,
    retention_bound,
)
from sparsedp_experiments.theory.nonprivate import Findings, NonPrivate

RATE_REMARK = (
    "Bounds: the learning rate is taken as eta/(1 - momentum), the least loss as zero, the smoothness as that of the "
    "final weights, and the largest deviation as that of the units looked at."
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the bounds need from un-noised gradients. Keep it `NonPrivate`.

    Attributes:
        smoothness: beta, or G.
        start_loss: the mean loss where the run, or its last phase, began.
        end_loss: that at the final weights.
        retained: share of the clipped gradient's energy on the support.
        captured: share of the gradient's energy on the support; `alpha_T` where snapshots tell.
        largest_deviation: the longest deviation of a unit's gradient from the mean.
        symmetry_error: `b_t` of RS, Theorem 3.3.
        kappa: RS's kappa at the run's rate; None where it cannot be measured.
        squared_biases: `||b_t||^2` at the points looked at.
        unit_variance: tau^2, the largest seen.
    """

    smoothness: float
    start_loss: float
    end_loss: float
    retained: float
    captured: float
    largest_deviation: float
    symmetry_error: float
    kappa: float | None
    squared_biases: tuple[float, ...]
    unit_variance: float


@final
@dataclass(frozen=True, slots=True)
class _Setting:
    """The public side of the bounds."""

    plan: Plan
    phase: Phase
    clip_norm: float
    learning_rate: float
    active: int
    dimension: int

    @property
    def batch_size(self) -> float:
        return self.plan.expected_batch_size(self.phase)

    @property
    def frozen(self) -> float:
        return 1 - self.active / self.dimension


def bound_findings(measured: NonPrivate[Measured], view: RunView) -> Findings:
    """Every bound that can be stated for the run's last phase."""
    phase = view.plan.phases[-1]
    if phase.clip_norm is None:
        return Findings(remarks=("No bounds: this run did not clip.",))
    if view.learning_rate is None:
        return Findings(remarks=("No bounds: they are for SGD, and this run had another optimizer.",))
    if not 0 < measured.value.smoothness < math.inf:
        return Findings(remarks=("No bounds: the loss shows no curvature here, or no finite one.",))
    known = _Setting(
        view.plan, phase, phase.clip_norm, view.learning_rate, view.support.size, view.support.dimension
    )
    tables = (_sparsification(known), _retention(known), _theorem(known))
    values = {name: measured.map(value) for table in tables for name, value in table.items()}
    finite = {name: value for name, value in values.items() if math.isfinite(value.value)}
    return Findings(finite, remarks=tuple(_remarks(known, measured.value)))


def _sparsification(known: _Setting) -> Mapping[str, Callable[[Measured], float]]:
    """RS: Delta_C, Delta_sigma, r* and the bounds of its theorems at the run's rate of frozen coordinates."""
    phase, rate = known.phase, known.frozen

    def run(m: Measured) -> Descent:
        return Descent(
            loss_gap=m.start_loss,
            smoothness=m.smoothness,
            learning_rate=known.learning_rate,
            clip_norm=known.clip_norm,
            noise_multiplier=phase.gradient_noise,
            dimension=known.dimension,
            batch_size=known.batch_size,
            steps=phase.steps,
            symmetry_error=m.symmetry_error,
        )

    def kappa(m: Measured) -> float:
        return m.kappa if m.kappa else math.sqrt(1 - rate)

    def unclipped(m: Measured) -> float:
        return noisy_bound(
            loss_gap=m.start_loss,
            smoothness=m.smoothness,
            deviation_bound=m.largest_deviation,
            noise_std=phase.gradient_noise * known.clip_norm,
            dimension=known.dimension,
            batch_size=known.batch_size,
            steps=phase.steps,
            rate=rate,
        )

    found: dict[str, Callable[[Measured], float]] = {
        "Delta_C (RS)": lambda m: run(m).enlarged,
        "Delta_sigma (RS)": lambda m: run(m).noise,
        "best share to freeze, r* (RS)": lambda m: run(m).best_rate,
        "kappa (RS), measured or sqrt(k/d)": kappa,
        "bound of RS, Theorem 3.2 (noise, no clip)": unclipped,
        "bound of RS, Theorem 3.4 (clip, no noise)": lambda m: run(m).clipped_bound(kappa(m)),
        "bound of RS, Theorem 3.5": lambda m: run(m).private_bound(rate, kappa(m)),
        "bound of RS, eq. 15 (all coordinates)": lambda m: run(m).private_bound(0.0, 1.0),
    }
    epsilon, delta = known.plan.target_epsilon, known.plan.delta
    if epsilon and delta:
        unit = phase.sampling_rate * math.sqrt(phase.steps * math.log(1 / delta)) / epsilon
        # The constant of Abadi et al. that gives the plan's own noise.
        constant = phase.noise_multiplier / unit
        found["bound of RS, Corollary C.1.1"] = lambda m: budget_bound(
            run(m),
            rate,
            kappa(m),
            epsilon=epsilon,
            delta=delta,
            sampling_rate=phase.sampling_rate,
            constant=constant,
        )
    return found


def _retention(known: _Setting) -> Mapping[str, Callable[[Measured], float]]:
    """AdaDPIGU: Theorems 13, 16 and 17."""
    phase, rate, clip = known.phase, known.learning_rate, known.clip_norm
    return {
        "bound of AdaDPIGU, Theorem 13": lambda m: alignment_bound(
            loss_gap=m.start_loss,
            smoothness=m.smoothness,
            learning_rate=rate,
            steps=phase.steps,
            clip_norm=clip,
        ),
        "bound of AdaDPIGU, Theorem 16": lambda m: (
            retention_bound(
                loss_gap=m.start_loss,
                smoothness=m.smoothness,
                steps=phase.steps,
                retained=m.retained,
                deviation_bound=m.largest_deviation,
                noise_std=phase.noise_multiplier * clip,
                active=known.active,
                batch_size=known.batch_size,
            )
            if m.retained > 0
            else math.inf
        ),
        "bound of AdaDPIGU, Theorem 17": lambda m: private_alignment_bound(
            loss_decrease=(m.start_loss - m.end_loss) / phase.steps,
            smoothness=m.smoothness,
            learning_rate=rate,
            clip_norm=clip,
            noise_multiplier=phase.gradient_noise,
            active=known.active,
            batch_size=known.batch_size,
        ),
    }


def _theorem(known: _Setting) -> Mapping[str, Callable[[Measured], float]]:
    """TP-TopK: the four terms of Theorem 6.3, their sum, and Corollary 6.6."""

    def terms(m: Measured) -> ProjectedBound:
        return projected_bound(
            loss_gap=m.start_loss,
            smoothness=m.smoothness,
            learning_rate=min(known.learning_rate, 1 / m.smoothness),
            steps=known.phase.steps,
            squared_biases=m.squared_biases,
            batch_variance=m.unit_variance / known.batch_size,
            mean_active=known.active,
            noise_std=noise_on_mean(known.plan, known.phase),
        )

    return {
        "Theorem 6.3, progress": lambda m: terms(m).progress,
        "Theorem 6.3, clipping bias": lambda m: terms(m).clipping_bias,
        "Theorem 6.3, mini-batches": lambda m: terms(m).mini_batch,
        "Theorem 6.3, DP noise": lambda m: terms(m).dp_noise,
        "bound of Theorem 6.3 (gradient on the support)": lambda m: terms(m).total,
        "bound of Corollary 6.6 (whole gradient)": lambda m: (
            terms(m).full_gradient(m.captured) if m.captured > 0 else math.inf
        ),
    }


def _remarks(known: _Setting, m: Measured) -> list[str]:
    remarks = [RATE_REMARK]
    if known.learning_rate * m.smoothness > 1:
        remarks.append(
            "Theorem 6.3 covers learning rates up to 1/smoothness; the run's is larger, so its terms are those of "
            "1/smoothness."
        )
    if m.kappa is None:
        remarks.append(
            "RS's kappa cannot be measured here: no unit's gradient is within 3/4 of the clip norm of the mean. "
            "sqrt(k/d) stands for it, as in its App. G."
        )
    if known.phase.geometry != "identity":
        remarks.append("The bounds are for gradients as they are; this run standardized them.")
    return remarks
