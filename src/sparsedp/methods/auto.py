"""`method="auto"`: dense or sparse, by public numbers alone, and why in one line."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Unpack

from sparsedp.methods.catalog import get_method
from sparsedp.methods.method import Method, MethodOptions, configure
from sparsedp.methods.plan_config import Asked, PlanSpec, default_delta
from sparsedp.methods.support_scheduler import noise_on_mean
from sparsedp.privacy.plan import Plan

logger = logging.getLogger("sparsedp")

AUTO_METHOD = "auto"
"""The name under which `choose_method` is asked for."""
LOUD = 0.5
"""The noise ratio r of a dense step from which on a support was level or gained; at 0.43 it lost 0.36 points."""
TOO_LOUD = 1.0
"""From here on one step shows nothing but noise; a pretrained network's head alone did better than all of it."""
SPARSE, SPARSE_RATIO = "tp-topk", 0.4
"""What gained there: TP-TopK's own setting."""
MANY = 10_000
"""Coordinates from which on a support has something to leave out: on 4,810 (digits) it lost up to a point."""
ENOUGH_STEPS = 10
"""Steps of a plan that leave a warm-up some to learn a support in; a plan of one step has none for it at all."""

_OF_THE_WHOLE = (
    "quiet: training all of them is as good as any part, and sparse supports save only time",
    "loud: a learned support of two fifths was level with all of them in our tables",
    "too loud: train less (of a pretrained network its head, of tables their frequent rows), or larger batches",
)
_OF_A_PART = (
    "quiet: noise is no reason to train less than that",
    "loud: a step's noise is more than half of what a clipped gradient can be",
    "too loud: a step's noise is more than any clipped gradient can be; larger batches make it less",
)


def noise_ratio(plan: Plan, active: int) -> float:
    """r: the norm of the noise on `active` coordinates over the clip norm, in a step of the plan's last phase.

    A step's mean gradient has norm at most the clip norm, so r above 1 means that noise is all there is to see in one
    step; it averages out over steps. Public: it follows from plan and model size.
    """
    phase = plan.phases[-1]
    return noise_on_mean(plan, phase) * math.sqrt(active) / phase.clip_norm if phase.clip_norm else math.inf


def meaning_of(plan: Plan, active: int, *, whole: bool) -> str:
    """What the noise ratio of so many coordinates means, after docs/fine-tuning.md and docs/results.md.

    The tables go by r of the whole model, so of a part or a support only the noise itself is spoken of.
    """
    ratio = noise_ratio(plan, active)
    quiet, loud, too_loud = _OF_THE_WHOLE if whole else _OF_A_PART
    return quiet if ratio < LOUD else loud if ratio < TOO_LOUD else too_loud


def pays(ratio: float, dimension: int) -> bool:
    """Whether a support can pay: many coordinates, and noise that is loud but leaves something to choose by."""
    return dimension >= MANY and LOUD <= ratio < TOO_LOUD


def method_beside(dense: Plan, dimension: int) -> Method:
    """What "auto" takes where dense training has this plan: a learned support where it can pay, else all."""
    if dense.phases[-1].steps < ENOUGH_STEPS or not pays(noise_ratio(dense, dimension), dimension):
        return get_method("dp-sgd")
    return configure(get_method(SPARSE), MethodOptions(active_ratio=SPARSE_RATIO))


def choose_method(dimension: int, *, units: int, unit_name: str = "row", **asked: Unpack[Asked]) -> Method:
    """A learned support where a step's noise on many coordinates is loud beside the clip norm, else dense DP-SGD.

    Args:
        dimension: number of trainable scalars.
        units: as for `PlanSpec.asked`.
        unit_name: as for `PlanSpec.asked`.
        asked: as for `PlanSpec.asked`.

    **Privacy.** Only public numbers are looked at: size of the model, number of units, batch size, epochs and budget.
    """
    delta = asked.get("delta")
    known: Asked = {**asked, "delta": default_delta(units) if delta is None else delta}
    dense = PlanSpec.asked("dp-sgd", units=units, unit_name=unit_name, **known).plan()
    method = method_beside(dense, dimension)
    logger.info(
        "method auto: %s, as the noise of a dense step on %d coordinates is %.2f of the clip norm (%s at ratio %.1f "
        "from %d coordinates and %d steps on, between %.1f and %.1f)",
        method.name, dimension, noise_ratio(dense, dimension),
        SPARSE, SPARSE_RATIO, MANY, ENOUGH_STEPS, LOUD, TOO_LOUD,
    )  # fmt: skip
    return method


def reason_of(spec: PlanSpec, dimension: int) -> str:
    """Why "auto" took the method of `spec` for a model of so many trained scalars."""
    bounds = spec.clip_norm
    main_bound = bounds[-1] if isinstance(bounds, tuple) else bounds
    dense = replace(spec, method=get_method("dp-sgd"), clip_norm=main_bound).plan()
    ratio, row = noise_ratio(dense, dimension), spec.method
    if row != method_beside(dense, dimension):
        return "a support, as what was said of one asks for it"
    what = "dense" if row.ranking is None else f"a learned support of ratio {row.active_ratio}"
    return (
        f"{what}, as the noise of a dense step on {dimension:,} coordinates is {ratio:.2f} of the clip norm; a "
        f"support is learned where that is {LOUD:g} to {TOO_LOUD:g}, of {MANY:,} coordinates or more "
        f"and in {ENOUGH_STEPS} steps or more"
    )
