"""The papers' central claim, measured: a step's noise energy is k nu^2, not d nu^2."""

import math
from dataclasses import replace

import numpy as np
import pytest
from method_harness import NETWORK, HandWritten, Problem, drive

from every_day import by_method
from sparsedp.core.geometry import Standardized
from sparsedp.methods.catalog import all_methods, get_method
from sparsedp.methods.method import GeometryRule, MethodOptions, Protection
from sparsedp.methods.plan_config import PlanSpec
from sparsedp.randomness import SystemRandomness

STEPS, NOISE, CLIP, BATCH = 200, 0.8, 0.6, 8
Z = 5.1
"""Two-sided false-alarm rate 4e-7 for each method, for a nearly normal sum of thousands of squares."""


def measured(method):
    options = None if method.ranking is None else MethodOptions(active_ratio=0.3)
    if method.geometry is GeometryRule.STANDARDIZED:
        options = MethodOptions(active_ratio=0.3, variance_decay=0.9)
    unclipped = method.protection is Protection.NO_CLIP
    plan = PlanSpec.asked(
        method, options, units=40, batch_size=BATCH, epochs=STEPS // 5,
        clip_norm=None if unclipped else CLIP, noise_std=NOISE * CLIP if unclipped else None,
    ).draft()  # fmt: skip
    plan = replace(plan, phases=plan.training)
    if method.private:
        plan = plan.with_noise({phase.name: NOISE for phase in plan.phases})
    return drive(
        method,
        options,
        plan,
        Problem(steps=STEPS),
        lr=0.05,
        randomness=SystemRandomness(),
        engine=HandWritten(),
    )


@pytest.mark.parametrize("name", by_method(method.name for method in all_methods()))
def test_noise_energy_over_200_steps_is_that_of_the_support_alone(name):
    method = get_method(name)
    run = measured(method)
    nu = 0.0 if method.protection is Protection.NO_NOISE else NOISE * CLIP / BATCH
    scales = [
        setting.geometry.scale.numpy() * setting.geometry.gain
        if isinstance(setting.geometry, Standardized)
        else np.ones(setting.support.size)
        for setting in run.settings
    ]
    expected = sum(((nu * s) ** 2).sum() for s in scales)
    spread = math.sqrt(sum(2 * ((nu * s) ** 4).sum() for s in scales))
    energy = sum((noise**2).sum() for noise in run.noises)
    assert abs(energy - expected) <= Z * spread + 1e-25
    for released, noise in zip(run.releases, run.noises, strict=True):
        assert noise.shape == (released.support.size,)
        assert not released.dense()[~released.support.mask()].any()
    if run.masks.mean() < 0.8 and nu > 0 and method.geometry is GeometryRule.IDENTITY:
        dense = STEPS * NETWORK.dimension * nu**2
        assert dense - energy > 2 * Z * spread, "the test could not tell k nu^2 from d nu^2"


def test_the_released_noise_scale_is_what_was_added_under_a_standardized_geometry():
    """Noise over its stated scale is standard normal: chi-square on all coordinates, false-alarm rate 4e-7."""
    run = measured(next(method for method in all_methods() if method.name == "adadpigu"))
    ratios = np.concatenate(
        [
            noise / released.noise_scale.numpy()
            for noise, released in zip(run.noises, run.releases, strict=True)
        ]
    )
    assert abs((ratios**2).mean() - 1) <= Z * math.sqrt(2 / ratios.size)
    scales = np.concatenate([released.noise_scale.numpy() for released in run.releases[-20:]])
    assert scales.max() / scales.min() > 1.2, "the scales are all alike, so nothing was tested"
