"""The plan: what it refuses, what it derives, that its JSON is the plan, and its guarantee in words."""

import json
import math
import re
from dataclasses import replace

import dp_accounting as dp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import RDPAccountant

from sparsedp.errors import PrivacyError, SparseDPError
from sparsedp.guarantee import describe, describe_run, epsilons, guarantee, posterior
from sparsedp.methods import build_plan
from sparsedp.privacy import Phase, Plan, PriorSpending
from sparsedp.privacy.accounting import plan_epsilon
from sparsedp.privacy.plan import dp_event

WARM_UP = Phase("warm-up", 30, 0.01, 1.0, 1.5)
MAIN = Phase(
    "main",
    70,
    0.02,
    0.5,
    1.25,
    support={"rule": "top-k", "ratio": 0.2, "list": [1, [2]]},
    geometry="standardized",
)
PLAN = Plan("tp-topk", (WARM_UP, MAIN), units=1000, steps_per_epoch=20, unit="patient", delta=1e-5)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
phases = st.builds(
    Phase,
    name=st.just("a"),
    steps=st.integers(1, 10**9),
    sampling_rate=st.floats(0, 1, exclude_min=True),
    clip_norm=st.floats(0, 1e9, exclude_min=True),
    noise_multiplier=st.floats(0, 1e9),
    support=st.dictionaries(st.text(), json_values, max_size=4),
    geometry=st.text(min_size=1),
    trains=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(phases, st.floats(0, 1, exclude_min=True, exclude_max=True), st.text(min_size=1))
def test_json_gives_back_an_equal_plan_with_the_same_fingerprint(phase, delta, unit):
    plan = Plan("m", (phase, replace(phase, name="b")), units=7, steps_per_epoch=3, unit=unit, delta=delta)
    back = Plan.from_json(plan.to_json())
    assert back == plan
    assert hash(back) == hash(plan)
    assert back.fingerprint == plan.fingerprint
    assert back.to_json() == plan.to_json()


TARGET = {"target_epsilon": 1.0, "accountant": "pld"}
PRIOR = {"continuation": PriorSpending(2.0, 0.1, ())}


@pytest.mark.parametrize(
    ("of", "change", "says"),
    [
        (WARM_UP, {"steps": 0}, "steps: got 0"),
        (WARM_UP, {"steps": True}, "steps"),
        (WARM_UP, {"sampling_rate": 0.0}, "probability"),
        (WARM_UP, {"sampling_rate": 1.0000001}, "must not exceed the number of units"),
        (WARM_UP, {"clip_norm": 0.0}, "clip_norm"),
        (WARM_UP, {"clip_norm": math.inf}, "clip_norm"),
        (WARM_UP, {"noise_multiplier": -1.0}, "noise_multiplier"),
        (WARM_UP, {"name": ""}, "name"),
        (WARM_UP, {"count_share": 1.0}, "count_share"),
        (WARM_UP, {"loss_bound": 2.0, "count_share": 0.1}, "private_loss"),
        (WARM_UP, {"clipping": "sharp"}, "expected 'flat', 'auto' or pairs"),
        (WARM_UP, {"clipping": (("*", 2.0),)}, "root of the squares"),
        (MAIN, {"clipping": "auto"}, "takes one number"),
        (PLAN, {"units": 0}, "units"),
        (PLAN, {"delta": 1.0}, "delta"),
        (PLAN, {"phases": ()}, "at least one phase"),
        (PLAN, {"phases": (WARM_UP, WARM_UP)}, "no name twice"),
        (PLAN, {"target_epsilon": 1.0}, "come together"),
        (PLAN, {"accountant": "pld"}, "come together"),
        (PLAN, {**TARGET, "target_epsilon": math.inf}, "epsilon"),
        (PLAN, {**TARGET, "delta": None}, "needs a delta"),
        (PLAN, {**TARGET, "phases": (replace(MAIN, noise_multiplier=0),)}, "noise in every"),
        (PLAN, PRIOR, "come together"),
        (PLAN, {**PRIOR, **TARGET}, "come together"),
        (PLAN, {**TARGET, "accountant": "rdp-filter"}, "come together"),
    ],
)
def test_a_phase_and_a_plan_refuse_what_they_cannot_mean(of, change, says):
    with pytest.raises(PrivacyError, match=says):
        replace(of, **change)


def test_malformed_json_is_a_clear_error():
    good = json.loads(PLAN.to_json())
    for text, says in (
        ("not json", "not JSON"),
        ("[]", "format"),
        (json.dumps({**good, "format": True}), "got True, expected 2"),
        (json.dumps({k: v for k, v in good.items() if k != "units"}), "units is missing"),
        (json.dumps({**good, "phases": [{**good["phases"][0], "sigma": 1}]}), "unknown fields"),
        (json.dumps({**good, "continuation": {"order": 2.0}}), "continuation: got"),
    ):
        with pytest.raises(SparseDPError, match=says):
            Plan.from_json(text)


def test_phase_at_and_first_step_agree_with_counting():
    names = ["warm-up"] * 30 + ["main"] * 70
    assert [PLAN.phase_at(step).name for step in range(PLAN.total_steps)] == names
    assert PLAN.first_step("main") == names.index("main")
    for outside in (-1, 100):
        with pytest.raises(PrivacyError, match="outside the plan"):
            PLAN.phase_at(outside)


@given(st.lists(st.tuples(st.integers(1, 12), st.booleans()), min_size=1, max_size=4), st.integers(1, 6))
def test_epoch_ends_agree_with_counting_training_steps(shape, per_epoch):
    parts = tuple(Phase(f"p{i}", n, 0.5, 1.0, 1.0, trains=t) for i, (n, t) in enumerate(shape))
    plan = Plan("m", parts, units=10, steps_per_epoch=per_epoch)
    trained, expected = 0, []
    for step in range(plan.total_steps):
        trained += plan.phase_at(step).trains
        if plan.phase_at(step).trains and trained % per_epoch == 0:
            expected.append(step + 1)
    if not expected or expected[-1] != plan.total_steps:
        expected.append(plan.total_steps)
    assert plan.epoch_ends() == tuple(expected)


def test_the_spends_are_the_phases_and_stop_where_told():
    def part(rate, noise, count):
        return dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise)), count)

    assert PLAN.events() == ((0.01, 1.5, 30), (0.02, 1.25, 70))
    assert PLAN.events(31) == ((0.01, 1.5, 30), (0.02, 1.25, 1))
    assert PLAN.events(30) == ((0.01, 1.5, 30),)
    assert dp_event(PLAN.events()) == dp.ComposedDpEvent([part(0.01, 1.5, 30), part(0.02, 1.25, 70)])
    assert dp_event(PLAN.events(0)) == dp.NoOpDpEvent()
    with pytest.raises(PrivacyError, match="steps"):
        PLAN.events(101)


def test_a_phase_without_noise_leaves_no_guarantee():
    plan = replace(PLAN, phases=(WARM_UP, Phase("a", 5, 0.1, 1.0)))
    assert not plan.is_calibrated
    with pytest.raises(PrivacyError, match="noise in each"):
        plan.check_calibrated()
    assert isinstance(dp_event(plan.events()), dp.NonPrivateDpEvent)
    assert plan.events(30) == PLAN.events(30)
    assert "No guarantee" in guarantee(plan)
    assert all(math.isinf(value) for value in epsilons(plan).values())


def test_the_summary_names_unit_relation_delta_and_accountant():
    cost = plan_epsilon(PLAN, "rdp")
    calibrated = replace(PLAN, target_epsilon=cost * 1.001, accountant="rdp")
    assert guarantee(calibrated) == (
        f"At most ({cost * 1.001:.4g}, 1e-05)-differential privacy for adding or removing one patient of 1000, by "
        "the rdp accountant."
    )
    continued = replace(calibrated, accountant="rdp-filter", continuation=PriorSpending(4.5, 0.1, ("ab",)))
    assert "together with 1 earlier run for adding" in guarantee(continued)
    assert epsilons(continued) == {}  # the other accountants know of no earlier run
    assert set(epsilons(calibrated)) == {"pld", "rdp", "rdp-classic"}


@pytest.mark.parametrize("noise", [1.0, 0.8, 0.6, 5.0])
def test_the_sentence_of_an_edited_plan_says_what_it_costs_not_what_it_aimed_at(noise):
    edited = replace(
        PLAN, phases=(WARM_UP, replace(MAIN, noise_multiplier=noise)), target_epsilon=1.0, accountant="rdp"
    )
    opacus = RDPAccountant()
    opacus.history = [(1.5, 0.01, 30), (noise, 0.02, 70)]
    cost, _ = opacus.get_privacy_spent(delta=1e-5)
    sentence = guarantee(edited)
    stated = float(sentence.split("(")[1].split(",")[0])
    assert cost <= stated * (1 + 1e-9)
    assert stated == pytest.approx(cost, rel=1e-3)
    assert ("more than its target of 1." in sentence) == (cost > 1)


def a_plan():
    asked = {"epsilon": 3.0, "delta": 1e-4, "max_grad_norm": 1.0, "accountant": "rdp"}
    return build_plan("tp-topk", units=500, batch_size=50, epochs=4, **asked)


def test_a_run_counts_as_seeded_unless_its_record_denies_it_twice():
    records = [{"seed": seed, "publishable": said} for seed in (0, None) for said in (False, True)]
    warned = [describe_run(a_plan(), None, record).warning is not None for record in (None, *records)]
    assert warned == [True, True, True, True, False]


def test_promised_odds_of_a_plan_with_less_noise_than_it_was_calibrated_to_are_those_it_has():
    plan = a_plan()
    louder = replace(
        plan, phases=tuple(replace(p, noise_multiplier=p.noise_multiplier / 2) for p in plan.phases)
    )
    shown = re.search(r"= ([\d.e+]+) times", describe(louder).promises[0])
    odds = math.exp(plan_epsilon(louder))
    assert shown is not None
    assert odds <= float(shown[1]) < 1.01 * odds


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 20.0, 1e4])
@pytest.mark.parametrize("chance", [0.001, 0.5, 0.9])
def test_posterior_keeps_the_odds_ratio_within_epsilon_and_contains_the_prior(chance, epsilon):
    low, high = posterior(chance, epsilon)
    assert 0 <= low < chance < high <= 1
    if epsilon < 15:
        assert math.log(high / (1 - high) * (1 - chance) / chance) == pytest.approx(epsilon)
        assert math.log(low / (1 - low) * (1 - chance) / chance) == pytest.approx(-epsilon)
