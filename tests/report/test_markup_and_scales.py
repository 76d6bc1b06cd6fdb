"""The pieces charts are made of."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsedp.report.frame import LETTER, ticks_that_fit
from sparsedp.report.markup import Html, join, plain, tag
from sparsedp.report.numbers import significant
from sparsedp.report.scale import linear_axis, round_step, symmetric_log_axis
from sparsedp_experiments.comparison.interval_chart import Interval, interval_chart

numbers = st.floats(-1e9, 1e9, allow_nan=False, width=64)
printable = st.text(st.characters(exclude_categories=["Cs", "Cc"]))


class Parsed(HTMLParser):
    """What a browser would read."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


@given(printable, printable)
def test_any_text_and_attribute_comes_back_as_it_was_given(text, value):
    read = Parsed(tag("p", {"title": value}, text).text)
    assert (read.tags, read.attributes, read.text) == (["p"], [("title", value)], text)


def test_markup_is_escaped_once_and_only_where_it_is_text():
    inner = tag("b", None, "a & b")
    assert join("<", inner, ["x", None, 3]).text == "&lt;<b>a &amp; b</b>x3"
    assert tag("br").text == "<br/>"
    assert tag("button", {"hidden": True, "disabled": False, "id": None}).text == "<button hidden></button>"
    assert tag("p", None, Html("<i>done</i>")).text == "<p><i>done</i></p>"


@given(numbers)
def test_plain_numbers_have_two_decimals_at_most_and_no_negative_zero(value):
    text = plain(value)
    assert math.isclose(float(text), value, rel_tol=1e-12, abs_tol=0.00501)
    assert "e" not in text
    assert text != "-0"


@given(numbers, numbers, st.booleans())
def test_a_linear_axis_covers_its_values_with_few_rising_round_ticks(one, other, whole):
    low, high = min(one, other), max(one, other)
    axis = linear_axis("x", low, high, whole=whole)
    slack = 1e-6 * (axis.high - axis.low)
    assert axis.low <= low + slack
    assert axis.high >= high - slack
    assert 2 <= len(axis.ticks) <= 12
    assert list(axis.ticks) == sorted(axis.ticks)
    assert axis.place(axis.low, 10, 110) == pytest.approx(10)
    assert axis.place(axis.high, 10, 110) == pytest.approx(110)


@given(st.floats(1e-12, 1e12))
def test_a_step_is_round_and_just_large_enough(rough):
    step = round_step(rough)
    assert step >= rough * (1 - 1e-6)
    assert step <= 2.51 * rough
    mantissa = float(f"{step:e}".split("e")[0])
    assert mantissa in (1.0, 2.0, 2.5, 5.0)


@given(st.floats(1e-9, 1e3), st.floats(1e-9, 1e6), st.floats(1e-9, 1.0))
def test_a_symmetric_log_axis_is_monotone_and_marks_zero(below, above, unit):
    axis = symmetric_log_axis("score", -below, above, unit)
    values = [-below, -below / 3, 0.0, above / 7, above]
    places = [axis.place(value, 0, 100) for value in values]
    assert places == sorted(places)
    assert 0.0 in axis.ticks


@given(st.floats(1e-9, 1e3), st.floats(50, 600))
def test_ticks_that_are_drawn_do_not_overlap(above, room):
    axis = symmetric_log_axis("score", -above, above * 50, above / 9)
    kept = ticks_that_fit(axis, room)
    edges = [
        (
            axis.place(v, 0, room) - LETTER * len(axis.text(v)) / 2,
            axis.place(v, 0, room) + LETTER * len(axis.text(v)) / 2,
        )
        for v in kept
    ]
    assert 0.0 in kept
    assert all(one[1] <= other[0] for one, other in pairwise(edges))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1e-5, "1e-5"),
        (1.36449, "1.36"),
        (20480.0, "20,480"),
        (-2.5e-7, "-2.5e-7"),
        (math.inf, "∞"),
    ],
)
def test_numbers_read_as_people_write_them(value, text):
    assert significant(value) == text


def test_an_interval_beyond_the_axis_is_cut_without_an_end_mark():
    axis = linear_axis("accuracy", 0.6, 1.0)
    row = Interval("a", (0.8, 0.9), 0.85, 0.2, 0.95, "m0", "")
    drawn = interval_chart(520, axis, [row], "alt").text
    ends = [float(x) for x in re.findall(r'<line x1="([\d.]+)"[^>]*class="cap', drawn)]
    left, right = re.search(r'<line x1="([\d.]+)" x2="([\d.]+)"[^>]*class="whisker', drawn).groups()
    assert len(ends) == 1
    assert float(right) == ends[0]
    assert float(left) == pytest.approx(14 + LETTER, abs=0.01)
    both = interval_chart(520, axis, [Interval("a", (), 0.85, 0.7, 0.95, "m0", "")], "alt").text
    assert both.count('class="cap') == 2
