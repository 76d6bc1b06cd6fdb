"""From a method, a data set's size and a budget to a plan."""

from __future__ import annotations

import math
from fractions import Fraction

from sparsedp.core.errors import PrivacyError, SparseDPError
from sparsedp.methods.describe import support_rule
from sparsedp.methods.method import Method, Protection
from sparsedp.methods.options import MethodOptions, configure
from sparsedp.methods.timeline import WARM_UP, phase_names
from sparsedp.privacy.calibrate import EqualNoise, Split, calibrate
from sparsedp.privacy.canonical import FrozenMap
from sparsedp.privacy.normalisation import PrivateNormalisation
from sparsedp.privacy.plan import Phase, Plan

ClipNorm = float | tuple[float, float]
"""One bound for all phases, or one for the warm-up and one for the main phase (TP-TopK's C1 and C2)."""


def build_plan(
    method: Method,
    options: MethodOptions | None = None,
    *,
    units: int,
    batch_size: int,
    epochs: int,
    epsilon: float | None,
    delta: float | None,
    clip_norm: ClipNorm | None,
    unit: str = "row",
    accountant: str = "pld",
    warmup_fraction: float = 0.3,
    split: Split = EqualNoise(),  # noqa: B008
    noise_std: float | None = None,
    normalise: PrivateNormalisation | None = None,
) -> Plan:
    """A plan calibrated to `epsilon` at `delta`, with phases "warm-up" and "main", or "train" alone.

    `split` says how a two-phase method divides its budget; with one phase there is nothing to divide. The ablations
    take `epsilon=None`; `noisy-sgd` takes `noise_std`, the noise on its sum of gradients, in place of `clip_norm`.
    With `normalise` a phase of that name comes first; training gets the noise that fills up the budget.

    **Privacy.** Never more than `epsilon`. Whatever the options, the cost is that of the steps, rate and noise:
    support, geometry and ratio are post-processing.

    Raises:
        PrivacyError: no epsilon for a private method, an epsilon for another, or one that no noise reaches.
    """
    draft = draft_plan(
        method,
        options,
        units=units,
        batch_size=batch_size,
        epochs=epochs,
        clip_norm=clip_norm,
        delta=delta,
        unit=unit,
        warmup_fraction=warmup_fraction,
        noise_std=noise_std,
        normalise=normalise,
    )
    if not method.private:
        if epsilon is not None:
            raise PrivacyError(
                f"{method.name} protects nobody: got epsilon={epsilon}, expected None; its epsilon is infinite"
            )
        return draft
    if epsilon is None or delta is None:
        raise PrivacyError(
            f"{method.name}: got epsilon={epsilon} and delta={delta}, expected a number for each"
        )
    return calibrate(draft, epsilon, delta, accountant, split if len(draft.training) > 1 else EqualNoise())


def draft_plan(
    method: Method,
    options: MethodOptions | None = None,
    *,
    units: int,
    batch_size: int,
    epochs: int,
    clip_norm: ClipNorm | None,
    delta: float | None = None,
    unit: str = "row",
    warmup_fraction: float = 0.3,
    noise_std: float | None = None,
    normalise: PrivateNormalisation | None = None,
) -> Plan:
    """The plan before its noise is known: phases, steps, sampling rate, clip, and the method's support rule.

    The sampling rate is `batch_size/units` exactly; an epoch is `units/batch_size` steps, to the nearest whole number
    and at least 1; the warm-up is `warmup_fraction` of all steps, to the nearest (halves go up in both).
    """
    row = configure(method, options)
    _check_sizes(units, batch_size, epochs)
    steps_per_epoch = max(1, _nearest(Fraction(units, batch_size)))
    names = phase_names(row)
    steps = _split_steps(row, epochs * steps_per_epoch, warmup_fraction)
    clips = _clips(row, clip_norm, len(names))
    phases = tuple(
        Phase(
            name=name,
            steps=count,
            sampling_rate=batch_size / units,
            clip_norm=clip,
            noise_std=_absolute_noise(row, noise_std),
            support=FrozenMap({"rule": "full"} if name == WARM_UP else support_rule(row)),
            geometry="identity" if name == WARM_UP else row.geometry.value,
        )
        for name, count, clip in zip(names, steps, clips, strict=True)
    )
    return Plan(
        method=row.name,
        phases=phases if normalise is None else (normalise.phase(), *phases),
        units=units,
        steps_per_epoch=steps_per_epoch,
        unit=unit,
        delta=delta,
    )


def _check_sizes(units: int, batch_size: int, epochs: int) -> None:
    for name, value in (("units", units), ("batch_size", batch_size), ("epochs", epochs)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SparseDPError(f"{name}: got {value!r}, expected a whole number >= 1")
    if batch_size > units:
        raise PrivacyError(
            f"batch_size: got {batch_size}, expected at most the number of units, {units}; each is sampled with "
            "probability batch_size/units"
        )


def _split_steps(method: Method, total: int, warmup_fraction: float) -> tuple[int, ...]:
    if not method.warm_up:
        return (total,)
    if not 0 < warmup_fraction < 1:
        raise SparseDPError(
            f"warmup_fraction: got {warmup_fraction}, expected a share of the steps in (0, 1)"
        )
    first = _nearest(Fraction(repr(warmup_fraction)) * total)
    if not 0 < first < total:
        raise SparseDPError(
            f"warmup_fraction: {warmup_fraction} of {total} steps is {first} of them; both phases need at least one. "
            "Train for more steps (more epochs or smaller batches)"
        )
    return (first, total - first)


def _clips(method: Method, clip_norm: ClipNorm | None, phases: int) -> tuple[float | None, ...]:
    if method.protection is Protection.NO_CLIP:
        if clip_norm is not None:
            raise PrivacyError(f"{method.name} does not clip; got clip_norm={clip_norm}, expected None")
        return (None,) * phases
    if clip_norm is None:
        raise PrivacyError(f"{method.name}: got no clip_norm, expected a number > 0")
    if isinstance(clip_norm, tuple):
        if len(clip_norm) != phases:
            raise PrivacyError(f"clip_norm: got {clip_norm}, expected one number for each of {phases} phases")
        return clip_norm
    return (clip_norm,) * phases


def _absolute_noise(method: Method, noise_std: float | None) -> float | None:
    if method.protection is Protection.NO_CLIP:
        if noise_std is None:
            raise PrivacyError(f"{method.name}: got no noise_std, expected the noise on the sum of gradients")
        return noise_std
    if noise_std is not None:
        raise PrivacyError(
            f"{method.name}: its noise comes from epsilon and clip_norm; got noise_std={noise_std}, expected None "
            "(it is for noisy-sgd)"
        )
    return None


def _nearest(value: Fraction) -> int:
    return math.floor(value + Fraction(1, 2))
