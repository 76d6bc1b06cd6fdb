"""What every method must do, and a user's own too: registering one enrols it here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from math import floor
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from method_tools import Problem, begun, drive, layout_of, plan_of, random_release, run

from sparsedp.methods.catalog import get_method, list_methods
from sparsedp.methods.method import GeometryRule, Method
from sparsedp.methods.ranking import Granularity
from sparsedp.methods.schedules import (
    Constant,
    EverySteps,
    GradualCooling,
    PerEpoch,
    ProgressiveUnfreezing,
    Refresh,
)
from sparsedp.methods.scores import Ranked, ScoreSource, register_ranking
from sparsedp.testing import check_method

LAYOUT = layout_of((6, 7), (6,), (3, 6), (3,))
every_method = pytest.mark.parametrize("method", list_methods(), ids=lambda method: method.name)


@pytest.mark.parametrize(
    "method",
    [*list_methods(), get_method("tp-adaptive", refresh="once")],
    ids=lambda method: f"{method.name}-{method.refresh.value}",
)
def test_check_method_registered_method_passes(method):
    check_method(method)


@dataclass(frozen=True, slots=True)
class DrawsItsOwn(Ranked):
    """Scores by the global generator: the same releases give another support."""

    name: str = "test-draws-its-own"

    def scores(self, state):
        return torch.rand_like(state["sum"])


@dataclass(frozen=True, slots=True)
class Remembers(Ranked):
    """Keeps the sum in itself: a run that is resumed has lost it."""

    name: str = "test-remembers"
    kept: ClassVar[dict] = {}

    def update(self, state, seen):
        self.kept["sum"] = self.kept.get("sum", 0) + seen.gradient
        return state

    def scores(self, state):
        return self.kept["sum"]


@pytest.mark.parametrize("ranking", [DrawsItsOwn(), Remembers()], ids=lambda ranking: ranking.name)
def test_check_method_broken_score_raises(ranking):
    broken = replace(get_method("tp-topk"), name=ranking.name, ranking=register_ranking(ranking))
    with pytest.raises(AssertionError, match=r"resumed at|another support"):
        check_method(broken)


def scheduled_sizes(row, plan):
    """The size of the support at each step, from the method's row, told again from the top."""
    d, sizes = LAYOUT.dimension, []
    starts = row.clock.starts(plan.phases[-1].steps, plan.steps_per_epoch)
    first = sum(phase.steps for phase in plan.training[:-1])
    for step in range(plan.training_steps):
        period = sum(start <= step - first for start in starts) - 1
        learns = row.ranking is not None and row.ranking.source is ScoreSource.GRADIENTS
        if step < first or row.ranking is None or (first == 0 and learns and period == 0) or row.always:
            sizes.append(d)  # without tables and modules, all is head, and all is always active
        else:
            ratio = row.schedule.ratio(period, len(starts), Fraction(repr(row.active_ratio)))
            sizes.append(floor(ratio * d))
    return sizes


@every_method
def test_support_always_has_the_scheduled_size(method):
    done = run(method)
    scheduled = scheduled_sizes(method, done.plan)
    if method.denoise:  # finds its size: at most what is scheduled, and nothing comes back
        assert all(0 < size <= most for size, most in zip(done.sizes, scheduled, strict=True))
        assert done.sizes == sorted(done.sizes, reverse=True)
    else:
        assert done.sizes == scheduled


def state_of(controller):
    state = controller.state()
    return {name: value.tolist() for name, value in state.tensors.items()}, state.values


@every_method
def test_non_interference_the_data_reaches_the_controller_only_through_releases(method):
    """With the mechanism's output swapped for fixed numbers, two data sets give the same supports and state."""

    def trained_on(seed, replace):
        plan, problem = plan_of(method, noise=0.2), Problem(steps=20, seed=seed)
        return drive(plan, problem, lr=0.1, replace=replace)

    fixed = [trained_on(seed, lambda step, setting: random_release(9, step, setting)) for seed in (1, 2)]
    assert [s.support for s in fixed[0].settings] == [s.support for s in fixed[1].settings]
    assert state_of(fixed[0].controller) == state_of(fixed[1].controller)
    if method.ranking is not None and method.ranking.source is ScoreSource.GRADIENTS:
        real = [trained_on(seed, None) for seed in (1, 2)]
        assert state_of(real[0].controller) != state_of(real[1].controller), (
            "the comparison above could not fail"
        )


@every_method
def test_run_that_lost_steps_goes_on_with_what_it_has(method):
    """Steps 3 to 8 were paid for and lost: over the switch, and over the start of an epoch."""
    controller = begun(plan_of(method), LAYOUT)
    for step in [0, 1, 2, *range(9, 20)]:
        setting = controller.begin_step(step)
        controller.update(random_release(0, step, setting))
    assert setting.support.size == run(method).sizes[-1]


PIECES = {
    "ranking": st.sampled_from(["energy", "magnitude", "ranked", "coherent", "random"]),
    "refresh": st.sampled_from(list(Refresh)),
    "schedule": st.sampled_from([
        Constant(), GradualCooling(), ProgressiveUnfreezing((0.7, 0.9)),
    ]),
    "clock": st.sampled_from([PerEpoch(), PerEpoch(3), EverySteps(2), EverySteps(7)]),
    "granularity": st.sampled_from(list(Granularity)),
    "geometry": st.sampled_from(list(GeometryRule)),
    "warm_up": st.booleans(),
    "active_ratio": st.sampled_from([0.05, 0.3, 0.61]),
}  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["tp-topk", "on-rand", "adadpigu"]), st.fixed_dictionaries(PIECES))
def test_all_pieces_combine_freely_and_keep_to_the_scheduled_size(name, pieces):
    row = get_method(name, **pieces)
    done = run(row)
    assert done.sizes == scheduled_sizes(row, done.plan)
    assert Method.from_json(row.to_json()) == row
