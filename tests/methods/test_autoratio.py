"""The automatic ratio: r by hand on both sides, and the support it gives."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from method_tools import layout_of, run

from sparsedp.methods.autoratio import QUIET, quiet_count
from sparsedp.methods.method import AUTO
from sparsedp.methods.options import MethodOptions
from sparsedp.methods.table import get_method


@given(st.floats(1e-4, 3), st.integers(1, 10**6), st.integers(0, 1000))
def test_as_many_as_stay_quiet_and_not_one_more(noise, ranked, always):
    count = quiet_count(noise, ranked, always)
    assert 1 <= count <= ranked
    if count > 1:
        assert noise * math.sqrt(count + always) <= QUIET * (1 + 1e-9)
    if count < ranked:
        assert noise * math.sqrt(count + 1 + always) > QUIET * (1 - 1e-9)


def test_without_noise_all_are_active():
    assert quiet_count(0.0, 123) == 123


@pytest.mark.parametrize(("noise", "kept"), [(0.5, 64), (2.0, 4), (0.01, 100), (50.0, 1)])
def test_a_run_keeps_what_the_main_phases_noise_allows(noise, kept):
    """Batches of 10 and a clip norm of 1: the noise on the mean is noise/10, so r on k is noise sqrt(k)/10 <= 0.4."""
    done = run(get_method("tp-topk"), MethodOptions(active_ratio=AUTO), layout=layout_of((100,)), noise=noise)
    assert done.settings[-1].support.size == kept


@pytest.mark.parametrize("method", ["on-rand", "on-topk", "ranked", "given"])
def test_no_warm_up_is_needed_as_r_is_public(method):
    done = run(get_method(method), MethodOptions(active_ratio=AUTO), layout=layout_of((100,)), noise=0.5)
    assert done.settings[-1].support.size == 64


def test_what_is_always_active_counts():
    options = MethodOptions(active_ratio=AUTO, always=("p1",))
    done = run(get_method("tp-topk"), options, layout=layout_of((100,), (10,)), noise=1.0)
    assert done.settings[-1].support.size == 16
