"""Where active coordinates are, and how scores are binned."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from report_runs import train

from sparsedp.report.coordinates import MOST_CELLS, row_shares, score_bars, score_figure
from sparsedp.report.run import run_of

some_scores = st.lists(st.floats(-1e6, 1e6, allow_subnormal=False), min_size=1, max_size=60)


@given(some_scores, st.randoms())
def test_every_score_falls_in_one_bin_on_its_own_side(values, random):
    scores = np.array(values)
    kept = np.array([random.random() < 0.5 for _ in values])
    axis, bars = score_bars(scores, kept)
    assert sum(bars.below) == kept.sum()
    assert sum(bars.above) == (~kept).sum()
    assert list(bars.edges) == sorted(bars.edges)
    places = [axis.place(edge, 0, 100) for edge in bars.edges]
    assert places[0] >= -1e-6
    assert places[-1] <= 100 + 1e-6


@pytest.mark.parametrize("scores", [[0.0, 0.0], [3.0, 3.0, 3.0], [-1.0], [1e-30, 2e-30]])
def test_scores_without_spread_still_make_a_histogram(scores):
    axis, bars = score_bars(np.array(scores), np.ones(len(scores), dtype=bool))
    assert sum(bars.below) == len(scores)
    assert axis.high > axis.low


def test_an_axis_is_bent_for_signs_and_decades_only():
    near = np.linspace(1.0, 3.0, 50)
    assert score_bars(near, near > 2)[0].unit is None
    assert score_bars(near - 2, near > 2)[0].unit is not None
    assert score_bars(np.logspace(-4, 2, 50), near > 2)[0].unit is not None


def test_row_shares_are_the_means_of_the_mask_and_many_rows_are_grouped():
    mask = torch.zeros(4, 2, 5, dtype=torch.bool)
    mask[1] = True
    mask[2, 0] = True
    assert row_shares(mask) == [0.0, 1.0, 0.5, 0.0]
    assert row_shares(torch.tensor(True)) == [1.0]
    wide = torch.zeros(10 * MOST_CELLS, 3, dtype=torch.bool)
    wide[: 5 * MOST_CELLS] = True
    shares = row_shares(wide)
    assert shares == [1.0] * (MOST_CELLS // 2) + [0.0] * (MOST_CELLS // 2)


def test_a_method_without_scores_says_so_instead_of_drawing():
    text = score_figure(run_of(train("tp-rand", seed=0))).text
    assert "<svg" not in text
    assert "ranks by no score" in text
