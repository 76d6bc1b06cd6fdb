import math
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsedp._validate import exact_ratio
from sparsedp.errors import SparseDPError
from sparsedp.methods.schedules import Constant, Cooling, EverySteps, Listed, PerEpoch, Release, active_count


def ratios(schedule, periods, target):
    return [schedule.ratio(period, periods, Fraction(repr(target))) for period in range(periods)]


def test_cooling_runs_linearly_from_one_to_the_active_ratio():
    assert ratios(Cooling(), 5, 0.2) == [1, Fraction(4, 5), Fraction(3, 5), Fraction(2, 5), Fraction(1, 5)]


def test_cooling_over_a_single_period_is_the_active_ratio():
    assert ratios(Cooling(), 1, 0.2) == [Fraction(1, 5)]


def test_release_starts_at_the_active_ratio_and_its_last_value_stays():
    assert ratios(Release((0.25, 0.5)), 5, 0.2) == [Fraction(x) for x in ("1/5", "1/4", "1/2", "1/2", "1/2")]
    assert ratios(Release(), 3, 0.6) == [Fraction(3, 5)] * 3


def test_release_never_goes_below_an_automatic_ratio():
    assert ratios(Release((0.3, 0.5)), 3, 0.4) == [Fraction(2, 5), Fraction(2, 5), Fraction(1, 2)]


def test_constant_and_listed():
    assert ratios(Constant(), 3, 0.3) == [Fraction(3, 10)] * 3
    assert ratios(Listed((1.0, 0.1, 0.7)), 5, 0.3) == [
        Fraction(x) for x in ("1", "1/10", "7/10", "7/10", "7/10")
    ]


@given(st.integers(1, 60), st.integers(1, 1000))
def test_cooling_agrees_with_the_papers_formula_and_never_rises(periods, thousandths):
    target = thousandths / 1000
    values = ratios(Cooling(), periods, target)
    assert values == sorted(values, reverse=True)
    assert values[-1] == Fraction(thousandths, 1000)
    for e, value in enumerate(values):
        r = (1 - target) * (e / (periods - 1) if periods > 1 else 1)
        assert float(value) == pytest.approx(1 - r, abs=1e-12)


@given(st.decimals("0.0001", "1", places=4), st.integers(10_000, 10_000_000))
def test_the_active_count_is_the_floor_of_the_decimal_product(ratio, dimension):
    assert active_count(exact_ratio(float(ratio)), dimension) == int(Decimal(ratio) * dimension)


def test_the_active_count_does_not_lose_one_to_rounding():
    assert math.floor(0.29 * 100) == 28
    assert active_count(exact_ratio(0.29), 100) == 29
    assert active_count(exact_ratio(0.3), 39_700) == 11_910
    assert active_count(Fraction(7, 23), 23) == 7
    assert active_count(exact_ratio(0.3 - 1e-12), 10**6) == 299_999


@given(st.integers(1, 10_000_000).flatmap(lambda d: st.tuples(st.integers(1, d), st.just(d))))
def test_a_ratio_computed_as_k_over_d_keeps_k(pair):
    k, d = pair
    assert active_count(exact_ratio(k / d), d) == k


def test_ratios_outside_zero_to_one_and_empty_supports_are_refused():
    for bad in (0, -0.1, 1.1, float("nan"), True, "0.2", None):
        with pytest.raises(SparseDPError, match="active_ratio: got"):
            exact_ratio(bad)
    with pytest.raises(SparseDPError, match="of d=100 coordinates is none"):
        active_count(exact_ratio(0.009), 100)
    with pytest.raises(SparseDPError, match="never fall"):
        Release((0.5, 0.4))
    with pytest.raises(SparseDPError, match="at least one"):
        Listed(())
    with pytest.raises(SparseDPError, match=r"listed schedule: got 0\.0"):
        Listed((0.5, 0.0))


def test_periods_per_epoch_start_where_equal_parts_of_the_epoch_do():
    assert PerEpoch().starts(steps=10, steps_per_epoch=4) == (0, 4, 8)
    assert PerEpoch(2).starts(steps=10, steps_per_epoch=5) == (0, 3, 5, 8)
    assert PerEpoch(3).starts(steps=7, steps_per_epoch=7) == (0, 3, 5)
    assert PerEpoch(3).starts(steps=3, steps_per_epoch=7) == (0,)
    assert EverySteps(4).starts(steps=10, steps_per_epoch=5) == (0, 4, 8)


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 40))
def test_every_epoch_has_exactly_the_asked_number_of_periods_of_nearly_equal_length(per_epoch, epochs, steps):
    if per_epoch > steps:
        with pytest.raises(SparseDPError, match="at most one period per step"):
            PerEpoch(per_epoch).starts(steps * epochs, steps)
        return
    starts = PerEpoch(per_epoch).starts(steps * epochs, steps)
    assert len(starts) == per_epoch * epochs
    ends = [*starts[1:], steps * epochs]
    lengths = {end - start for start, end in zip(starts, ends, strict=True)}
    assert lengths <= {steps // per_epoch, -(-steps // per_epoch)}
    assert set(range(0, steps * epochs, steps)) <= set(starts)


def test_clocks_refuse_nonsense():
    for bad in (0, -1, 1.5, True):
        with pytest.raises(SparseDPError, match="whole number >= 1"):
            PerEpoch(bad)
        with pytest.raises(SparseDPError, match="whole number >= 1"):
            EverySteps(bad)
