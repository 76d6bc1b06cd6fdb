"""What a plan is made of: gaps filled from public numbers, phases, noise, clips, JSON."""

import dataclasses
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsedp.clipping import AutomaticClip, FlatClip, LayerClip
from sparsedp.errors import PrivacyError, SparseDPError
from sparsedp.methods.catalog import get_method, list_methods
from sparsedp.methods.plan_config import PlanConfig, build_plan
from sparsedp.methods.scores import Energy
from sparsedp.privacy.calibration import NominalSplit
from sparsedp.privacy.normalization import PrivateNormalisation
from sparsedp.privacy.plan import Plan

SIZES = {"units": 1000, "batch_size": 100, "epochs": 3}
BUDGET = {"epsilon": 2.0, "delta": 1e-5, "accountant": "rdp"}
BY_LAYER = {"0.*": 0.6, "*": 0.8}


@given(st.integers(1, 10**6), st.integers(1, 10**5), st.integers(1, 50), st.floats(0.01, 0.99))
@settings(max_examples=60)
def test_steps_add_up_whatever_the_sizes(units, batch_size, epochs, fraction):
    if batch_size > units:
        return
    total = epochs * max(1, math.floor(units / batch_size + 0.5))
    try:
        plan = PlanConfig.asked(
            get_method("tp-topk"), units=units, batch_size=batch_size, epochs=epochs, max_grad_norm=1.0,
            warmup_fraction=fraction,
        ).draft()  # fmt: skip
    except SparseDPError:
        assert round(fraction * total) in (0, total)
        return
    assert plan.total_steps == total
    assert abs(plan.phases[0].steps - fraction * total) <= 0.5 + 1e-9


def test_options_change_the_declared_rule_but_never_the_noise():
    def plan(**options):
        return build_plan(get_method("tp-topk", **options), **SIZES, **BUDGET)

    plain, other = plan(), plan(active_ratio=0.5, schedule="cooling", geometry="standardized")
    assert [p.noise_multiplier for p in plain.phases] == [p.noise_multiplier for p in other.phases]
    assert plain.phases[1].support["active_ratio"] == 0.2
    assert other.phases[1].support["active_ratio"] == 0.5
    assert other.phases[1].geometry == "standardized"
    assert all(p.phases[0].support.plain() == {"rule": "full"} for p in (plain, other))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("dp-sgd", {"batch_size": 1001}, "expected at most the number of units, 1000"),
        ("dp-sgd", {"batch_size": 0}, "batch_size: got 0"),
        ("dp-sgd", {"epochs": 1.5}, "epochs: got 1.5"),
        ("dp-sgd", {"accountant": "moments"}, "accountant: got 'moments'"),
        ("dp-sgd", {"max_grad_norm": (1.0, 0.5)}, "expected one number, or a pair"),
        ("dp-sgd", {"max_grad_norm": "per-layer"}, "got 'per-layer', expected a number > 0, \"auto\""),
        ("dp-sgd", {"max_grad_norm": {}}, "norms by pattern"),
        ("dp-sgd", {"max_grad_norm": {"*": 0.0}}, "clip_norm: got 0.0"),
        ("dp-sgd", {"max_grad_norm": {"*": math.inf}}, "clip_norm: got inf"),
        ("dp-sgd", {"noise_multiplier": 1.0}, "expected one of them"),
        ("tp-topk", {"warmup_fraction": 1.0}, "warmup_fraction: got 1.0"),
        ("tp-topk", {"warmup_fraction": 0.01}, "both phases need at least one"),
        ("adadpigu", {"max_grad_norm": "auto"}, "in the space 'standardized', which takes one number"),
        ("tp-adaptive", {"max_grad_norm": BY_LAYER}, "clipped in the space 'scaled', which takes one number"),
        ("fest", {"selection_budget": 1.0}, "selection_budget: got 1.0"),
    ],
)
def test_requests_without_meaning_are_refused(name, settings, message):
    request = {**SIZES, **BUDGET, **settings}
    with pytest.raises(SparseDPError, match=message):
        build_plan(get_method(name), **request)


SPECS = {
    **{method.name: {"method": method} for method in list_methods()},
    "everything": {
        "method": get_method("tp-topk", ranking="coherent", schedule="cooling", clock={"every_steps": 4}),
        "unit_name": "patient",
        "epsilon": 2.0,
        "delta": 1e-4,
        "max_grad_norm": (1.0, 0.5),
        "warmup_fraction": 0.4,
        "split": NominalSplit(0.2),
        "accountant": "rdp",
        "normalise": PrivateNormalisation(9.0, 2.0),
    },
    "by layer": {"method": "dp-sgd", "max_grad_norm": BY_LAYER, "private_loss": 2.0},
}


CLIPS = {"everything": [1.0, 0.5], "by layer": [1.0]}


@pytest.mark.parametrize("case", SPECS)
def test_a_spec_goes_to_json_and_back_and_its_plan_carries_it(case):
    spec = PlanConfig.asked(**SPECS[case], **SIZES)
    assert PlanConfig.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    draft = spec.draft()
    assert Plan.from_json(draft.to_json()) == draft
    assert PlanConfig.of(Plan.from_json(draft.to_json())) == spec
    spec.check(draft)
    assert [phase.clip_norm for phase in draft.training] == CLIPS.get(case, [1.0] * len(draft.training))
    others = {name: value for name, value in spec.to_json().items() if name != "epochs"}
    with pytest.raises(SparseDPError, match="what a plan was made from"):
        PlanConfig.from_json(others)


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: dataclasses.replace(plan, unit="patient"),
        lambda plan: dataclasses.replace(plan, units=999),
        lambda plan: dataclasses.replace(plan, method="tp-rand"),
        lambda plan: dataclasses.replace(plan, phases=plan.phases[::-1]),
        lambda plan: dataclasses.replace(
            plan, phases=(plan.phases[0], dataclasses.replace(plan.phases[1], clip_norm=2.0))
        ),
    ],
)
def test_a_plan_that_is_not_what_it_was_made_from_is_refused(change):
    spec = PlanConfig.asked("tp-topk", **SIZES)
    with pytest.raises(PrivacyError, match="changed afterwards"):
        spec.check(change(spec.draft()))
    spec.check(spec.draft().with_noise({"main": 3.0}))


class Twin(Energy):
    """Another score under the name of the energy score."""


def test_a_piece_under_anothers_name_is_refused():
    method = dataclasses.replace(get_method("tp-topk"), ranking=Twin())
    with pytest.raises(SparseDPError, match="has the name of another"):
        PlanConfig.asked(method, **SIZES)


@pytest.mark.parametrize(
    ("asked", "clip"),
    [(0.7, FlatClip(0.7)), ("auto", AutomaticClip(1.0)), (BY_LAYER, LayerClip((("0.*", 0.6), ("*", 0.8))))],
)
@pytest.mark.parametrize("method", ["dp-sgd", "tp-topk"])
def test_a_plan_clips_as_asked_and_states_the_clips_sensitivity(method, asked, clip):
    plan = build_plan(method, **SIZES, **BUDGET, max_grad_norm=asked)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert PlanConfig.of(again).plan() == plan
    for phase in again.phases:
        assert phase.clip == clip
        assert phase.clip_norm == pytest.approx(clip.sensitivity)
    assert ("clipping" in plan.to_json()) == (asked != 0.7)
