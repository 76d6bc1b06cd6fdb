"""The gallery: drawn from records alone, the same every time, and up to date."""

import base64
import io
import re
import xml.etree.ElementTree as ElementTree
from functools import cache

import numpy as np
import pytest
from PIL import Image

from sparsedp.errors import SparseDPError
from sparsedp_experiments.figures.canvas import (
    BLUE,
    GREY,
    key,
    legend,
    powers,
    seeded,
    shares,
    sheet,
    upright,
    written,
)
from sparsedp_experiments.figures.study import load_studies
from sparsedp_experiments.figures.page import FOLDER, drawn, page, whole
from sparsedp_experiments.figures.plots import PLOTS, attack
from sparsedp_experiments.runs.grid import CONFIGS
from sparsedp_experiments.figures.run import DOCS, STORE
from sparsedp_experiments.runs.settings import TEXT
from sparsedp_experiments.runs.table_rates import TABLES
from sparsedp_experiments.figures.tables import markdown
from sparsedp_experiments.data.encoding import MISSING
from sparsedp_experiments.figures.words import filled, short, with_interval

STUDIES = load_studies(CONFIGS)
RECORDS = whole(STUDIES, STORE)
NAMES = sorted(file.name for file in (DOCS / FOLDER).glob("*.svg"))


@cache
def made() -> dict[str, str]:
    return drawn(RECORDS)


def test_the_page_and_its_figures_are_up_to_date_with_the_records():
    """If this fails, run `make figures`, or `python -m sparsedp_experiments.figures.run draw` without the data."""
    assert (DOCS / "gallery.md").read_text() == page(TEXT.read_text(), RECORDS)
    assert set(NAMES) == set(made())
    for name, svg in made().items():
        assert (DOCS / FOLDER / name).read_text() == svg, name


def test_drawing_again_gives_the_same_bytes():
    for name in ("inversion-pictures", "misranking", "wire"):
        assert PLOTS[name].draw(RECORDS) == made()[f"{name}.svg"]
    assert page(TEXT.read_text(), RECORDS) == page(TEXT.read_text(), RECORDS)


@pytest.mark.parametrize("name", NAMES)
def test_a_figure_is_well_formed_says_what_it_shows_and_is_small(name):
    root = ElementTree.fromstring(made()[name])
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(root.attrib["aria-label"]) > 20
    assert "prefers-color-scheme:dark" in made()[name]
    assert len(made()[name].encode()) < 200_000
    assert not re.search(r"\bnan\b|\binf\b", made()[name])


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


def test_pictures_show_the_pixels_of_the_records():
    found = next(record for record in RECORDS["inversion"] if record["picture"])
    pixels = np.frombuffer(base64.b64decode(found["picture"]), np.uint8).reshape(found["shape"][-2:])
    packed = re.search(r'href="data:image/png;base64,\s*([^"]*)"', made()["inversion-pictures.svg"])[1]
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(packed))).convert("L"))
    height, width = pixels.shape
    assert np.array_equal(shown[:height, :width], pixels)
    assert (shown[height : height + attack._GAP] == 255).all()


def test_bands_are_student_intervals_over_seeds():
    _, (axes,) = sheet(1, 1)
    seeded(axes, [0.0, 1.0], [[0.0, 1.0], [2.0, 1.0]], BLUE)
    assert list(axes.lines[0].get_ydata()) == [1.0, 1.0]
    corners = axes.collections[0].get_paths()[0].vertices
    assert corners[:, 1].min() == pytest.approx(1 - 12.706, abs=1e-3)
    assert corners[:, 1].max() == pytest.approx(1 + 12.706, abs=1e-3)
    seeded(axes, [0.0], [[3.0]], GREY)
    assert len(axes.collections) == 1  # one seed has no interval


def test_axes_write_powers_and_percent():
    _, (axes,) = sheet(1, 1)
    powers(axes, "y", -3, 0)
    shares(axes, "x", 0.01, 1.0, (0.05, 1.0))
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["10⁻³", "10⁻²", "10⁻¹", "10⁰"]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["5%", "100%"]


def test_a_legend_takes_the_rows_it_needs_and_makes_room_for_them():
    tall = []
    for letters in (5, 60):
        figure, _ = sheet(1, 1)
        legend(figure, [key("k" * letters, BLUE), key("m" * letters, GREY)])
        tall.append(round(72 * figure.get_size_inches()[1]))
    assert tall == [236 + 16 + 12, 236 + 2 * 16 + 12]


def test_colours_are_variables_and_text_is_text():
    figure, (axes,) = sheet(1, 1)
    powers(axes, "x", -3, 0)
    upright(axes, 0.5, "a < b", 0)
    text = written(figure, 'said with "quotes"')
    root = ElementTree.fromstring(text)
    assert root.attrib["aria-label"] == 'said with "quotes"'
    assert "a &lt; b" in text
    assert "<metadata" not in text
    style, _, rest = text.partition("</style>")
    assert "#59636f" in style
    assert "#59636f" not in rest
    assert "var(--c3)" in rest
