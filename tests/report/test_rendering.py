"""Templates escape text, refuse what is missing, and add no white space."""

from __future__ import annotations

import re

import pytest
from jinja2 import UndefinedError

from sparsedp.report.figure import Legend, Table, badge, banner, card, code, figure, folded
from sparsedp.report.markup import tag
from sparsedp.report.page import Page, Section
from sparsedp.report.rendering import render

NASTY = "<script>alert('x')</script> & \"y\""


def test_text_is_escaped_wherever_it_goes_and_markup_is_not() -> None:
    table = Table((NASTY, NASTY), ((NASTY, tag("b", None, NASTY)),))
    drawn = tag("svg", None)
    page = Page(
        title=NASTY,
        subtitle=NASTY,
        head=[badge(NASTY, NASTY), banner(NASTY), None],
        sections=[
            Section(
                "a",
                NASTY,
                [
                    figure(NASTY, lambda width: drawn, NASTY, table, Legend(((NASTY, NASTY),))),
                    card(NASTY, NASTY, code(NASTY, NASTY), folded(NASTY, NASTY)),
                ],
                lead=NASTY,
            )
        ],
        footer=NASTY,
    ).html()
    assert "alert('x')" not in page.replace("&lt;script&gt;alert('x')&lt;/script&gt;", "")
    assert page.count("<script>") == 1
    assert page.count("<svg></svg>") == 2
    assert "<b>&lt;script&gt;" in page
    attributes = re.findall(r'="[^"]*alert[^"]*"', page)
    assert attributes
    assert all(re.fullmatch(r'="[^<>"]*"', one) for one in attributes)


def test_a_missing_value_is_an_error_and_no_hole_in_the_page() -> None:
    with pytest.raises(UndefinedError, match="'page' is undefined"):
        render("page.html", policy="", style="", script="")


def test_line_breaks_of_templates_are_not_written() -> None:
    page = Page("t", "s", None, [Section("a", "b", "c")], "f").html()
    outside = re.sub(r"<(style|script)>.*?</\1>", "", page, flags=re.DOTALL)
    assert outside.count("\n") == 2
    assert "> <" not in outside
    assert card(None, "x").text == '<div class="card">x</div>'
