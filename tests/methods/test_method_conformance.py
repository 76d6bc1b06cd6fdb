"""What every method must do. Registering one enrols it here."""

import json
from fractions import Fraction
from math import floor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from method_harness import HandWritten, Problem, drive
from method_tools import begun, layout_of, plan_of, random_release, run
from safetensors.torch import load, save

from sparsedp.clipping import Identity, Standardized
from sparsedp.errors import SparseDPError
from sparsedp.methods.catalog import get_method, list_methods
from sparsedp.methods.method import GeometryRule, MethodOptions, configure
from sparsedp.methods.ranking import Granularity
from sparsedp.methods.schedules import (
    Constant,
    Cooling,
    EverySteps,
    GradualRelease,
    Listed,
    PerEpoch,
    Refresh,
)
from sparsedp.methods.scores import RankedBy, ranking_names
from sparsedp.methods.support_scheduler import SchedulerState
from sparsedp.privacy.plan import Plan

LAYOUT = layout_of((6, 7), (6,), (3, 6), (3,))
every_method = pytest.mark.parametrize("method", list_methods(), ids=lambda method: method.name)


def scheduled_sizes(row, plan, starts):
    """The size of the support at each step, from the method's row, told again from the top."""
    d, sizes = LAYOUT.dimension, []
    first = sum(phase.steps for phase in plan.training[:-1])
    for step in range(plan.training_steps):
        period = sum(start <= step - first for start in starts) - 1
        learns = row.ranking is not None and row.ranking.source is RankedBy.GRADIENTS
        if step < first or row.ranking is None or (first == 0 and learns and period == 0) or row.always:
            sizes.append(d)  # without tables and modules, all is head, and all is always active
        else:
            ratio = row.schedule.ratio(period, len(starts), Fraction(repr(row.active_ratio)))
            sizes.append(floor(ratio * d))
    return sizes


def identical(one, other):
    first, second = one.state(), other.state()
    same_tensors = set(first.tensors) == set(second.tensors) and all(
        torch.equal(first.tensors[name], second.tensors[name]) for name in first.tensors
    )
    return same_tensors and first.values == second.values


@every_method
def test_the_support_always_has_the_scheduled_size(method):
    done = run(method)
    starts = method.clock.starts(done.plan.phases[-1].steps, done.plan.steps_per_epoch)
    scheduled = scheduled_sizes(method, done.plan, starts)
    if method.denoise:  # finds its size: at most what is scheduled, and nothing comes back
        assert all(0 < size <= most for size, most in zip(done.sizes, scheduled, strict=True))
        assert done.sizes == sorted(done.sizes, reverse=True)
    else:
        assert done.sizes == scheduled


@every_method
def test_what_it_decides_depends_on_released_values_and_public_randomness_alone(method):
    first, second = run(method, seed=1), run(method, seed=1)
    assert [s.support for s in first.settings] == [s.support for s in second.settings]
    assert identical(first.controller, second.controller)


@every_method
@pytest.mark.parametrize("cut", [1, 5, 6, 7, 11, 19])
def test_a_restored_controller_goes_on_exactly_as_if_it_had_never_stopped(method, cut):
    whole = run(method, seed=2)
    plan = plan_of(method)
    first = begun(plan, LAYOUT)
    for step in range(cut):
        first.update(random_release(2, step, first.begin_step(step)))
    saved = first.state()
    through_files = SchedulerState(load(save(dict(saved.tensors))), json.loads(json.dumps(saved.values)))
    second = begun(plan, LAYOUT)
    second.restore(through_files)
    for step in range(cut, plan.total_steps):
        setting = second.begin_step(step)
        assert setting.support == whole.settings[step].support
        assert (setting.change is None) == (whole.settings[step].change is None)
        if isinstance(setting.geometry, Standardized):
            assert torch.equal(setting.geometry.scale, whole.settings[step].geometry.scale)
        second.update(random_release(2, step, setting))
    assert identical(second, whole.controller)


@every_method
def test_changes_say_exactly_what_left_and_entered(method):
    done = run(method)
    before = done.settings[0].support
    assert before.is_full or done.settings[0].change is not None
    for setting in done.settings[1:]:
        if setting.change is None:
            assert setting.support is before
        else:
            left, entered = setting.change.left.mask(), setting.change.entered.mask()
            assert torch.equal((before.mask() & ~left) | entered, setting.support.mask())
            assert not (entered & before.mask()).any()
            assert not (left & ~before.mask()).any()
            assert setting.change.off_support is method.off_support
        before = setting.support


@every_method
def test_a_warm_up_is_dense_and_clips_gradients_as_they_are(method):
    done = run(method, MethodOptions(per_sample_top=0.5))
    for step, setting in enumerate(done.settings):
        if step < done.plan.first_step(done.plan.training[-1].name):
            assert setting.support.is_full
            assert setting.geometry == Identity()
            assert setting.per_sample_top is None
        else:
            scaled = method.geometry is GeometryRule.SCALED and setting.support.size < LAYOUT.dimension
            assert isinstance(setting.geometry, Standardized) is (
                scaled or method.geometry is GeometryRule.STANDARDIZED
            )
            assert setting.per_sample_top == 0.5


@every_method
def test_non_interference_the_data_reaches_the_controller_only_through_releases(method):
    """With the mechanism's output swapped for fixed numbers, two data sets give the same supports and state."""

    def trained_on(seed, replace):
        problem = Problem(steps=20, seed=seed)
        return drive(
            method, None, plan_of(method, noise=0.2), problem, lr=0.1, replace=replace, engine=HandWritten()
        )

    fixed = [trained_on(seed, lambda step, setting: random_release(9, step, setting)) for seed in (1, 2)]
    assert [s.support for s in fixed[0].settings] == [s.support for s in fixed[1].settings]
    assert identical(fixed[0].controller, fixed[1].controller)
    if method.ranking is not None and method.ranking.source is RankedBy.GRADIENTS:
        real = [trained_on(seed, None) for seed in (1, 2)]
        assert not identical(real[0].controller, real[1].controller), "the comparison above could not fail"


@every_method
def test_its_row_and_its_plan_survive_json(method):
    assert json.loads(json.dumps(method.to_json())) == method.to_json()
    plan = plan_of(method)
    assert Plan.from_json(plan.to_json()) == plan
    assert method.summary
    assert method.paper
    assert plan.is_calibrated


@every_method
def test_a_step_is_set_once_in_order_and_observed_before_the_next(method):
    controller = begun(plan_of(method), LAYOUT)
    setting = controller.begin_step(0)
    with pytest.raises(SparseDPError, match="has not been observed"):
        controller.begin_step(1)
    with pytest.raises(SparseDPError, match="between two steps"):
        controller.state()
    with pytest.raises(SparseDPError, match="expected step 0"):
        controller.update(random_release(0, 1, setting))
    controller.update(random_release(0, 0, setting))
    with pytest.raises(SparseDPError, match="expected step None"):
        controller.update(random_release(0, 0, setting))
    with pytest.raises(SparseDPError, match="got 0, expected 1 to 19"):
        controller.begin_step(0)
    with pytest.raises(SparseDPError, match="got 20, expected 1 to 19"):
        controller.begin_step(20)


@every_method
def test_a_run_that_lost_steps_goes_on_with_what_it_has(method):
    """Steps 3 to 8 were paid for and lost: over the switch, and over the start of an epoch."""
    controller = begun(plan_of(method), LAYOUT)
    for step in [0, 1, 2, *range(9, 20)]:
        setting = controller.begin_step(step)
        controller.update(random_release(0, step, setting))
    assert setting.support.size == run(method).sizes[-1]


PIECES = {
    "ranking": st.sampled_from([name for name in ranking_names() if name in
        ("energy", "magnitude", "ranked", "coherent", "random")]),
    "refresh": st.sampled_from(list(Refresh)),
    "schedule": st.sampled_from([Constant(), Cooling(), GradualRelease((0.7, 0.9)), Listed((0.2, 1.0, 0.5, 0.1))]),
    "clock": st.sampled_from([PerEpoch(), PerEpoch(3), EverySteps(2), EverySteps(7)]),
    "granularity": st.sampled_from(list(Granularity)),
    "geometry": st.sampled_from(list(GeometryRule)),
    "warm_up": st.booleans(),
    "active_ratio": st.sampled_from([0.05, 0.3, 0.61]),
}  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["tp-topk", "on-rand", "adadpigu"]), st.fixed_dictionaries(PIECES))
def test_all_pieces_combine_freely_and_keep_to_the_scheduled_size(name, pieces):
    options = MethodOptions(**pieces)
    row = configure(get_method(name), options)
    done = run(get_method(name), options)
    starts = row.clock.starts(done.plan.phases[-1].steps, done.plan.steps_per_epoch)
    assert done.sizes == scheduled_sizes(row, done.plan, starts)
    assert MethodOptions.from_json(json.loads(json.dumps(options.to_json()))) == options
