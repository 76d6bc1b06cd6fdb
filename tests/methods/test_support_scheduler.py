"""test_support_scheduler"""

import dataclasses
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from method_tools import (
    NETWORK,
    HandWritten,
    Problem,
    drive,
    layout_of,
    plan_of,
    random_release,
    release,
    run,
)

from runs import by_method
from sparsedp.clipping import Standardized
from sparsedp.errors import PrivacyError, SparseDPError
from sparsedp.methods.catalog import get_method, list_methods
from sparsedp.methods.method import Decays, GeometryRule, OffSupport
from sparsedp.methods.plan_config import PlanConfig
from sparsedp.methods.schedules import (
    GradualCooling,
    PiecewiseConstant,
    Refresh,
)
from sparsedp.methods.support_scheduler import SupportScheduler
from sparsedp.privacy.plan import Phase
from sparsedp.randomness import PublicRandomness, SystemRandomness

TEN = layout_of((10,))
PUBLIC = PublicRandomness(5)


def constant(gradient, noise=0.0):
    """A maker of releases that are always the same gradient, on whatever the support is."""

    def make(seed, step, setting):
        return release(
            setting.support, setting.support.gather(torch.tensor(gradient).double()), noise, step=step
        )

    return make


def periods(done):
    """The supports, one per run of equal ones."""
    supports = [setting.support for setting in done.settings]
    return [supports[0], *(new for old, new in pairwise(supports) if new is not old)]


def test_scores_are_there_from_the_ranking_on_and_never_for_a_random_one():
    method = get_method("tp-topk")
    controller = SupportScheduler(plan_of(method), TEN, PUBLIC)
    for step in range(6):
        controller.update(random_release(0, step, controller.begin_step(step)))
    assert controller.scores() is None
    controller.begin_step(6)
    assert controller.scores().shape == (10,)
    assert run(get_method("on-rand")).controller.scores() is None


def test_cooling_after_a_warm_up_keeps_the_ranking_and_moves_the_ratio():
    gradient = [float(i) for i in range(10)]
    done = run(
        get_method("tp-topk", schedule=GradualCooling(), active_ratio=0.2),
        layout=TEN,
        make=constant(gradient),
        warmup_fraction=0.25,
    )
    assert done.sizes == [10] * 10 + [6] * 5 + [2] * 5
    assert [s.indices.tolist() for s in periods(done)] == [list(range(10)), [4, 5, 6, 7, 8, 9], [8, 9]]


def test_refreshing_after_a_warm_up_starts_from_its_scores_and_then_uses_the_last_period_alone():
    """Coordinates 0 and 1 lead in the warm-up; then 1 falls silent, and any frozen one's noise is more."""

    def make(seed, step, setting):
        gradient = torch.zeros(10).double()
        gradient[0], gradient[1] = 5.0, 4.0 if step < 5 else 0.0
        return release(setting.support, setting.support.gather(gradient), 0.1, step=step)

    done = run(
        get_method("tp-topk", refresh=Refresh.EVERY_PERIOD, active_ratio=0.2, ranking="ranked"),
        layout=TEN,
        make=make,
        warmup_fraction=0.25,
    )
    assert done.settings[5].support.indices.tolist() == [0, 1]
    assert done.settings[9].support.indices.tolist() == [0, 1]
    assert 0 in done.settings[10].support
    assert 1 not in done.settings[10].support


def test_pruning_happens_once_at_the_first_selection():
    done = run(
        get_method("tp-topk", prune=True, schedule=PiecewiseConstant((1.0, 0.5, 0.2, 0.6))),
        layout=TEN,
        epochs=6,
        warmup_fraction=1 / 6,
    )
    changes = [setting.change for setting in done.settings if setting.change is not None]
    assert [change.prune for change in changes] == [True, False, False]
    assert changes[0].left.size == 5
    assert changes[0].off_support is OffSupport.DROPPED


def test_a_preliminary_release_comes_before_the_methods_steps():
    method = get_method("tp-topk")
    plan = plan_of(method)
    statistics = Phase("features", 2, 1.0, 1.0, noise_multiplier=5.0, trains=False)
    longer = dataclasses.replace(plan, phases=(statistics, *plan.phases))
    controller = SupportScheduler(longer, TEN, PUBLIC)
    sizes = []
    for step in range(2, 22):
        setting = controller.begin_step(step)
        sizes.append(setting.support.size)
        controller.update(random_release(0, step, setting))
    assert sizes == [10] * 6 + [2] * 14
    between = dataclasses.replace(plan, phases=(plan.phases[0], statistics, plan.phases[1]))
    with pytest.raises(SparseDPError, match="put it before the warm-up"):
        SupportScheduler(between, TEN, PUBLIC)


def test_a_plan_that_carries_no_method_or_has_other_phases_is_refused():
    plan = plan_of(get_method("tp-topk"))
    with pytest.raises(PrivacyError, match="does not say what it was made from"):
        SupportScheduler(dataclasses.replace(plan, spec=None), TEN, PUBLIC)
    with pytest.raises(
        SparseDPError, match=r"training phases are \['main'\], expected \['warm-up', 'main'\]"
    ):
        SupportScheduler(dataclasses.replace(plan, phases=plan.phases[1:]), TEN, PUBLIC)


def test_a_ratio_that_leaves_nothing_is_refused_at_once():
    with pytest.raises(SparseDPError, match="of d=10 coordinates is none"):
        SupportScheduler(plan_of(get_method("on-rand", active_ratio=0.09)), TEN, PUBLIC)


@pytest.mark.parametrize("part", ["method", "layout", "plan", "seed"])
def test_a_state_of_another_run_is_refused(part):
    state = SupportScheduler(plan_of(get_method("tp-topk")), TEN, PUBLIC).state()
    method = get_method("tp-topk", active_ratio=0.5 if part == "method" else None)
    layout = layout_of((11,)) if part == "layout" else TEN
    plan = plan_of(method, noise=2.0 if part == "plan" else 1.0)
    other = SupportScheduler(plan, layout, PublicRandomness(6 if part == "seed" else 5))
    with pytest.raises(SparseDPError, match="the saved state differs in"):
        other.restore(state)


STEPS, NOISE, CLIP, BATCH = 200, 0.8, 0.6, 8
Z = 5.1
"""Two-sided false-alarm rate 4e-7 for each method, for a nearly normal sum of thousands of squares."""


def measured(method):
    if method.ranking is not None:
        method = method.changed(active_ratio=0.3)
    if method.geometry is GeometryRule.STANDARDIZED:
        method = method.changed(decays=Decays(variance=0.9))
    plan = PlanConfig.asked(
        method, units=40, batch_size=BATCH, epochs=STEPS // 5,
        max_grad_norm=CLIP,
    ).draft()  # fmt: skip
    plan = replace(plan, phases=plan.training)
    plan = plan.with_noise({phase.name: NOISE for phase in plan.phases})
    problem = Problem(steps=STEPS)
    return drive(plan, problem, lr=0.05, randomness=SystemRandomness(), engine=HandWritten())


@pytest.mark.parametrize("name", by_method(method.name for method in list_methods()))
def test_noise_energy_over_200_steps_is_that_of_the_support_alone(name):
    method = get_method(name)
    run = measured(method)
    nu = NOISE * CLIP / BATCH
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
    run = measured(next(method for method in list_methods() if method.name == "adadpigu"))
    ratios = np.concatenate(
        [
            noise / released.noise_scale.numpy()
            for noise, released in zip(run.noises, run.releases, strict=True)
        ]
    )
    assert abs((ratios**2).mean() - 1) <= Z * math.sqrt(2 / ratios.size)
    scales = np.concatenate([released.noise_scale.numpy() for released in run.releases[-20:]])
    assert scales.max() / scales.min() > 1.2, "the scales are all alike, so nothing was tested"
