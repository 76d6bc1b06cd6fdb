"""The phases of a plan before their noise is known: a phase for each stage of a method, its steps and its clip."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from sparsedp import _validate as checks
from sparsedp._serialization import FrozenMap
from sparsedp.errors import PrivacyError, SparseDPError
from sparsedp.methods.method import Method, Moves, Stage, phase_names
from sparsedp.methods.scores import Contributions
from sparsedp.privacy.plan import AUTO, FLAT, Phase

ClipNorm = float | tuple[float, float] | str | Mapping[str, float] | tuple[tuple[str, float], ...]
"""One bound for all stages, or one for the stage before the main one and one for that (TP-TopK's C1 and C2); "auto";
or a bound for each pattern of parameter names, which a plan keeps as pairs."""


def steps_of_an_epoch(units: int, batch_size: int, epochs: int) -> int:
    """`units/batch_size` to the nearest whole number, at least 1."""
    for name, value in (("units", units), ("batch_size", batch_size), ("epochs", epochs)):
        checks.whole(value, name, at_least=1)
    if batch_size > units:
        raise PrivacyError(
            f"batch_size: got {batch_size}, expected at most the number of units, {units}; each is sampled with "
            "probability batch_size/units"
        )
    return max(1, _nearest(Fraction(units, batch_size)))


def draft_phases(
    method: Method,
    *,
    total: int,
    sampling_rate: float,
    clip_norm: ClipNorm,
    warmup_fraction: float,
    loss_bound: float = 0.0,
) -> tuple[Phase, ...]:
    """A phase for each stage, their noise not known yet; `total` steps are shared by those that train."""
    stages = tuple(stage for stage in method.stages if stage.trains)
    steps = _split_steps(stages, total, warmup_fraction)
    clipping, bound = _clipping(clip_norm)
    clips = _clips(bound, len(stages))
    share = method.ranking.share if isinstance(method.ranking, Contributions) else 0.0
    training = iter(
        Phase(
            name=name,
            steps=count,
            sampling_rate=sampling_rate,
            clip_norm=clip,
            clipping=clipping,
            support=FrozenMap(_rule(method, stage)),
            count_share=share if stage.moves is Moves.SUPPORT else 0.0,
            geometry=method.geometry.value if stage.moves is Moves.SUPPORT else "identity",
            loss_bound=loss_bound,
        )
        for stage, name, count, clip in zip(stages, phase_names(stages), steps, clips, strict=True)
    )
    return tuple(next(training) if stage.trains else _selection(method, stage) for stage in method.stages)


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


def _clipping(clip_norm: ClipNorm) -> tuple[str | tuple[tuple[str, float], ...], float | tuple[float, float]]:
    """How a phase clips, and its sensitivity, from what was asked: one number, or a pair for two stages."""
    if (isinstance(clip_norm, str) and clip_norm != AUTO) or clip_norm == ():
        raise PrivacyError(
            f'max_grad_norm: got {clip_norm!r}, expected a number > 0, "auto", or norms by pattern of names, as in '
            '{"*": 1.0}'
        )
    if clip_norm == AUTO:
        return AUTO, 1.0
    if isinstance(clip_norm, tuple) and isinstance(clip_norm[0], tuple):
        pairs: Any = clip_norm
        return pairs, math.hypot(*(norm for _, norm in pairs))
    flat: Any = clip_norm
    return FLAT, flat


def _clips(clip_norm: float | tuple[float, float], phases: int) -> tuple[float, ...]:
    if isinstance(clip_norm, tuple):
        if len(clip_norm) != 2 or phases == 1:
            raise PrivacyError(
                f"max_grad_norm: got {clip_norm} for {phases} phases, expected one number, or a pair: before the "
                "main phase, and in it"
            )
        return (clip_norm[0],) * (phases - 1) + clip_norm[1:]
    return (clip_norm,) * phases


def _nearest(value: Fraction) -> int:
    return math.floor(value + Fraction(1, 2))
