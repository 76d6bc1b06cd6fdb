"""test_plan_config"""

import dataclasses
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsedp.clipping import AutomaticClip, FlatClip, LayerClip
from sparsedp.errors import PrivacyError, SparseDPError
from sparsedp.methods.catalog import get_method, list_methods
from sparsedp.methods.method import Decays, GeometryRule
from sparsedp.methods.plan_config import PlanConfig, build_plan
from sparsedp.methods.ranking import Granularity
from sparsedp.methods.schedules import EverySteps, GradualCooling, PiecewiseConstant
from sparsedp.methods.scores import Energy
from sparsedp.privacy.calibration import EqualNoise, NominalSplit
from sparsedp.privacy.normalization import PrivateNormalisation
from sparsedp.privacy.plan import Phase, Plan

SIZES = {"units": 1000, "batch_size": 100, "epochs": 3}
BUDGET = {"epsilon": 2.0, "delta": 1e-5, "accountant": "rdp"}


def test_what_no_plan_has_is_refused_by_name():
    with pytest.raises(TypeError, match=r"plan\(\) got .*'lr'.*batch_size"):
        build_plan("dp-sgd", **SIZES, lr=0.1)


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

    plain, other = (
        plan(),
        plan(active_ratio=0.5, schedule=GradualCooling(), geometry=GeometryRule.STANDARDIZED),
    )
    assert [p.noise_multiplier for p in plain.phases] == [p.noise_multiplier for p in other.phases]
    assert plain.phases[1].support["active_ratio"] == 0.2
    assert other.phases[1].support["active_ratio"] == 0.5
    assert other.phases[1].geometry == "standardized"
    assert all(p.phases[0].support.plain() == {"rule": "full"} for p in (plain, other))


def test_the_split_divides_two_phases_and_leaves_one_alone():
    def noises(name, split):
        plan = build_plan(name, **SIZES, **BUDGET, split=split)
        return [phase.noise_multiplier for phase in plan.phases]

    equal, nominal = noises("tp-topk", EqualNoise()), noises("tp-topk", NominalSplit(0.3))
    assert equal[0] == equal[1]
    assert nominal[0] > equal[0] > nominal[1]
    assert noises("dp-sgd", NominalSplit(0.3)) == noises("dp-sgd", EqualNoise())


def test_each_phase_may_have_its_own_clip():
    plan = PlanConfig.asked(get_method("tp-topk"), **SIZES, max_grad_norm=(1.0, 0.5)).draft()
    assert [phase.clip_norm for phase in plan.phases] == [1.0, 0.5]
    with pytest.raises(PrivacyError, match="expected one number, or a pair"):
        PlanConfig.asked(get_method("dp-sgd"), **SIZES, max_grad_norm=(1.0, 0.5)).draft()


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("dp-sgd", {"batch_size": 1001}, "expected at most the number of units, 1000"),
        ("dp-sgd", {"batch_size": 0}, "batch_size: got 0"),
        ("dp-sgd", {"epochs": 1.5}, "epochs: got 1.5"),
        ("dp-sgd", {"accountant": "moments"}, "accountant: got 'moments'"),
        ("tp-topk", {"warmup_fraction": 1.0}, "warmup_fraction: got 1.0"),
        ("tp-topk", {"warmup_fraction": 0.01}, "both phases need at least one"),
    ],
)
def test_requests_without_meaning_are_refused(name, settings, message):
    request = {**SIZES, "epsilon": 1.0, "delta": 1e-5, "max_grad_norm": 1.0, **settings}
    with pytest.raises(SparseDPError, match=message):
        build_plan(get_method(name), **request)


@pytest.mark.parametrize("missing", ["epsilon", "delta", "clip_norm"])
def test_a_spec_has_no_gaps(missing):
    spec = PlanConfig.asked("dp-sgd", **SIZES)
    with pytest.raises(PrivacyError, match=r"expected a.* number"):
        dataclasses.replace(spec, **{missing: None}).plan()


def test_what_is_not_given_is_filled_in_from_public_numbers():
    spec = PlanConfig.asked(units=60_000)
    assert (spec.method.name, spec.unit, spec.epsilon, spec.delta) == ("tp-topk", "row", 3.0, 1e-6)
    assert (spec.epochs, spec.batch_size, spec.clip_norm, spec.warmup_fraction) == (20, 1024, 1.0, 0.3)
    assert (spec.split, spec.accountant, spec.normalise) == (EqualNoise(), "pld", None)


SPECS = {
    **{method.name: {"method": method} for method in list_methods()},
    "everything": {
        "method": get_method(
            "tp-topk",
            ranking="coherent",
            schedule=PiecewiseConstant((0.5, 0.25)),
            clock=EverySteps(4),
            granularity=Granularity.ROWS,
            geometry=GeometryRule.STANDARDIZED,
            decays=Decays(centre=0.5),
        ),
        "unit_name": "patient",
        "epsilon": 2.0,
        "delta": 1e-4,
        "max_grad_norm": (1.0, 0.5),
        "warmup_fraction": 0.4,
        "split": NominalSplit(0.2),
        "accountant": "rdp",
        "normalise": PrivateNormalisation(9.0, 2.0),
    },
}


@pytest.mark.parametrize("case", SPECS)
def test_a_spec_goes_to_json_and_back_and_its_plan_carries_it(case):
    spec = PlanConfig.asked(**SPECS[case], **SIZES)
    assert PlanConfig.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    draft = spec.draft()
    assert Plan.from_json(draft.to_json()) == draft
    assert PlanConfig.of(Plan.from_json(draft.to_json())) == spec
    spec.check(draft)
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


def test_a_piece_under_anothers_name_is_refused():
    @dataclasses.dataclass(frozen=True, slots=True)
    class Impostor(Energy):
        floor: float = 0.5

    method = dataclasses.replace(get_method("tp-topk"), ranking=Impostor())
    with pytest.raises(SparseDPError, match="has no \\['floor'\\]"):
        PlanConfig.asked(method, **SIZES)

    @dataclasses.dataclass(frozen=True, slots=True)
    class Twin(Energy):
        pass

    with pytest.raises(SparseDPError, match="has the name of another"):
        PlanConfig.asked(dataclasses.replace(method, ranking=Twin()), **SIZES)


BY_LAYER = {"0.*": 0.6, "*": 0.8}


@pytest.mark.parametrize(
    ("asked", "clip"),
    [
        (0.7, FlatClip(0.7)),
        ("auto", AutomaticClip(1.0)),
        (BY_LAYER, LayerClip((("0.*", 0.6), ("*", 0.8)))),
    ],
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


def test_the_order_of_patterns_is_part_of_a_plan():
    plans = [
        build_plan("dp-sgd", **SIZES, noise_multiplier=1.0, delta=1e-5, max_grad_norm=norms)
        for norms in ({"0.*": 0.6, "*": 0.8}, {"*": 0.8, "0.*": 0.6})
    ]
    assert plans[0].fingerprint != plans[1].fingerprint


@pytest.mark.parametrize("asked", ["auto", BY_LAYER])
def test_gradients_clipped_in_another_space_take_one_number(asked):
    method = get_method("tp-topk", geometry=GeometryRule.STANDARDIZED)
    with pytest.raises(PrivacyError, match="clipped in the space 'standardized', which takes one number"):
        build_plan(method, **SIZES, **BUDGET, max_grad_norm=asked)


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ("per-layer", "got 'per-layer', expected a number > 0, \"auto\""),
        ({}, "expected norms by pattern"),
        ({"*": 0.0}, r"max_grad_norm\['\*'\]"),
        ({"*": math.inf}, r"max_grad_norm\['\*'\]"),
    ],
)
def test_a_clip_that_is_none_is_refused_by_name(asked, match):
    with pytest.raises(PrivacyError, match=match):
        build_plan("dp-sgd", **SIZES, **BUDGET, max_grad_norm=asked)


def test_a_phase_whose_clip_norm_is_not_the_sensitivity_of_its_groups_is_refused():
    with pytest.raises(PrivacyError, match="expected the root of the squares"):
        Phase("main", 1, 0.1, 0.8, 1.0, clipping=(("0.*", 0.6), ("*", 0.8)))
