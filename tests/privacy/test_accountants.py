"""The accountants against published numbers, closed forms, quadrature, and three other implementations."""

import itertools
import logging
import math
import warnings

import dp_accounting as dp
import mpmath
import numpy as np
import pytest
from dp_accounting.rdp import rdp_privacy_accountant
from opacus.accountants import PRVAccountant, RDPAccountant
from scipy.optimize import brentq
from scipy.stats import norm

from sparsedp.errors import PrivacyError
from sparsedp.privacy import ACCOUNTANTS, Phase, Plan, accountant, calibrate, epsilon_by_epoch, plan_epsilon
from sparsedp.privacy.accounting import ORDERS, addition_divergence, removal_divergence, renyi
from sparsedp.privacy.plan import SampledGaussian, dp_event

DELTA = 1e-5
GRID = [
    (SampledGaussian(0.04, 1.5, 2250),),
    (SampledGaussian(0.01, 1.0, 10_000),),
    (SampledGaussian(1.0, 5.0, 10),),
    (SampledGaussian(0.001, 0.8, 1000),),
    (SampledGaussian(2e-4, 0.9, 1000),),
    (SampledGaussian(0.017, 2.0, 700), SampledGaussian(0.017, 1.2, 1640)),
    (SampledGaussian(1.0, 20.0, 1), SampledGaussian(0.1, 4.0, 100), SampledGaussian(0.2, 6.0, 100)),
]
TWO_PHASES = (SampledGaussian(0.017, 2.0, 700), SampledGaussian(0.03, 1.2, 1640))


def epsilon(name, *spends, delta=DELTA):
    return ACCOUNTANTS[name].epsilon(spends, delta)


def gaussian_epsilon(noise, delta):
    """Balle and Wang 2018, Theorem 8: the exact epsilon of one Gaussian release of sensitivity 1."""

    def excess(eps):
        return (
            norm.cdf(0.5 / noise - eps * noise) - math.exp(eps) * norm.cdf(-0.5 / noise - eps * noise) - delta
        )

    return brentq(excess, 0, 700)


@pytest.mark.parametrize(
    ("name", "spend", "published", "tolerance"),
    [
        ("rdp", SampledGaussian(0.04, 1.5, 2250), 7.3291, 3e-4),
        ("pld", SampledGaussian(0.04, 1.5, 2250), 6.769, 1e-3),
        ("rdp", SampledGaussian(0.01, 1.0, 10_000), 6.713, 1e-3),
        ("pld", SampledGaussian(0.01, 1.0, 10_000), 6.188, 1e-3),
    ],
)
def test_golden_values(name, spend, published, tolerance):
    assert epsilon(name, spend) == pytest.approx(published, abs=tolerance)


@pytest.mark.parametrize(
    ("noise", "steps"), [(5.0, 10), (0.7, 1), (40.0, 400), (100.0, 1), (0.2, 1), (0.1, 10)]
)
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-9])
def test_plain_gaussian_releases_cost_what_the_closed_form_says(noise, steps, delta):
    exact = gaussian_epsilon(noise / math.sqrt(steps), delta)
    assert exact <= epsilon("pld", SampledGaussian(1.0, noise, steps), delta=delta) <= exact * 1.001


@pytest.mark.parametrize(
    ("mean_shift", "steps", "delta"),
    [(1.0, 10_000, 5e-11), (0.3, 10_000, 1e-8), (3.0, 100_000, 4.5e-10), (1.0, 100_000, 1e-5)],
)
def test_rounding_in_long_compositions_never_takes_epsilon_below_the_truth(mean_shift, steps, delta):
    """At a rate this close to 1 the release is Gaussian, but it is composed step by step, numerically."""
    almost_one = 1 - 1e-10
    found = epsilon("pld", SampledGaussian(almost_one, math.sqrt(steps) / mean_shift, steps), delta=delta)
    exact = gaussian_epsilon(1 / mean_shift, delta)
    assert exact * (1 - 1e-7) <= found <= exact * 1.02


def test_a_delta_below_the_rounding_error_is_refused_with_the_remedy():
    with pytest.raises(PrivacyError, match='accountant="rdp"'):
        epsilon("pld", SampledGaussian(0.001, 1.0, 100_000), delta=1e-10)


def opacus(kind, spends):
    built = kind()
    built.history = [(s.noise_multiplier, s.sampling_rate, s.steps) for s in spends]
    return built


@pytest.mark.parametrize(
    "spends", [TWO_PHASES, (SampledGaussian(0.04, 1.5, 2250),), (SampledGaussian(0.01, 1.0, 10_000),)]
)
def test_pld_lies_between_the_bounds_of_the_prv_accountant_of_opacus(spends):
    prv = opacus(PRVAccountant, spends)._get_dprv(eps_error=0.01, delta_error=DELTA / 1000)
    lower, _, upper = prv.compute_epsilon(DELTA, DELTA / 1000, 0.01)
    assert lower <= epsilon("pld", *spends) <= upper


RATES = (5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
PLANS = list(itertools.product(RATES, (50, 300, 1000, 5000), (0.5, 1.0, 3.0, 8.0, 20.0)))


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.filterwarnings("ignore")
def test_calibrated_plans_never_exceed_their_target_by_the_prv_accountant_of_opacus():
    """220 plans: epsilon is at most the target, at least what PRV shows to be spent, and no more than 2 % above it.

    Plans that calibration refuses (noise of less than 0.1, which protects nobody) are left out; most are not.
    """
    assert len(PLANS) == 220
    compared = 0
    for rate, steps, target in PLANS:
        plan = Plan("dp-sgd", (Phase("train", steps, rate, 1.0),), units=10_000, steps_per_epoch=steps)
        try:
            found = calibrate(plan, target, DELTA)
        except PrivacyError:
            continue
        spent = plan_epsilon(found)
        assert 0.994 * target < spent <= target, (rate, steps, target, spent)
        prv = opacus(PRVAccountant, found.events())._get_dprv(eps_error=0.01, delta_error=DELTA / 1000)
        lower, _, upper = prv.compute_epsilon(DELTA, DELTA / 1000, 0.01)
        assert lower <= spent <= 1.02 * upper, (rate, steps, target, lower, spent, upper)
        compared += 1
    assert compared > 180


@pytest.mark.parametrize(("rate", "noise"), [(0.01, 0.5), (1.0, 0.05), (1 - 1e-10, 0.2), (0.99, 0.3)])
def test_divergences_of_one_step_are_exact_also_where_doubles_cancel_or_overflow(rate, noise):
    with mpmath.workdps(400):
        q, scale = mpmath.mpf(rate), mpmath.mpf(noise)

        def beyond(eps, sign):
            height = mpmath.expm1(sign * eps) + q
            if height <= 0:
                return 0 if sign < 0 else -mpmath.expm1(eps)
            x = 0.5 + scale**2 * mpmath.log(height / q)
            with_unit = q * mpmath.ncdf(sign * (1 - x) / scale)
            without = height * mpmath.ncdf(-sign * x / scale)
            return with_unit - without if sign > 0 else mpmath.exp(eps) * (without - with_unit)

        for sign, divergence in ((1, removal_divergence), (-1, addition_divergence)):
            asked = np.asarray([-750, -100, -20, -4, -1, 1, 4, 12, 20, 22, 30, 100, 200, 750], dtype=float)
            exact = np.asarray([float(beyond(mpmath.mpf(eps), sign)) for eps in asked])
            assert np.abs(divergence(rate, noise, asked) - exact).max() < 1e-14


@pytest.mark.parametrize(
    ("rate", "noise", "order"),
    [(0.5, 20.0, 1.1), (0.1, 0.6, 1.1), (0.9, 0.3, 1.5), (0.04, 1.5, 9.5), (1e-4, 1.0, 1.1)],
)
def test_fractional_renyi_divergences_are_the_integral_rounded_up_of_both_directions(rate, noise, order):
    """Against adaptive quadrature with forty digits: never below, and above by rounding alone."""
    with mpmath.workdps(40):
        q, scale = mpmath.mpf(rate), mpmath.mpf(noise)
        crossing = scale**2 * mpmath.log(1 / q - 1) + 0.5
        cuts = sorted([-40 * scale - 5, -5 * scale, 0, 1, crossing, order, order + 40 * scale + 5])

        def divergence(power):
            def moment(x):
                ratio = 1 - q + q * mpmath.exp((2 * x - 1) / (2 * scale**2))
                return mpmath.npdf(x, 0, scale) * ratio**power

            return mpmath.log(mpmath.quad(moment, cuts)) / (order - 1)

        exact = float(max(divergence(order), divergence(1 - order)))
    (found,) = renyi((SampledGaussian(rate, noise, 1),), (order,))
    assert 0 < found - exact < 1e-12 * (1 + exact)


@pytest.mark.parametrize("rate", [0.1, 0.2, 0.3, 0.5, 0.8])
@pytest.mark.parametrize(
    ("noise", "steps"), [(0.3, 1), (0.6, 1000), (1.0, 50), (1.0, 1000), (2.0, 1000), (5.0, 1000)]
)
def test_large_sampling_rates_cost_no_more_than_in_the_rdp_of_opacus(rate, noise, steps):
    spend = SampledGaussian(rate, noise, steps)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Optimal order is")
        found, _ = opacus(RDPAccountant, (spend,)).get_privacy_spent(delta=DELTA)
    assert epsilon("rdp", spend) <= found * (1 + 1e-6)
    assert epsilon("rdp", spend) == pytest.approx(found, rel=1e-3)


def test_the_renyi_cost_of_phases_is_the_sum_of_their_costs_in_any_order():
    parts = [renyi((spend._replace(steps=1),)) * spend.steps for spend in TWO_PHASES]
    assert np.allclose(renyi(TWO_PHASES), sum(parts), rtol=1e-12)
    assert np.array_equal(renyi(TWO_PHASES[::-1]), renyi(TWO_PHASES))


@pytest.mark.parametrize("spends", GRID)
def test_the_tight_conversion_is_that_of_the_library(spends):
    library = rdp_privacy_accountant.compute_epsilon(ORDERS, renyi(spends), DELTA)[0]
    assert epsilon("rdp", *spends) == pytest.approx(library, rel=1e-7)


def test_the_classic_conversion_is_theorem_4_1():
    """For Gaussians inf_alpha {alpha T / (2 s^2) + log(1/delta) / (alpha-1)} has a closed form."""
    noise, steps = 8.0, 20
    rate = steps / (2 * noise**2)
    exact = rate + 2 * math.sqrt(rate * math.log(1 / DELTA))
    assert exact <= epsilon("rdp-classic", SampledGaussian(1.0, noise, steps)) <= exact * 1.001


@pytest.mark.parametrize("spends", GRID)
def test_pld_is_at_most_rdp_and_tight_at_most_classic(spends):
    pld, tight, classic = (epsilon(name, *spends) for name in ("pld", "rdp", "rdp-classic"))
    assert 0 < pld <= tight <= classic


@pytest.mark.parametrize("spends", [*GRID, TWO_PHASES])
def test_the_quick_estimate_is_an_upper_bound_within_two_percent(spends):
    quick, real = ACCOUNTANTS["pld"].epsilon(spends, DELTA, coarse=True), epsilon("pld", *spends)
    assert real * (1 - 1e-6) <= quick <= real * 1.02


@pytest.mark.parametrize("name", ACCOUNTANTS)
def test_nothing_costs_nothing_and_no_noise_costs_everything(name):
    chosen = accountant(name)
    assert chosen.epsilon((), DELTA) == 0.0
    assert chosen.epsilon((SampledGaussian(0.0, 1.0, 5),), DELTA) == 0.0
    assert chosen.epsilon((SampledGaussian(0.1, 1.0, 5), SampledGaussian(0.1, 0.0, 1)), DELTA) == math.inf


@pytest.mark.parametrize("name", ACCOUNTANTS)
def test_a_delta_outside_its_range_is_refused(name):
    for delta in (0.0, 1.0, -1e-5, math.nan):
        with pytest.raises(PrivacyError, match="delta"):
            accountant(name).epsilon(TWO_PHASES, delta)


@pytest.mark.parametrize("name", ACCOUNTANTS)
def test_the_curve_agrees_with_accounting_for_every_prefix_and_ends_at_epsilon(name):
    parts = (
        Phase("statistics", 1, 1.0, 1.0, 30.0, trains=False),
        Phase("warm-up", 60, 0.05, 1.0, 2.0),
        Phase("main", 130, 0.05, 1.0, 1.5),
    )
    plan = Plan("tp-topk", parts, units=1000, steps_per_epoch=20, delta=DELTA)
    curve = epsilon_by_epoch(plan, name)
    assert len(curve) == 10
    assert list(curve) == sorted(curve)
    assert curve[-1] == plan_epsilon(plan, name)
    for found, steps in zip(curve, plan.epoch_ends(), strict=True):
        direct = ACCOUNTANTS[name].epsilon(plan.events(steps), DELTA)
        assert direct * (1 - 2e-4) <= found <= direct * 1.005
    assert epsilon_by_epoch(plan.with_noise({"main": 0.0}), name) == (math.inf,) * 10


def test_the_library_underneath_writes_no_log(capfd, caplog):
    little_noise = SampledGaussian(0.5, 0.61, 3)
    with caplog.at_level(logging.DEBUG):
        dp.rdp.RdpAccountant().compose(dp_event((little_noise,)))
        assert "failed to converge" in caplog.text
        caplog.clear()
        capfd.readouterr()
        for name in ACCOUNTANTS:
            epsilon(name, little_noise)
        logging.getLogger("absl").warning("someone else's")
    assert caplog.messages == ["someone else's"]
    assert "converge" not in "".join(capfd.readouterr())
