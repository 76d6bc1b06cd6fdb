"""The phases of a method: how many steps each has, at what rate, clip and support."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from sparsedp._serialization import FrozenMap
from sparsedp.errors import PrivacyError, SparseDPError
from sparsedp.methods.adafest import Contributions
from sparsedp.methods.method import Method
from sparsedp.methods.rules import Protection
from sparsedp.methods.stages import Moves, Stage, phase_names
from sparsedp.privacy.plan import Phase


def steps_of_an_epoch(units: int, batch_size: int, epochs: int) -> int:
    """`units/batch_size` to the nearest whole number, at least 1.

    Raises:
        SparseDPError: sizes that make no sense.
    """
    _check_sizes(units, batch_size, epochs)
    return max(1, _nearest(Fraction(units, batch_size)))


def draft_phases(
    method: Method,
    *,
    total: int,
    sampling_rate: float,
    clip_norm: float | tuple[float, float] | None,
    warmup_fraction: float,
    noise_std: float | None,
) -> tuple[Phase, ...]:
    """A phase for each stage, their noise not known yet; `total` steps are shared by those that train."""
    stages = tuple(stage for stage in method.stages if stage.trains)
    steps = _split_steps(stages, total, warmup_fraction)
    clips = _clips(method, clip_norm, len(stages))
    training = iter(
        Phase(
            name=name,
            steps=count,
            sampling_rate=sampling_rate,
            clip_norm=clip,
            noise_std=_absolute_noise(method, noise_std),
            support=FrozenMap(_rule(method, stage)),
            count_share=_count_share(method, stage),
            geometry=method.geometry.value if stage.moves is Moves.SUPPORT else "identity",
        )
        for stage, name, count, clip in zip(stages, phase_names(stages), steps, clips, strict=True)
    )
    return tuple(next(training) if stage.trains else _selection(method, stage) for stage in method.stages)


def _count_share(method: Method, stage: Stage) -> float:
    """What a ranking that is made anew in every step takes of it."""
    main = stage.moves is Moves.SUPPORT
    return method.ranking.share if main and isinstance(method.ranking, Contributions) else 0.0


def _rule(method: Method, stage: Stage) -> dict[str, Any]:
    if stage.moves is Moves.SUPPORT:
        return method.support_rule()
    if stage.moves is Moves.ALL and not method.scope:
        return {"rule": "full"}
    return {"rule": stage.moves.value, "scope": list(method.scope)}


def _selection(method: Method, stage: Stage) -> Phase:
    """One release over all units; each has a vector of norm one."""
    return Phase(
        name=stage.name,
        steps=1,
        sampling_rate=1.0,
        clip_norm=1.0,
        support=FrozenMap({"rule": method.to_json()["ranking"]}),
        trains=False,
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


def _split_steps(stages: tuple[Stage, ...], total: int, warmup_fraction: float) -> tuple[int, ...]:
    if len(stages) == 1:
        return (total,)
    if not 0 < warmup_fraction < 1:
        raise SparseDPError(
            f"warmup_fraction: got {warmup_fraction}, expected a share of the steps in (0, 1)"
        )
    first = _nearest(Fraction(repr(warmup_fraction)) * total)
    if not 0 < first < total:
        raise SparseDPError(
            f"got {total} steps in all, expected more: a method with a warm-up gives it {warmup_fraction} of them "
            f"(warmup_fraction), here {first}, and both phases need at least one. Train for more epochs, take "
            "smaller batches, or a method without a warm-up (method='dp-sgd')"
        )
    return (first, total - first)


def _clips(
    method: Method, clip_norm: float | tuple[float, float] | None, phases: int
) -> tuple[float | None, ...]:
    if method.protection is Protection.NO_CLIP:
        if clip_norm is not None:
            raise PrivacyError(f"{method.name} does not clip; got clip_norm={clip_norm}, expected None")
        return (None,) * phases
    if clip_norm is None:
        raise PrivacyError(f"{method.name}: got no clip_norm, expected a number > 0")
    if isinstance(clip_norm, tuple):
        if len(clip_norm) != 2 or phases == 1:
            raise PrivacyError(
                f"clip_norm: got {clip_norm} for {phases} phases, expected one number, or a pair: before the main "
                "phase, and in it"
            )
        return (clip_norm[0],) * (phases - 1) + clip_norm[1:]
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
