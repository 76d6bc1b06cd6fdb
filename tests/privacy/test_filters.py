"""The RDP filter: one order, one cap, whatever is chosen after looking."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from scipy.stats import norm

from sparsedp.errors import PrivacyError
from sparsedp.privacy import (
    ACCOUNTANTS,
    Charge,
    Ledger,
    NominalSplit,
    Phase,
    Plan,
    RdpFilter,
    calibrate,
    epsilon_by_epoch,
    plan_accountant,
    plan_epsilon,
)
from sparsedp.privacy.plan import SampledGaussian

DELTA = 1e-5


@dataclass(frozen=True)
class Run:
    """A closed run that charged all of these."""

    charged: tuple
    charged_head: str = "ab12"

    def committed(self):
        return self.charged


def plan(*phases, **changes):
    return Plan("dp-sgd", phases, units=1000, steps_per_epoch=10, **changes)


FIRST = plan(Phase("train", 200, 0.02, 1.0, 2.0))
OPEN = plan(Phase("a", 100, 0.05, 1.0), Phase("b", 300, 0.02, 1.0))


def finished(some):
    return Run(some.events())


def test_the_budget_is_the_cap_less_the_tight_conversion():
    """Canonne, Kamath and Steinke 2020, Prop. 12: epsilon = B + log(1 - 1/a) - log(delta a) / (a - 1)."""
    for order in (1.5, 4.0, 32.0):
        budget = RdpFilter(3.0, DELTA, order).budget
        assert budget + math.log(1 - 1 / order) - math.log(DELTA * order) / (order - 1) == pytest.approx(3.0)


def test_the_order_depends_on_the_cap_and_the_first_plan_alone():
    chosen = RdpFilter.for_first_plan(FIRST, 3.0, DELTA)
    assert chosen == RdpFilter.for_first_plan(FIRST, 3.0, DELTA)
    assert chosen.order != RdpFilter.for_first_plan(FIRST, 0.9, DELTA).order
    for second in (OPEN, plan(Phase("c", 5, 1.0, 1.0))):
        found = chosen.calibrate(second, [finished(FIRST)])
        assert found.continuation.order == chosen.order


@pytest.mark.parametrize("split", [None, NominalSplit(0.25)])
def test_the_calibrated_plan_fills_the_cap_and_no_more(split):
    chosen = RdpFilter.for_first_plan(FIRST, 3.0, DELTA)
    earlier = [finished(FIRST)]
    found = chosen.calibrate(OPEN, earlier, *([split] if split else []))
    left = chosen.remaining(earlier)
    assert 0.995 * left <= chosen.cost(found.events()) <= left
    assert chosen.admits(found, earlier)
    if split:
        alone = chosen.cost(
            replace(
                found, phases=found.phases[:1], target_epsilon=None, accountant=None, continuation=None
            ).events()
        )
        assert 0.25 * left * 0.995 <= alone <= 0.25 * left


def test_the_total_is_within_the_cap_by_ordinary_accounting():
    """Fixed plans are a special case of adaptive ones, so the best-order accountant must agree with the cap."""
    chosen = RdpFilter.for_first_plan(FIRST, 3.0, DELTA)
    second = chosen.calibrate(OPEN, [finished(FIRST)])
    third = chosen.calibrate(plan(Phase("c", 50, 0.01, 1.0)), [finished(FIRST), Run(second.events(70))])
    both = (*FIRST.events(), *second.events())
    three = (*FIRST.events(), *second.events(70), *third.events())
    for event in (both, three):
        for name in ("rdp", "pld"):
            assert ACCOUNTANTS[name].epsilon(event, DELTA) <= 3.0


def test_what_an_early_stop_did_not_charge_is_free():
    chosen = RdpFilter.for_first_plan(FIRST, 3.0, DELTA)
    assert chosen.remaining([Run(FIRST.events(50))]) > chosen.remaining([finished(FIRST)])
    ledger = Ledger(FIRST)
    for step in range(50):
        ledger.charge(Charge("train", step, 0.02, FIRST.phases[0].noise_multiplier))
    assert chosen.cost(ledger.events()) == pytest.approx(chosen.cost(FIRST.events(50)))


def test_the_plan_records_what_it_continues():
    chosen = RdpFilter.for_first_plan(FIRST, 3.0, DELTA)
    found = chosen.calibrate(OPEN, [finished(FIRST), Run((SampledGaussian(0.01, 2.0, 10),), "cd34")])
    assert found.continuation.ledgers == ("ab12", "cd34")
    assert found.continuation.spent == pytest.approx(
        chosen.budget - chosen.remaining([finished(FIRST), Run((SampledGaussian(0.01, 2.0, 10),))])
    )
    assert (found.accountant, found.target_epsilon, found.delta) == ("rdp-filter", 3.0, DELTA)
    assert Plan.from_json(found.to_json()) == found


def test_a_continued_plan_is_accounted_for_with_what_came_before():
    chosen = RdpFilter.for_first_plan(FIRST, 3.0, DELTA)
    found = chosen.calibrate(OPEN, [finished(FIRST)])
    own = plan_accountant(found)
    total = chosen.cost(FIRST.events()) + chosen.cost(found.events())
    exact = total + math.log(1 - 1 / chosen.order) - math.log(DELTA * chosen.order) / (chosen.order - 1)
    assert plan_epsilon(found) == pytest.approx(exact)
    assert 0.99 * 3.0 <= plan_epsilon(found) <= 3.0
    assert own.delta(found.events(), plan_epsilon(found)) == pytest.approx(DELTA)
    curve = epsilon_by_epoch(found)
    assert list(curve) == sorted(curve)
    assert curve[-1] == plan_epsilon(found)
    assert curve[0] > plan_epsilon(FIRST, "rdp", DELTA)
    assert plan_epsilon(found, "rdp") < plan_epsilon(found)


def test_a_used_up_cap_and_a_run_without_noise_admit_nothing():
    chosen = RdpFilter.for_first_plan(FIRST, 3.0, DELTA)
    spent = [finished(FIRST), finished(chosen.calibrate(OPEN, [finished(FIRST)]))]
    again = calibrate(plan(Phase("c", 100, 0.05, 1.0)), 1.0, DELTA)
    assert not chosen.admits(again, spent)
    for earlier in ([Run((SampledGaussian(0.1, 0.0, 1),))], [finished(FIRST)] * 50):
        assert chosen.remaining(earlier) == 0.0
        with pytest.raises(PrivacyError, match="used up"):
            chosen.calibrate(OPEN, earlier)


def test_a_first_plan_beyond_the_cap_leaves_no_filter():
    with pytest.raises(PrivacyError, match="leaves nothing"):
        RdpFilter.for_first_plan(FIRST, 0.05, DELTA)


@pytest.mark.parametrize("values", [(0.0, DELTA, 2.0), (1.0, 0.0, 2.0), (1.0, 1.0, 2.0), (1.0, DELTA, 1.0)])
def test_a_filter_without_meaning_is_refused(values):
    with pytest.raises(PrivacyError):
        RdpFilter(*values)


@pytest.mark.parametrize(
    "appetite", [lambda x: x > 2.0, lambda x: x < -1.0, lambda x: abs(x) > 3.0, lambda x: True]
)
def test_an_analyst_who_spends_only_when_it_hurts_stays_within_the_cap(appetite):
    """One Gaussian release, then a second one, all that is left, only if the first came out as they like.

    Its delta at the cap's epsilon is integrated exactly: over the first release, of the hockey-stick divergence of
    the second at epsilon less the loss so far.
    """
    cap, delta, noise = 1.5, 1e-4, 4.0
    first = plan(Phase("look", 1, 1.0, 1.0, noise))
    chosen = RdpFilter.for_first_plan(first, cap, delta)
    second = chosen.calibrate(plan(Phase("more", 1, 1.0, 1.0)), [finished(first)]).phases[0].noise_multiplier
    x = np.linspace(-12 * noise, 12 * noise + 1, 40_001)
    total = 0.0
    for truth, other in ((1.0, 0.0), (0.0, 1.0)):
        loss = norm.logpdf(x, truth, noise) - norm.logpdf(x, other, noise)
        rest = cap - loss
        more = norm.cdf(0.5 / second - rest * second) - np.exp(rest) * norm.cdf(-0.5 / second - rest * second)
        none = np.maximum(0.0, -np.expm1(rest))
        total = max(
            total,
            float(
                np.trapezoid(norm.pdf(x, truth, noise) * np.where([appetite(v) for v in x], more, none), x)
            ),
        )
    assert 0 < total <= delta
