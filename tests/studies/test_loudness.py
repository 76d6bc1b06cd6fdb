"""What sparsity gains against r: pairs, bands and the verdict, by hand-made records whose answer is known."""

import math

import pytest
from handmade import make_study
from studies.tables.loudness import gains, loudness_section, verdict
from studies.tables.study import noise_ratio
from studies.tables.summary import summary

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


def test_the_page_opens_with_what_was_gained_and_lost_beyond_doubt(tmp_path):
    text = "\n".join(summary([], gains([study(tmp_path)])))
    assert "Of 4 comparisons" in text
    assert "above beyond doubt in 2, below in 2" in text
    assert "| mnist, " in text


def test_no_pairs_no_section(tmp_path):
    assert loudness_section([]) == []
