import json

import pytest

from sparsedp.errors import SparseDPError
from sparsedp_experiments.theory.nonprivate import Figure, Line, NonPrivate, write_nonprivate


def test_what_follows_from_a_marked_value_is_marked_with_all_it_touched():
    a, b = NonPrivate(2.0, "gradients of 8 rows"), NonPrivate(3.0, "the loss of 5 rows")
    assert a.map(lambda x: x + 1) == NonPrivate(3.0, "gradients of 8 rows")
    product = a.join(b, lambda x, y: x * y)
    assert product.value == 6.0
    assert "gradients of 8 rows" in product.touched
    assert "the loss of 5 rows" in product.touched
    assert a.join(a, lambda x, y: x - y).touched == a.touched


def test_a_marked_value_does_not_pass_for_a_number():
    with pytest.raises(TypeError):
        float(NonPrivate(2.0, "gradients"))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        NonPrivate(2.0, "gradients") + 1  # type: ignore[operator]


def test_a_mark_that_says_nothing_is_refused():
    with pytest.raises(SparseDPError, match="touched"):
        NonPrivate(1.0, "  ")


def test_the_file_carries_every_banner_in_the_form_the_report_reads(tmp_path):
    marked = NonPrivate(0.25, "gradients of 8 rows")
    curve = marked.map(
        lambda _: Figure("Energy", "share", "energy", [Line("top", [0, 1], [0, 1])], "A note.")
    )
    path = write_nonprivate(tmp_path, {"capture": marked}, [curve])
    document = json.loads(path.read_text())
    assert path.name == "nonprivate.json"
    assert document["values"] == [{"name": "capture", "value": 0.25, "note": marked.banner}]
    assert marked.banner in document["figures"][0]["note"]
    assert document["figures"][0]["series"] == [{"name": "top", "x": [0.0, 1.0], "y": [0.0, 1.0]}]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_and_nothing_is_written(tmp_path, bad):
    with pytest.raises(SparseDPError, match="finite"):
        write_nonprivate(tmp_path, {"x": NonPrivate(bad, "gradients")})
    assert list(tmp_path.iterdir()) == []


def test_lines_of_unequal_length_are_refused(tmp_path):
    figure = NonPrivate(Figure("t", "x", "y", [Line("l", [0, 1], [0])]), "gradients")
    with pytest.raises(SparseDPError, match="as many"):
        write_nonprivate(tmp_path, {}, [figure])
