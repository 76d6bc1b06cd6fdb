"""`method="auto"`: dense or sparse, by public numbers alone, and why in one line."""

from __future__ import annotations

import logging
import math
import warnings
from typing import Unpack

from torch import nn

from sparsedp.errors import PrivacyWarning
from sparsedp.methods.catalog import get_method
from sparsedp.methods.method import Method
from sparsedp.methods.plan_config import PlanArgs, PlanConfig, default_delta
from sparsedp.methods.support_scheduler import noise_on_mean
from sparsedp.privacy.plan import Plan

logger = logging.getLogger("sparsedp")

AUTO_METHOD = "auto"
"""The name under which `choose_method` is asked for."""
MIN_NOISE_RATIO = 0.5
"""The noise ratio r of a dense step from which on a support was level or gained; at 0.43 it lost 0.36 points."""
MAX_NOISE_RATIO = 1.0
"""From here on one step shows nothing but noise; a pretrained network's head alone did better than all of it."""
SPARSE, SPARSE_RATIO = "tp-topk", 0.4
"""What gained there: TP-TopK's own setting."""
MANY = 10_000
"""Coordinates from which on a support has something to leave out: on 4,810 (digits) it lost up to a point."""
ENOUGH_STEPS = 10
"""Steps of a plan that leave a warm-up some to learn a support in; a plan of one step has none for it at all."""
ADAPTIVE = get_method("tp-adaptive", denoise=False)
"""What finds the support of a linear model and never lost more than 0.3 points on many units; with its weights shrunk
it gains more where features are standardized, and loses where many of them are rare (docs/wide.md)."""
AUDIBLE, SOME = 0.05, 500
"""The noise ratio and the coordinates of a linear model from which on that was tried."""
MANY_UNITS = 10_000
"""Units from which on it was harmless: on the fingerprints of 6,200 molecules it lost 1.2 to 1.4 points of AUC."""

_MEANINGS = (
    "small: training all of them is as good as any part, and sparse supports save only time",
    "large: a step's noise is more than half of what a clipped gradient can be",
    "too large: a step's noise is more than any clipped gradient can be; train less, or take larger batches",
)


def noise_ratio(plan: Plan, active: int) -> float:
    """r: the norm of the noise on `active` coordinates over the clip norm, in a step of the plan's last phase.

    A step's mean gradient has norm at most the clip norm, so r above 1 means that noise is all there is to see in one
    step; it averages out over steps. Public: it follows from plan and model size.
    """
    phase = plan.phases[-1]
    return noise_on_mean(plan, phase) * math.sqrt(active) / phase.clip_norm


def meaning_of(ratio: float) -> str:
    """What a noise ratio means, after the tables of docs/results.md, which go by the whole model."""
    return _MEANINGS[(ratio >= MIN_NOISE_RATIO) + (ratio >= MAX_NOISE_RATIO)]


def is_linear(model: nn.Module) -> bool:
    """Whether all that is trained is one linear layer: logistic regression, or a head on features that are fixed."""
    trained = [
        module for module in model.modules() if any(p.requires_grad for p in module.parameters(recurse=False))
    ]
    return len(trained) == 1 and isinstance(trained[0], nn.Linear)


def _chosen(dense: Plan, dimension: int, linear: bool) -> Method:
    """What "auto" takes where dense training has this plan: a learned support where one can pay, else all."""
    ratio, all_of_them = noise_ratio(dense, dimension), get_method("dp-sgd")
    if dense.phases[-1].steps < ENOUGH_STEPS or ratio >= MAX_NOISE_RATIO:
        return all_of_them
    if linear:
        tried = ratio >= AUDIBLE and dimension >= SOME and dense.units >= MANY_UNITS
        return ADAPTIVE if tried else all_of_them
    pays = ratio >= MIN_NOISE_RATIO and dimension >= MANY
    return get_method(SPARSE, active_ratio=SPARSE_RATIO) if pays else all_of_them


def choose_method(
    dimension: int, *, linear: bool = False, units: int, unit_name: str = "row", **asked: Unpack[PlanArgs]
) -> tuple[Method, str]:
    """A learned support where a step's noise is audible beside the clip norm, else dense DP-SGD; and why.

    The `dimension` is the number of trainable scalars; `linear` says whether they are one linear layer
    (`is_linear`). The rest is as for `PlanConfig.asked`.

    Formal guarantees: Only public numbers are looked at: size of the model, number of units, batch size,
    epochs and budget.
    """
    delta = asked.get("delta")
    known: PlanArgs = {
        **asked,
        "delta": default_delta(units) if delta is None else delta,
        "private_loss": None,  # which costs the same beside any method
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)  # the plan that is made in the end warns
        dense = PlanConfig.asked("dp-sgd", units=units, unit_name=unit_name, **known).plan()
    method = _chosen(dense, dimension, linear)
    what = {
        SPARSE: f"a learned support of ratio {SPARSE_RATIO}",
        ADAPTIVE.name: "a learned support, of a size that its releases decide",
    }
    low, least = (AUDIBLE, SOME) if linear else (MIN_NOISE_RATIO, MANY)
    reason = (
        f"{what.get(method.name, 'dense')}, as the noise of a dense step on {dimension:,} coordinates is "
        f"{noise_ratio(dense, dimension):.2f} of the clip norm; a support of "
        f"{'one linear layer' if linear else 'a network'} is learned where that is {low:g} to {MAX_NOISE_RATIO:g}, "
        f"of {least:,} coordinates or more{f', from {MANY_UNITS:,} units or more' * linear} and in "
        f"{ENOUGH_STEPS} steps or more"
    )
    logger.info("method auto: %s: %s", method.name, reason)
    return method, reason
