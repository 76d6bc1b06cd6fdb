"""What sparsity gains against r: pairs, bands and the verdict, by hand-made records whose answer is known."""

import json
import math

import pytest
from handmade import make_study
from scipy import stats

from sparsedp_experiments.runs.results import estimate
from sparsedp_experiments.runs.page import Gain, gains
from sparsedp_experiments.pages.loudness import loudness_section
from sparsedp_experiments.runs.results import verdict
from sparsedp_experiments.runs.tables import noise_ratio
from sparsedp_experiments.runs.page import summary, surviving

GAIN = {"1": 0.02, "3": -0.01}


def study(root, name="small", rising=True):
    def score(cell, seed):
        more = GAIN[cell["epsilon"]] * (1 if rising else -1)
        return 0.8 + 0.001 * seed + (0 if cell["method"] == "dp-sgd" else more + 0.0001 * seed)

    return make_study(root, score, name)


def test_a_gain_is_the_paired_difference_at_the_r_of_the_dense_run(tmp_path):
    found = gains([study(tmp_path)])
    assert len(found) == 4
    for gain in found:
        assert gain.r == pytest.approx(4.0 / gain.epsilon * math.sqrt(26_010) / 100)
        start = 100 * GAIN[f"{gain.epsilon:g}"]
        assert gain.seeds == pytest.approx((start, start + 0.01, start + 0.02))


def test_r_of_a_run_is_of_its_last_phase_and_of_what_was_active(tmp_path):
    sparse = next(r for r in study(tmp_path).records if r["method"] == "tp-topk" and r["target_epsilon"] == 1)
    assert noise_ratio(sparse) == pytest.approx(4.0 * math.sqrt(5_202) / 100)
    assert noise_ratio({**sparse, "noise": None}) is None


@pytest.mark.parametrize(("rising", "ruling"), [(True, "holds"), (False, "does not hold")])
def test_the_verdict_is_on_how_the_gain_moves_within_experiments(tmp_path, rising, ruling):
    studies = [study(tmp_path, name, rising) for name in ("one", "two", "three")]
    said = verdict(gains(studies))
    assert f"**{ruling}**" in said
    assert f"{3 if rising else 0} of 3 experiments, by {'+' if rising else '-'}3.00 points" in said


def test_the_page_opens_with_what_was_gained_and_lost(tmp_path):
    text = "\n".join(summary([], gains([study(tmp_path)])))
    assert "In 4 places" in text
    assert "above zero in 2 and below it in 2; of 4 looks at nothing, 0 would be on each side" in text
    assert "leaves 2 gains and 2 losses" in text
    assert "| mnist, " in text


CHANGES = """
title = "One change at a time"
seeds = 3
contrast = { axis = "change", baseline = "none" }

[base]
dataset = "mnist"
delta = 1e-5
epochs = 2
batch_size = 100

[grid]
epsilon = [1.0, 3.0]
change = [
  { name = "none", method = "dp-sgd" },
  { name = "twice the epochs", method = "dp-sgd", epochs = 4 },
  { name = "another optimizer", method = "dp-sgd", optimizer = "adam" },
  { name = "a support, tuned", method = "tp-topk", active_ratio = 0.2, epochs = 3, lr = 7.0 },
]
"""
LEVELS = {"none": 0.8, "twice the epochs": 0.9, "another optimizer": 0.5, "a support, tuned": 0.82}


def test_sparse_is_compared_with_the_baseline_and_not_with_another_dense_variant(tmp_path):
    def score(cell, seed):
        return LEVELS[cell["change"]] + 0.001 * seed

    found = gains([make_study(tmp_path, score, content=CHANGES)])
    assert len(found) == 2  # one an epsilon, whatever each was tuned to
    assert all(gain.seeds == pytest.approx((2.0, 2.0, 2.0)) for gain in found)


def test_without_a_dense_baseline_the_only_dense_run_counts_and_none_of_several(tmp_path):
    content = CHANGES.replace('baseline = "none"', 'baseline = "a support, tuned"')

    def score(cell, seed):
        return LEVELS[cell["change"]]

    assert gains([make_study(tmp_path, score, content=content)]) == []
    alone = "\n".join(line for line in content.splitlines() if "twice" not in line and "another" not in line)
    (first, second) = gains([make_study(tmp_path, score, name="alone", content=alone)])
    assert first.mean == second.mean == pytest.approx(2.0)


def test_the_ratio_is_the_one_asked_for_not_what_whole_rows_left_of_it(tmp_path):
    content = CHANGES.replace("active_ratio = 0.2", "active_ratio = 0.19999")

    def score(cell, seed):
        return LEVELS[cell["change"]]

    assert gains([make_study(tmp_path, score, name="below", content=content)]) == []
    made = make_study(tmp_path, score, content=CHANGES)
    assert {record["k"] / record["d"] for record in made.records if record["method"] == "tp-topk"} == {0.2}
    for record in made.records:
        record["k"] = min(record["k"], 26_010) - (record["method"] == "tp-topk")
    assert len(gains([made])) == 2


def test_looks_are_corrected_for_their_number_as_by_holm():
    def look(p_value):
        # three seeds with mean one, spread so that the two-sided p-value of Student's test is as wanted
        spread = math.sqrt(3) / stats.t.isf(p_value / 2, 2)
        seeds = (1.0 - spread, 1.0, 1.0 + spread)
        gain = Gain("s", "t", 1.0, "p", json.dumps(["m", 0.2, None]), 0.1, 10, seeds)
        return gain, estimate(seeds)

    looks = [look(p) for p in (0.04, 0.001, 0.02, 0.012)]  # thresholds 0.0125, 0.0167, 0.025, 0.05
    assert [looks.index(kept) for kept in surviving(looks)] == [1, 3, 2, 0]
    looks = [look(p) for p in (0.04, 0.001, 0.03, 0.012)]
    assert [looks.index(kept) for kept in surviving(looks)] == [1, 3]  # 0.03 > 0.025, and all after it go too


def test_no_pairs_no_section(tmp_path):
    assert loudness_section([]) == []
