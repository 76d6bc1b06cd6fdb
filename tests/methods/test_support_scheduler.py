"""The support scheduler: periods, rankings, pruning, states; and the noise that a support is released with."""

import dataclasses
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from method_tools import NETWORK, Problem, drive, layout_of, plan_of, random_release, release, run

from runs import by_method
from sparsedp.clipping import Standardized
from sparsedp.errors import PrivacyError, SparseDPError
from sparsedp.methods.catalog import get_method, list_methods
from sparsedp.methods.method import Decays, GeometryRule
from sparsedp.methods.schedules import GradualCooling, Refresh
from sparsedp.methods.support_scheduler import SupportScheduler
from sparsedp.randomness import PublicRandomness, SystemRandomness

TEN = layout_of((10,))
PUBLIC = PublicRandomness(5)


def test_step_is_set_once_in_order_and_observed_before_the_next():
    controller = SupportScheduler(plan_of(get_method("tp-topk")), TEN, PUBLIC)
    setting = controller.begin_step(0)
    with pytest.raises(SparseDPError, match="has not been observed"):
        controller.begin_step(1)
    with pytest.raises(SparseDPError, match="between two steps"):
        controller.state()
    with pytest.raises(SparseDPError, match="expected step 0"):
        controller.update(random_release(0, 1, setting))
    controller.update(random_release(0, 0, setting))
    for wrong in (0, 20):
        with pytest.raises(SparseDPError, match=f"got {wrong}, expected 1 to 19"):
            controller.begin_step(wrong)


def test_cooling_after_a_warm_up_keeps_the_ranking_and_moves_the_ratio():
    def make(seed, step, setting):
        gradient = torch.arange(10).double()
        return release(setting.support, setting.support.gather(gradient), 0.0, step=step)

    method = get_method("tp-topk", schedule=GradualCooling(), active_ratio=0.2)
    done = run(method, layout=TEN, make=make, warmup_fraction=0.25)
    assert done.sizes == [10] * 10 + [6] * 5 + [2] * 5
    supports = [setting.support for setting in done.settings]
    periods = [supports[0], *(new for old, new in pairwise(supports) if new is not old)]
    assert [s.indices.tolist() for s in periods] == [list(range(10)), [4, 5, 6, 7, 8, 9], [8, 9]]


def test_refreshing_after_a_warm_up_starts_from_its_scores_and_then_uses_the_last_period_alone():
    """Coordinates 0 and 1 lead in the warm-up; then 1 falls silent, and any frozen one's noise is more."""

    def make(seed, step, setting):
        gradient = torch.zeros(10).double()
        gradient[0], gradient[1] = 5.0, 4.0 if step < 5 else 0.0
        return release(setting.support, setting.support.gather(gradient), 0.1, step=step)

    method = get_method("tp-topk", refresh=Refresh.EVERY_PERIOD, active_ratio=0.2, ranking="ranked")
    done = run(method, layout=TEN, make=make, warmup_fraction=0.25)
    assert done.settings[5].support.indices.tolist() == [0, 1]
    assert done.settings[9].support.indices.tolist() == [0, 1]
    assert done.settings[10].support.mask()[:2].tolist() == [True, False]


def test_a_plan_that_nothing_can_be_trained_by_is_refused_at_once():
    plan = plan_of(get_method("on-rand", active_ratio=0.09))
    with pytest.raises(SparseDPError, match="of d=10 coordinates is none"):
        SupportScheduler(plan, TEN, PUBLIC)
    with pytest.raises(PrivacyError, match="does not say what it was made from"):
        SupportScheduler(dataclasses.replace(plan, spec=None), TEN, PUBLIC)


@pytest.mark.parametrize("part", ["method", "dimension", "timeline", "public_seed"])
def test_a_state_of_another_run_is_refused(part):
    state = SupportScheduler(plan_of(get_method("tp-topk")), TEN, PUBLIC).state()
    method = get_method("tp-topk", active_ratio=0.5 if part == "method" else None)
    layout = layout_of((11,)) if part == "dimension" else TEN
    plan = plan_of(method, noise=2.0 if part == "timeline" else 1.0)
    other = SupportScheduler(plan, layout, PublicRandomness(6 if part == "public_seed" else 5))
    with pytest.raises(SparseDPError, match=f"the saved state differs in {part}"):
        other.restore(state)


STEPS, NOISE, CLIP, BATCH = 200, 0.8, 0.6, 8
Z = 5.1
"""Two-sided false-alarm rate 4e-7 for each method, for a nearly normal sum of thousands of squares."""


def measured(name):
    method = get_method(name)
    if method.ranking is not None:
        method = method.changed(active_ratio=0.3)
    if method.geometry is GeometryRule.STANDARDIZED:
        method = method.changed(decays=Decays(variance=0.9))
    plan = plan_of(method, epochs=STEPS // 5, noise=NOISE, max_grad_norm=CLIP)
    return drive(plan, Problem(steps=STEPS), lr=0.05, randomness=SystemRandomness())


@pytest.mark.parametrize("name", by_method(method.name for method in list_methods()))
def test_noise_energy_over_200_steps_is_that_of_the_support_alone(name):
    run, nu = measured(name), NOISE * CLIP / BATCH
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
    if run.masks.mean() < 0.8 and get_method(name).geometry is GeometryRule.IDENTITY:
        dense = STEPS * NETWORK.dimension * nu**2
        assert dense - energy > 2 * Z * spread, "the test could not tell k nu^2 from d nu^2"
