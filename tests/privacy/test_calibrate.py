"""Calibration: never above the target, hardly below, whatever the plan, the split, the accountant or the cache."""

import math
from dataclasses import replace

import pytest
from dp_accounting.pld import PLDAccountant
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sparsedp.errors import PrivacyError, PrivacyWarning
from sparsedp.privacy import ACCOUNTANTS, EqualNoise, NominalSplit, Phase, Plan, calibrate, plan_epsilon
from sparsedp.privacy.accounting import ORDERS
from sparsedp.privacy.calibration import Found, least_noise
from sparsedp.runs.verify import event_of

DELTA = 1e-5


def plan(*steps, rate=1024 / 60_000, units=60_000):
    phases = tuple(Phase(f"p{i}", count, rate, 1.0) for i, count in enumerate(steps))
    return Plan("dp-sgd", phases, units=units, steps_per_epoch=58)


def noise_of(found):
    return [phase.noise_multiplier for phase in found.phases]


@pytest.mark.parametrize(("name", "published"), [("pld", 1.364), ("rdp", 1.447)])
def test_golden_noise_for_epsilon_3(name, published):
    """N=60,000, B=1024, 2,340 steps, delta 1e-5 (design, section 4)."""
    (found,) = noise_of(calibrate(plan(2340), 3.0, DELTA, name))
    assert found == pytest.approx(published, rel=2.5e-3)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    epsilon=st.floats(0.1, 10.0),
    delta=st.sampled_from([1e-4, 1e-5, 1e-7]),
    rate=st.sampled_from([0.004, 0.02, 0.15, 1.0]),
    steps=st.tuples(st.integers(1, 300), st.integers(1, 700)),
    name=st.sampled_from(sorted(ACCOUNTANTS)),
    share=st.sampled_from([None, 0.3, 0.05]),
)
def test_the_calibrated_plan_costs_the_target_and_never_more(epsilon, delta, rate, steps, name, share):
    least_of_any_order = math.log(1 / delta) / (max(ORDERS) - 1)
    assume(name == "pld" or (share or 1) * epsilon > 1.05 * least_of_any_order)  # below, no noise is enough
    split = EqualNoise() if share is None else NominalSplit(share)
    found = calibrate(plan(*steps, rate=rate, units=1000), epsilon, delta, name, split)
    assert (1 - 0.005) * epsilon <= plan_epsilon(found, name) <= epsilon
    assert (found.target_epsilon, found.delta, found.accountant) == (epsilon, delta, name)


@pytest.mark.parametrize("epsilon", [30.0, 200.0])
def test_full_batches_can_be_calibrated_to_large_epsilons_too(epsilon):
    found = calibrate(plan(11, rate=1.0, units=100), epsilon, DELTA)
    assert (1 - 0.005) * epsilon <= plan_epsilon(found) <= epsilon


def test_the_cost_is_within_the_target_by_the_accountant_of_the_library_too():
    found = calibrate(plan(300, 700, rate=0.05), 2.0, DELTA)
    assert (
        PLDAccountant(value_discretization_interval=2e-4).compose(event_of(found.events())).get_epsilon(DELTA)
        <= 2.0
    )


def test_a_nominal_split_spends_its_share_in_the_first_phase_alone():
    skeleton = plan(700, 1640)
    found = calibrate(skeleton, 3.0, DELTA, split=NominalSplit(0.3))
    alone = replace(found, phases=found.phases[:1], target_epsilon=None, accountant=None)
    assert 0.3 * 3.0 * (1 - 0.005) <= plan_epsilon(alone) <= 0.3 * 3.0
    first, second = noise_of(found)
    (both, _) = noise_of(calibrate(skeleton, 3.0, DELTA))
    assert second < both < first


def test_equal_noise_gives_any_number_of_phases_the_noise_of_one():
    one, four = calibrate(plan(1000), 1.0, DELTA), calibrate(plan(100, 200, 300, 400), 1.0, DELTA)
    assert len(set(noise_of(four))) == 1
    assert noise_of(four)[0] == pytest.approx(noise_of(one)[0], rel=2e-3)


def test_phases_with_noise_keep_it_and_are_paid_for():
    statistics = Phase("statistics", 1, 1.0, 1.0, 12.0, trains=False)
    skeleton = plan(500)
    found = calibrate(replace(skeleton, phases=(statistics, *skeleton.phases)), 1.0, DELTA)
    assert found.phases[0] == statistics
    assert 0.995 <= plan_epsilon(found) <= 1.0
    assert noise_of(found)[1] > noise_of(calibrate(skeleton, 1.0, DELTA))[0]


def test_less_epsilon_takes_more_noise():
    values = [noise_of(calibrate(plan(200), epsilon, DELTA))[0] for epsilon in (0.2, 0.5, 1.0, 4.0, 16.0)]
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize(
    ("epsilon", "delta", "name", "says"),
    [
        (1e-7, DELTA, "pld", "too small"),
        (0.005, DELTA, "rdp-classic", "fewer steps"),
        (1e6, DELTA, "pld", "protects nobody"),
        (0.0, DELTA, "pld", "epsilon"),
        (-1.0, DELTA, "pld", "epsilon"),
        (math.inf, DELTA, "pld", "epsilon"),
        (1.0, 0.0, "pld", "delta"),
        (1.0, 1.0, "pld", "delta"),
        (1.0, DELTA, "moments", "expected one of"),
    ],
)
def test_impossible_requests_get_a_clear_error(epsilon, delta, name, says):
    with pytest.raises(PrivacyError, match=says):
        calibrate(plan(2000), epsilon, delta, name)


def test_plans_that_cannot_be_calibrated_get_a_clear_error():
    with pytest.raises(PrivacyError, match="two phases"):
        calibrate(plan(10), 1.0, DELTA, split=NominalSplit())
    with pytest.raises(PrivacyError, match="noise already"):
        calibrate(calibrate(plan(10), 1.0, DELTA), 2.0, DELTA)
    unclipped = replace(plan(10), phases=(Phase("a", 10, 0.1, None),))
    with pytest.raises(PrivacyError, match="clip_norm"):
        calibrate(unclipped, 1.0, DELTA)
    for budget in (0.0, 1.0, -0.3):
        with pytest.raises(PrivacyError, match="phase1_budget"):
            NominalSplit(budget)


def test_fixed_phases_that_cost_the_target_alone_leave_no_answer():
    greedy = Phase("statistics", 1, 1.0, 1.0, 0.5)
    with pytest.raises(PrivacyError, match="statistics alone costs"):
        calibrate(replace(plan(10), phases=(greedy, *plan(10).phases)), 1.0, DELTA)


@pytest.mark.parametrize("units", [100_000, 100_001])
def test_a_delta_of_one_over_n_or_more_warns(units):
    with pytest.warns(PrivacyWarning, match="well below 1/N"):
        calibrate(plan(10, units=units), 1.0, DELTA)


def test_a_second_calibration_searches_no_more(monkeypatch):
    first = calibrate(plan(100, 200), 1.0, DELTA, split=NominalSplit())

    def search(*_):
        raise AssertionError("searched")

    monkeypatch.setattr("sparsedp.privacy.calibration.least_noise", search)
    assert calibrate(plan(100, 200), 1.0, DELTA, split=NominalSplit()) == first
    others = [
        (1.01, DELTA, "pld", NominalSplit()),
        (1.0, 0.9e-5, "pld", NominalSplit()),
        (1.0, DELTA, "rdp", NominalSplit()),
    ]
    for epsilon, delta, name, split in [
        *others,
        (1.0, DELTA, "pld", NominalSplit(0.2)),
        (1.0, DELTA, "pld", EqualNoise()),
    ]:
        with pytest.raises(AssertionError, match="searched"):
            calibrate(plan(100, 200), epsilon, delta, name, split)


@pytest.mark.parametrize(
    ("power", "target"), [(0.3, 1.0), (0.3, 10.0), (1.0, 1e-3), (1.0, 50.0), (8.0, 1e-3), (8.0, 50.0)]
)
def test_the_search_finds_the_noise_of_a_power_law_from_any_start(power, target):
    exact = (7.0 / target) ** (1 / power)
    for start in (0.2, 1.0, 3000.0):
        found = least_noise(lambda noise: 7.0 * noise**-power, target, Found(start, -1.0), "x").noise
        assert exact <= found <= exact * (1 - 0.0026) ** (-1 / power)


def test_the_search_never_overshoots_where_the_cost_jumps():
    found = least_noise(lambda noise: 2.0 if noise < 3.7 else 0.5, 1.0, Found(1.0, -1.0), "x").noise
    assert 3.7 <= found <= 3.7001


def test_the_search_copes_with_infinite_and_zero_costs():
    def cost(noise):
        return math.inf if noise < 2 else 0.0 if noise > 40 else 10 / noise

    found = least_noise(cost, 1.0, Found(0.5, -1.0), "x").noise
    assert cost(found) == pytest.approx(1.0, rel=3e-3)
    found = least_noise(cost, 1.0, Found(500.0, -1.0), "x").noise
    assert cost(found) == pytest.approx(1.0, rel=3e-3)
