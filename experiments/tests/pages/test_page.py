"""The results page: made from the records as they are, with the better arm on top whatever the metric."""

import pytest
from handmade import make_study

from sparsedp_experiments.runs.claims import Evidence, parts_of
from sparsedp_experiments.runs.grid import RESULTS, committed_families
from sparsedp_experiments.runs.page import PAGE, best_choices, gains, page, surviving
from sparsedp_experiments.runs.results import Estimate, estimate, read_rows, verdict
from sparsedp_experiments.runs.tables import read_studies, results_table

LEVEL = {"dp-sgd": 0.5, "tp-rand": 0.3, "tp-topk": 0.4}


@pytest.fixture(scope="module")
def studies():
    return read_studies()


def by_method(cell, seed):
    return LEVEL[cell["method"]] + 0.001 * seed


def test_the_committed_page_is_made_of_the_committed_records(studies):
    assert PAGE.read_text(encoding="utf-8") == page(studies)


def test_every_record_of_a_grid_is_found_by_todays_settings(studies):
    """Digests are stable: renaming a setting would orphan the records."""
    names = set(committed_families())
    known = {record["config_hash"] for study in studies.values() for record in study.records}
    rows = (row for file in RESULTS.glob("*.jsonl") for row in read_rows(file) if "cell" in row)
    found = [row for row in rows if row["experiment"] in names]
    orphans = [row["experiment"] for row in found if row["config_hash"] not in known]
    assert len(found) > 3000
    assert {name for name in orphans if not studies[name].stale} == set()
    assert sum(len(study.stale) for study in studies.values()) == len(orphans)


@pytest.mark.parametrize(("metric", "sign"), [("accuracy", 1), ("loss", -1)])
def test_less_loss_is_better(tmp_path, metric, sign):
    lines = [
        'title = "t"',
        "seeds = 3",
        f'metric = "{metric}"',
        "[base]",
        'dataset = "mnist"',
        "epsilon = 1.0",
    ]
    content = "\n".join([*lines, "[grid]", 'method = ["dp-sgd", "tp-rand", "tp-topk"]'])
    study = make_study(tmp_path, by_method, content=content)
    evidence = Evidence("small", ({"method": "tp-topk"},), ({"method": "tp-rand"},))
    (part,) = parts_of(evidence, study, metric)
    assert part.values[0] == pytest.approx(sign * 0.1)
    ((best, count),) = best_choices(study, ["dataset"]).values()
    assert (best.cell["method"], count) == ("dp-sgd" if sign > 0 else "tp-rand", 3)
    assert all(gain.mean * sign < 0 for gain in gains([study]))
    assert verdict(Estimate(3, 0.1, 0.01, 0.05, 0.15), metric) == ("better" if sign > 0 else "worse")


def test_a_row_has_mean_paired_difference_epsilon_and_settings_that_differ(tmp_path):
    lines = results_table(make_study(tmp_path, by_method))
    assert lines[0].startswith(
        "| epsilon | method | seeds | accuracy, % | less dp-sgd | epsilon spent | r | settings"
    )
    assert any("| 1 | tp-topk | 3 | 40.10 ± 0.10 | −10.00 (−10.00 to −10.00) |" in line for line in lines)
    assert any("lr 2" in line for line in lines)


def test_holms_correction_keeps_only_what_all_looks_together_allow():
    clear, weak = estimate([1.0, 1.01, 1.02]), estimate([0.1, 1.0, 0.4])
    judged = [(object(), clear), *((object(), weak) for _ in range(10))]
    assert surviving(judged) == judged[:1]
