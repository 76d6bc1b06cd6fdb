"""What auto would have chosen, by hand-made records."""

import json
from dataclasses import replace

import pytest

from sparsedp_experiments.runs.table_rates import MARK
from sparsedp_experiments.runs.page import auto_section
from sparsedp_experiments.pages.auto import auto_table, with_auto_table
from sparsedp_experiments.runs.page import Gain

TP_TOPK = json.dumps(["tp-topk", 0.4, None])


def gain(r, seeds=(0.1, 0.2, 0.3), arm=TP_TOPK, task="digits, mlp", epsilon=1.0, d=20_000):
    return Gain("small", task, epsilon, "", arm, r, d, seeds)


def rows(found):
    return [
        [part.strip() for part in line.split("|")[1:-1]]
        for line in auto_table(found)
        if line.startswith("| `")
    ]


def test_a_quiet_cell_is_dense_training_itself_and_a_loud_one_has_a_row():
    found = [
        gain(0.49),
        gain(0.51, epsilon=0.5),
        gain(1.0, task="too loud"),
        gain(0.6, task="small", d=9_999),
    ]
    assert "In 3 of the 4 cells (3 tasks)" in auto_table(found)[0]
    ((study, task, epsilon, r, difference, answer),) = rows(found)
    assert (study, task, epsilon, r, answer) == ("`small`", "digits, mlp", "0.5", "0.51", "no")
    assert difference == "+0.20 (-0.05 to +0.45)"  # 4.303 * 0.1 / sqrt(3) = 0.248


@pytest.mark.parametrize(
    ("seeds", "answer"),
    [
        ((-0.1, 0.0, 0.1), "no"),
        ((-2.0, -2.1, -2.2), "**yes**"),
        ((-2.0, 0.0, 1.0), "not resolved"),
        ((-9.0,), "not resolved"),
    ],
)
def test_a_loss_beyond_half_a_point_is_told(seeds, answer):
    assert rows([gain(0.9, seeds)])[0][-1] == answer


@pytest.mark.parametrize(
    "arm", [["tp-topk", 0.2, None], ["tp-rand", 0.4, None], ["tp-topk", 0.4, {"ranking": "coherent"}]]
)
def test_a_cell_without_the_arm_it_chooses_is_told(arm):
    assert rows([gain(0.9, arm=json.dumps(arm))])[0][-1] == "not run"


def test_a_study_that_ran_the_arm_answers_for_one_that_did_not():
    asked = gain(0.9, arm=json.dumps(["tp-rand", 0.4, None]))
    assert rows([asked, replace(gain(0.9), study="other")]) == rows([replace(gain(0.9), study="other")])
    assert len(rows([asked, replace(gain(0.9, epsilon=2.0), study="other")])) == 2


def test_the_table_stands_between_its_marks():
    page = f"before\n{MARK}\nold\n{MARK}\nafter"
    found = [gain(0.5)]
    written = with_auto_table(page, found)
    assert written.startswith(f"before\n{MARK}\n\nFrom public")
    assert written.endswith(f"{MARK}\nafter")
    assert "old" not in written
    assert with_auto_table(written, found) == written
    assert auto_section([]) == []
