"""Tables in the guides, by hand-made records."""

from handmade import make_study

from sparsedp_experiments.audits.table import END
from sparsedp_experiments.pages.grids import START, arms_by_epsilon, with_grids
from sparsedp_experiments.tabular import ROOT
from sparsedp_experiments.runs.tables import read_studies

SCORES = {"dp-sgd": (0.70, 0.72, 0.71), "tp-rand": (0.71, 0.73, 0.72), "tp-topk": (0.70, 0.73, 0.73)}


def score(cell, seed):
    return SCORES[cell["method"]][seed] if cell["epsilon"] == "1" or cell["method"] == "dp-sgd" else None


def test_a_cell_has_its_mean_and_the_interval_of_the_difference(tmp_path):
    heading, _, dense, rand, topk = arms_by_epsilon(make_study(tmp_path, score))
    assert heading == "| method | epsilon 1 | epsilon 3 |"
    assert dense == "| dp-sgd | 71.00 | 71.00 |"
    assert rand == "| tp-rand | 72.00 (+1.00 to +1.00) | – |"
    assert topk == "| tp-topk | 72.00 (−1.48 to +3.48) | – |"  # 4.303 * sqrt(1 / 3) = 2.484


def test_tables_stand_between_marks_that_name_their_experiment(tmp_path):
    study = make_study(tmp_path, score)
    page = f"before\n{START.format('small')}\nold\n{END}\n{START.format('other')}\nkept\n{END}\nafter"
    written = with_grids(page, {"small": study})
    assert "old" not in written
    assert "| tp-rand | 72.00" in written
    assert "kept" in written
    assert with_grids(written, {"small": study}) == written


def test_every_marked_table_of_the_guide_is_of_an_experiment_with_records():
    page = (ROOT / "docs" / "fine-tuning.md").read_text(encoding="utf-8")
    studies = read_studies(ROOT)
    names = [line.split()[3].rstrip(":") for line in page.splitlines() if line.startswith("<!-- arms of ")]
    assert names
    assert all(studies[name].rows for name in names)
