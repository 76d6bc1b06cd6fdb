"""Calibration: never above the target, hardly below, whatever the plan, the split, the accountant or the cache."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from sparsedp.errors import PrivacyError, PrivacyWarning
from sparsedp.privacy import (
    ACCOUNTANTS,
    EqualNoise,
    NominalSplit,
    Phase,
    Plan,
    RdpFilter,
    calibrate,
    epsilon_by_epoch,
    plan_epsilon,
)
from sparsedp.privacy.accounting import ORDERS
from sparsedp.privacy.calibration import Found, least_noise
from sparsedp.privacy.plan import SampledGaussian

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


def test_a_nominal_split_spends_its_share_in_the_first_phase_alone():
    skeleton = plan(700, 1640)
    found = calibrate(skeleton, 3.0, DELTA, split=NominalSplit(0.3))
    assert 0.3 * 3.0 * (1 - 0.005) <= ACCOUNTANTS["pld"].epsilon(found.events()[:1], DELTA) <= 0.3 * 3.0
    first, second = noise_of(found)
    (both, _) = noise_of(calibrate(skeleton, 3.0, DELTA))
    assert second < both < first


@pytest.mark.parametrize(
    ("epsilon", "delta", "name", "says"),
    [
        (1e-7, DELTA, "pld", "too small"),
        (0.005, DELTA, "rdp-classic", "fewer steps"),
        (1e6, DELTA, "pld", "protects nobody"),
        (0.0, DELTA, "pld", "epsilon"),
        (math.inf, DELTA, "pld", "epsilon"),
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
    for budget in (0.0, 1.0):
        with pytest.raises(PrivacyError, match="phase1_budget"):
            NominalSplit(budget)
    greedy = Phase("statistics", 1, 1.0, 1.0, 0.5)
    with pytest.raises(PrivacyError, match="have noise already"):
        calibrate(replace(plan(10), phases=(greedy, *plan(10).phases)), 1.0, DELTA)


def test_a_delta_of_one_over_n_or_more_warns():
    with pytest.warns(PrivacyWarning, match="well below 1/N"):
        calibrate(plan(10, units=100_000), 1.0, DELTA)


def test_the_search_never_overshoots_where_the_cost_jumps():
    found = least_noise(lambda noise: 2.0 if noise < 3.7 else 0.5, 1.0, Found(1.0, -1.0), "x").noise
    assert 3.7 <= found <= 3.7001


def phases_plan(*phases, **changes):
    return Plan("dp-sgd", phases, units=1000, steps_per_epoch=10, **changes)


FIRST = phases_plan(Phase("train", 200, 0.02, 1.0, 2.0))
OPEN = phases_plan(Phase("a", 100, 0.05, 1.0), Phase("b", 300, 0.02, 1.0))


def finished(some):
    """A closed run that charged all of a plan: the head of its ledger, and what it charged."""
    return "ab12", some.events()


def remaining(chosen, earlier):
    return chosen.budget - sum(chosen.cost(events) for _, events in earlier)


@pytest.mark.parametrize("split", [None, NominalSplit(0.25)])
def test_the_calibrated_plan_fills_the_cap_and_no_more(split):
    chosen = RdpFilter.for_first_plan(FIRST, 3.0, DELTA)
    earlier = [finished(FIRST)]
    found = chosen.calibrate(OPEN, earlier, *([split] if split else []))
    left = remaining(chosen, earlier)
    assert 0.995 * left <= chosen.cost(found.events()) <= left
    if split:
        assert 0.25 * left * 0.995 <= chosen.cost(found.events()[:1]) <= 0.25 * left


def test_the_total_is_within_the_cap_by_ordinary_accounting():
    """Fixed plans are a special case of adaptive ones, so the best-order accountant must agree with the cap."""
    chosen = RdpFilter.for_first_plan(FIRST, 3.0, DELTA)
    second = chosen.calibrate(OPEN, [finished(FIRST)])
    third = chosen.calibrate(
        phases_plan(Phase("c", 50, 0.01, 1.0)), [finished(FIRST), ("ab13", second.events(70))]
    )
    both = (*FIRST.events(), *second.events())
    three = (*FIRST.events(), *second.events(70), *third.events())
    for event in (both, three):
        for name in ("rdp", "pld"):
            assert ACCOUNTANTS[name].epsilon(event, DELTA) <= 3.0


def test_a_continued_plan_is_accounted_for_with_what_came_before():
    chosen = RdpFilter.for_first_plan(FIRST, 3.0, DELTA)
    found = chosen.calibrate(OPEN, [finished(FIRST)])
    prior = (found.continuation.ledgers, found.continuation.spent)
    assert prior == (("ab12",), pytest.approx(chosen.cost(FIRST.events())))
    assert (found.accountant, found.target_epsilon, found.delta) == ("rdp-filter", 3.0, DELTA)
    assert Plan.from_json(found.to_json()) == found
    total = chosen.cost(FIRST.events()) + chosen.cost(found.events())
    exact = total + math.log(1 - 1 / chosen.order) - math.log(DELTA * chosen.order) / (chosen.order - 1)
    assert plan_epsilon(found) == pytest.approx(exact)
    assert 0.99 * 3.0 <= plan_epsilon(found) <= 3.0
    curve = epsilon_by_epoch(found)
    assert list(curve) == sorted(curve)
    assert curve[-1] == plan_epsilon(found)
    assert curve[0] > plan_epsilon(FIRST, "rdp", DELTA)
    assert plan_epsilon(found, "rdp") < plan_epsilon(found)


def test_a_used_up_cap_and_a_run_without_noise_admit_nothing():
    chosen = RdpFilter.for_first_plan(FIRST, 3.0, DELTA)
    spent = [finished(FIRST), finished(chosen.calibrate(OPEN, [finished(FIRST)]))]
    assert 0 <= remaining(chosen, spent) < 0.005 * chosen.budget
    for earlier in ([("ab12", (SampledGaussian(0.1, 0.0, 1),))], [finished(FIRST)] * 50):
        assert remaining(chosen, earlier) <= 0.0
        with pytest.raises(PrivacyError, match="used up"):
            chosen.calibrate(OPEN, earlier)


@pytest.mark.parametrize(
    "appetite", [lambda x: x > 2.0, lambda x: x < -1.0, lambda x: abs(x) > 3.0, lambda x: True]
)
def test_an_analyst_who_spends_only_when_it_hurts_stays_within_the_cap(appetite):
    """One Gaussian release, then a second one, all that is left, only if the first came out as they like.

    Its delta at the cap's epsilon is integrated exactly: over the first release, of the hockey-stick divergence of
    the second at epsilon less the loss so far.
    """
    cap, delta, noise = 1.5, 1e-4, 4.0
    first = phases_plan(Phase("look", 1, 1.0, 1.0, noise))
    chosen = RdpFilter.for_first_plan(first, cap, delta)
    (second,) = noise_of(chosen.calibrate(phases_plan(Phase("more", 1, 1.0, 1.0)), [finished(first)]))
    x = np.linspace(-12 * noise, 12 * noise + 1, 40_001)
    total = 0.0
    for truth, other in ((1.0, 0.0), (0.0, 1.0)):
        loss = norm.logpdf(x, truth, noise) - norm.logpdf(x, other, noise)
        rest = cap - loss
        more = norm.cdf(0.5 / second - rest * second) - np.exp(rest) * norm.cdf(-0.5 / second - rest * second)
        none = np.maximum(0.0, -np.expm1(rest))
        chance = norm.pdf(x, truth, noise) * np.where([appetite(v) for v in x], more, none)
        total = max(total, float(np.trapezoid(chance, x)))
    assert 0 < total <= delta
