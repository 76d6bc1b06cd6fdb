"""Pages made from records: what stands in them, with any number of records, and that the committed ones are fresh."""

import re
import xml.etree.ElementTree as ET

import pytest
from handmade import CONFIG, make_study, record_of

from sparsedp_experiments.runs.results import estimate
from sparsedp_experiments.pages import noise
from sparsedp_experiments.runs.page import PAGE
from sparsedp_experiments.pages.__main__ import made_files, out_of_date
from sparsedp_experiments.pages.chart import layout_of, picture
from sparsedp_experiments.runs.tables import context_tables
from sparsedp_experiments.pages.page import page
from sparsedp_experiments.runs.tables import number_for, read_paper
from sparsedp_experiments.pages.readme import results
from sparsedp_experiments.pages.section import results_table
from sparsedp_experiments.runs.tables import section
from sparsedp_experiments.tabular import ROOT
from sparsedp_experiments.runs.tables import read_studies, read_study
from sparsedp_experiments.runs.page import best_choices, tuning_section
from sparsedp_experiments.runs.tables import JPEG, difference_text, mean_text, signed
from sparsedp_experiments.runs.grid import read_experiment
from sparsedp_experiments.runs.results import Results, append_row

LEVEL = {"dp-sgd": 0.80, "tp-rand": 0.81, "tp-topk": 0.85}
TABLE2 = "tp-topk-table2-mnist"


def steady(cell, seed):
    return LEVEL[cell["method"]] + 0.01 * seed


def first_seed(cell, seed):
    return steady(cell, seed) if seed == 0 and cell["epsilon"] == "1" else None


@pytest.fixture
def root(tmp_path):
    """A folder like the repository, with the noise that takes long to compute."""
    (tmp_path / noise.FILE).parent.mkdir(parents=True)
    (tmp_path / noise.FILE).write_bytes((ROOT / noise.FILE).read_bytes())
    return tmp_path


def text_of(study):
    return "\n".join(section(study, tuning=(), picture=None))


def test_everything_is_up_to_date_with_the_records():
    assert out_of_date() == [], "run: make results"


def test_numbers_read_as_the_pages_write_them():
    found = estimate([0.80, 0.81, 0.82])
    assert mean_text(found, "accuracy") == "81.00 ± 1.00"
    assert difference_text(estimate([0.01, 0.02, 0.03]), "accuracy") == "+2.00 (−0.48 to +4.48)"
    assert difference_text(estimate([-0.01]), "auc") == "−0.0100 (one seed)"
    assert signed(-0.00001, "accuracy") == "0.00"


def test_a_row_has_mean_difference_paper_epsilon_and_settings(tmp_path):
    study = make_study(tmp_path, steady, name=TABLE2)
    head, _, *rows = results_table(study)
    assert head == (
        "| epsilon | method | seeds | accuracy, % | less dp-sgd | paper | ours less paper | epsilon spent "
        "| r | settings |"
    )
    assert rows[0] == "| 1 | dp-sgd | 3 | 81.00 ± 1.00 | – | 96.44 ± 0.02 | −15.44 | 0.999 | 6.45 | lr 1 |"
    assert rows[2].startswith(
        "| 1 | tp-topk | 3 | 86.00 ± 1.00 | +5.00 (+5.00 to +5.00) | 97.79 ± 0.06 | −11.79 |"
    )
    assert rows[2].endswith("| lr 2 |")
    assert len(rows) == 6


def test_a_section_says_what_was_run_and_on_what(tmp_path):
    text = text_of(make_study(tmp_path, steady))
    assert "Made by hand." in text
    assert (
        "`mnist-cnn` (26,010 coordinates); data `mnist` (official, 60,000 rows); 2 epochs; batch 100" in text
    )
    assert "delta 1e-5, accountant PLD, epsilon is per row" in text
    assert "3 seeds" in text
    assert "18 of 18 runs" in text
    assert "Partly run" not in text


def test_a_partial_experiment_says_what_is_missing(tmp_path):
    study = make_study(tmp_path, first_seed)
    text = text_of(study)
    assert "**Partly run.** 15 runs are missing: epsilon 1, dp-sgd (2 seeds)" in text
    assert "| 1 | tp-topk | 1 | 85.00 | +5.00 (one seed) |" in text
    assert not study.is_complete


def test_records_of_another_config_are_left_out_and_counted(tmp_path, capsys):
    study = make_study(tmp_path, steady)
    config = tmp_path / "experiments" / "configs" / "small.toml"
    config.write_text(config.read_text().replace("lr = 2.0", "lr = 4.0"))
    changed = read_study(read_experiment(config), tmp_path / "experiments" / "results" / "small.jsonl")
    assert len(study.records) == 18
    assert len(changed.records) == 12
    assert len(changed.stale) == 6
    assert "**Not used:** 6 records" in text_of(changed)
    assert all(row.cell["method"] != "tp-topk" for row in changed.rows)


def test_a_record_of_other_settings_is_not_used(tmp_path):
    study = make_study(tmp_path, steady)
    stale = record_of("small", study.runs[0], {"accuracy": 0.1}, "official") | {"config_hash": "other"}
    results = Results(tmp_path / "experiments" / "results" / "small.jsonl", "small")
    results.keep(stale)
    found = read_study(study.experiment, results.path)
    assert found.records == study.records
    assert found.stale == ("other",)


@pytest.mark.parametrize(
    ("variant", "said"), [("jpeg", True), ("jpeg, scattering J=2", True), ("official", False)]
)
def test_jpeg_is_said_at_every_cifar_table_and_figure_and_nowhere_else(tmp_path, variant, said):
    study = make_study(tmp_path, steady, dataset="cifar10", variant=variant)
    assert (JPEG in text_of(study)) is said
    other = make_study(tmp_path, steady, name="other", variant="official")
    assert JPEG not in text_of(other)


def test_two_classes_show_the_other_metrics_beside_the_leading_one(tmp_path):
    content = CONFIG.format(more='metric = "auc"', dataset="eyepacs-natural")
    study = make_study(tmp_path, steady, "tp-topk-table5", content, sensitivity=lambda cell, seed: 0.5)
    text = text_of(study)
    assert "| 1 | dp-sgd | 3 | 0.8100 ± 0.0100 | – | 0.6140 | +0.1960 |" in text
    assert "| 1 | tp-topk | 50.00 ± 0.00 (paper 52.00) |" in text


def test_the_papers_own_table_stands_there_where_no_cell_is_the_same(tmp_path):
    text = text_of(make_study(tmp_path, steady, "tp-topk-table4"))
    assert (
        "The paper's own (Table 4: test accuracy of TP-TopK at ratio 0.4, three seeds), not the same cells:"
        in text
    )
    assert "| cifar10 | 3 | tp-topk | 0.4 | 0.3 | 0.3 | 71.05 ± 0.37 |" in text


RATIOS = CONFIG.replace("epsilon = [1.0, 3.0]", "active_ratio = [0.2, 0.4, 0.6]").replace('"dp-sgd", ', "")


def test_a_picture_has_a_line_for_each_method_and_a_point_for_each_ratio(tmp_path):
    content = RATIOS.format(more="", dataset="mnist")
    study = make_study(tmp_path, steady, content=content)
    layout = layout_of(study)
    assert layout is not None
    assert (layout.x, layout.lines, layout.panels) == ("active_ratio", "method", ())
    drawn = picture(study)
    assert drawn is not None
    root = ET.fromstring(drawn)
    lines = [e for e in root.iter() if e.attrib.get("id", "").startswith("line ")]
    assert len(lines) == 2
    assert [sum(e.tag.endswith("}use") for e in line.iter()) for line in lines] == [3, 3]
    assert picture(make_study(tmp_path, lambda cell, seed: None, "empty", content)) is None


def test_a_grid_without_three_numbers_on_an_axis_has_no_picture(tmp_path):
    assert layout_of(make_study(tmp_path, steady)) is None


def test_tuning_shows_the_best_choice_of_every_method(tmp_path):
    content = CONFIG.format(more="", dataset="mnist") + "\n"
    content = content.replace("[grid]", "[grid]\nlr = [0.5, 1.0]").replace(
        '[[override]]\nwhere = { method = "tp-topk" }\nset = { lr = 2.0 }\n', ""
    )
    study = make_study(tmp_path, lambda c, s: steady(c, s) + 0.02 * (c["lr"] == "1"), "small-tuning", content)
    best = best_choices(study, ["epsilon", "method"])
    assert {row.cell["lr"] for row, _ in best.values()} == {"1"}
    assert {count for _, count in best.values()} == {2}
    text = "\n".join(tuning_section(study))
    assert "| 1 | tp-topk | 2 | lr 1 | 88.00 ± 1.00 | 3 |" in text
    assert "None of it is in epsilon" in text
    assert "| 1 | lr 1 | 85.00 | 3 |" in text  # mean of 83, 84 and 88 for all methods together


@pytest.mark.parametrize("score", [steady, first_seed, lambda cell, seed: None])
def test_the_page_is_made_from_any_number_of_records(root, score):
    make_study(root, score, name=TABLE2)
    make_study(root, score, name=f"{TABLE2}-tuning")
    studies = read_studies(root)
    text = page(studies, root)
    assert text.startswith("# Results")
    assert "## Verdicts" in text
    assert "not run" in text
    assert made_files(root, studies)[PAGE] == text


def test_claims_are_judged_on_the_page(root):
    make_study(root, steady, name=TABLE2)
    text = page(read_studies(root), root)
    line = next(line for line in text.splitlines() if line.startswith("| A learned support beats dense"))
    assert (
        "**holds** | +5.00 (+5.00 to +5.00) points | tp-topk less dp-sgd; `tp-topk-table2-mnist`, 2 cells, 3 seeds"
        in line
    )
    assert "| `tp-topk-table2-mnist` | epsilon 3 | 3 | +5.00 (+5.00 to +5.00) |" in text


def test_readme_shows_the_main_table_and_the_count_of_claims(tmp_path):
    assert "on the way" in results(tmp_path)
    make_study(tmp_path, steady, name=TABLE2)
    text = results(tmp_path)
    row = "| MNIST | 1 | 96.44 ± 0.02 | 81.00 ± 1.00 | 97.79 ± 0.06 | 86.00 ± 1.00 | +5.00 (+5.00 to +5.00) |"
    assert row in text
    assert re.search(r"Of \d+ claims.*:\n2 hold", text)


def test_methods_of_others_are_shown_as_context_and_never_beside_ours():
    text = "\n".join(context_tables(read_paper("tp-topk")))
    assert "| dataset | method | epsilon 1 | epsilon 3 | epsilon 8 |" in text
    assert "| cifar10 | SA-DP-SGD | 50.53 | 56.89 | 60.97 |" in text
    settings = {"dataset": "mnist", "epsilon": 1.0, "method": "AUTO-S"}
    assert number_for("tp-topk-table6", {}, settings, "accuracy") is None


def test_trainings_with_partitions_are_shown_and_decide_their_claim(root):
    shared = {
        "model": "m",
        "dataset": "mnist",
        "epochs": 2,
        "batch_size": 4096,
        "method": "dp-sgd",
        "active_ratio": 1.0,
    }
    for sampling, epsilon, gain in (("Poisson", 3.0, 0.0), ("partition", 25.0, 0.001)):
        for seed in range(3):
            settings = {**shared, "epsilon": 3.0, "sampling": sampling, "seed": seed}
            content = {"settings": settings, "accuracy": 0.8 + 0.01 * seed + gain, "epsilon": epsilon}
            append_row(root / "experiments" / "results" / "rs.jsonl", {"experiment": "rs-table3", **content})
    text = page(read_studies(root), root)
    assert "| 3 | dp-sgd | partition | 3 | 81.10 ± 1.00 | +0.10 (+0.10 to +0.10) | 25 |" in text
    line = next(line for line in text.splitlines() if line.startswith("| Sampling by partition and Poisson"))
    assert "**holds** | +0.10 (+0.10 to +0.10) points" in line
