"""The gallery: drawn from records alone, the same every time, and up to date."""

import base64
import re
import struct
import xml.etree.ElementTree as ElementTree
import zlib

import pytest
from studies.figures.config import load_studies
from studies.figures.drawing.marks import Bar, Cloud, Curve, Level, Upright, Whisker, seeded
from studies.figures.drawing.png import data_address, grey_png
from studies.figures.drawing.sheet import Key, Panel, log10, powers, shares, sheet
from studies.figures.page import FOLDER, drawn, page, whole
from studies.figures.plots import PLOTS
from studies.figures.run import CONFIGS, DOCS, STORE, TEXT
from studies.figures.tables import TABLES, markdown
from studies.figures.words import MISSING, filled, short, with_interval

from sparsedp.core.errors import SparseDPError
from sparsedp.report.frame import Frame
from sparsedp.report.scale import Axis

STUDIES = load_studies(CONFIGS)
RECORDS = whole(STUDIES, STORE)
MADE = drawn(RECORDS)


def test_the_page_and_its_figures_are_up_to_date_with_the_records():
    """If this fails, run `make figures`, or `python -m studies.figures.run draw` without the data."""
    assert (DOCS / "gallery.md").read_text() == page(TEXT.read_text(), RECORDS)
    assert {file.name for file in (DOCS / FOLDER).glob("*.svg")} == set(MADE)
    for name, svg in MADE.items():
        assert (DOCS / FOLDER / name).read_text() == svg, name


def test_drawing_again_gives_the_same_bytes():
    assert drawn(RECORDS) == MADE
    assert page(TEXT.read_text(), RECORDS) == page(TEXT.read_text(), RECORDS)


@pytest.mark.parametrize("name", sorted(MADE))
def test_a_figure_is_well_formed_says_what_it_shows_and_is_small(name):
    root = ElementTree.fromstring(MADE[name])
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(root.attrib["aria-label"]) > 20
    assert "prefers-color-scheme:dark" in MADE[name]
    assert len(MADE[name].encode()) < 200_000
    assert not re.search(r"\bnan\b|\binf\b", MADE[name])


def test_figures_that_cannot_be_drawn_yet_are_said_to_be_missing():
    nothing = {name: [] for name in RECORDS}
    assert drawn(nothing) == {}
    text = page(" ".join(f"{{{{figure {name}}}}}" for name in PLOTS), nothing)
    assert text.count("Not measured yet") == len(PLOTS)
    assert all(table(nothing) == "*Not measured yet.*" for table in TABLES.values())


def test_a_text_that_names_what_is_not_there_is_refused():
    every = " ".join(f"{{{{figure {name}}}}}" for name in PLOTS)
    for text in ("{{figure nothing}}", "{{table nothing}}", "{{nothing at all}}"):
        with pytest.raises(SparseDPError, match="there are"):
            page(f"{every} {text}", RECORDS)
    with pytest.raises(SparseDPError, match="shows no"):
        page(every.replace("{{figure wire}}", ""), RECORDS)


def test_words_take_numbers_from_the_records():
    record = {"point": {"epsilon": 1, "seed": 0}, "a": {"b": [0.25, 7]}, "c": 2.0}
    other = {**record, "point": {"epsilon": 1, "seed": 1}, "c": 4.0}
    records = {"toy": [record, other]}
    assert filled("x {{value toy epsilon1-seed0 a.b.0}} y", records) == "x 0.250 y"
    assert filled("{{value toy epsilon1-seed0 a.b.1}}", records) == "7"
    assert filled("{{value toy epsilon1-seed9 c}}", records) == MISSING
    assert filled("{{field toy 1 c}}", records) == "3 (-9.71 to 15.7)"
    assert filled("{{field toy 1 nothing}}", records) == MISSING


def test_numbers_are_short_and_intervals_need_two_values():
    assert [short(0.9984), short(12345.0), short(0.001234)] == ["0.998", "12,345", "0.00123"]
    assert with_interval([0.5]) == "0.500"
    assert with_interval([0.4, 0.6]) == "0.500 (-0.771 to 1.77)"
    assert markdown(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_a_png_holds_the_pixels_it_was_made_from():
    pixels = bytes(range(12))
    png = grey_png(pixels, 4, 3)
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", png[16:24]) == (4, 3)
    start = png.index(b"IDAT")
    length = struct.unpack(">I", png[start - 4 : start])[0]
    raw = zlib.decompress(png[start + 4 : start + 4 + length])
    assert [raw[5 * row + 1 : 5 * row + 5] for row in range(3)] == [pixels[:4], pixels[4:8], pixels[8:]]
    assert base64.b64decode(data_address(png).split(",")[1]) == png
    with pytest.raises(ValueError, match="4 x 4"):
        grey_png(pixels, 4, 4)


def test_marks_stay_inside_the_axes():
    axis = Axis("", 0.0, 1.0, (0.0, 1.0))
    frame = Frame(120, 100, 20, axis, axis)
    marks = (
        Curve([(0, -5), (1, 5)], "c1", low=(-9, 0), high=(0, 9), dots=True), Cloud([(0.5, 0.5), (7, 7)], "c1"),
        Whisker(0.5, 3, -2, 9, "c1"), Level(4, "four"), Upright(-3, "left"), Bar(0.5, 0.2, 9, "c1", "high"),
    )  # fmt: skip
    for mark in marks:
        text = sheet("a long enough text for those who see", [Panel("p", axis, axis, [mark])], columns=1)
        for x, y in re.findall(r'c?x1?="([\d.-]+)"[^>]*c?y1?="([\d.-]+)"', text):
            assert -1 <= float(x) <= 400
            assert -1 <= float(y) <= 300
    (cloud,) = marks[1].draw(frame)
    assert cloud.text.count("M") == 1  # of two dots one is outside


def test_bands_are_student_intervals_over_seeds():
    curve = seeded([0.0, 1.0], [[0.0, 1.0], [2.0, 1.0]], "c1")
    assert [y for _, y in curve.points] == [1.0, 1.0]
    assert curve.low[0] == pytest.approx(1 - 12.706, abs=1e-3)
    assert curve.high[1] == pytest.approx(1.0)
    assert seeded([0.0], [[3.0]], "c1").low == ()


def test_axes_write_powers_and_percent():
    assert powers("", -3, 0).text(-3.0) == "10⁻³"
    assert shares("").text(log10(0.05)) == "5%"
    assert log10(0.0) == -30
    two = sheet("two keys that need two lines", [], [Key("k" * 60, "c1"), Key("m" * 60, "c2")], columns=1)
    assert len({y for y in re.findall(r'<line [^>]*y1="([\d.]+)"', two)}) == 2
