"""Rows of a table from records: means, intervals, paired differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from sklearn import metrics
from sparsedp_experiments.data import digits
from sparsedp_experiments.runs.execute import build_model, evaluator
from sparsedp_experiments.runs.grid import Contrast
from sparsedp_experiments.runs.results import make_rows

# Tables over seeds and held-out metrics, against scipy and scikit-learn.


METHODS = Contrast("method", "dp-sgd")


def record(method: str, epsilon: str, seed: int, accuracy: float | None, spent: float | None = 2.9):
    return {
        "cell": {"method": method, "epsilon": epsilon},
        "seed": seed,
        "metrics": {"accuracy": accuracy},
        "epsilon_spent": spent,
        "active_ratio": 0.2,
    }


def test_rows_have_the_mean_spread_and_paired_t_interval_of_scipy():
    generator = np.random.default_rng(0)
    dense, sparse = generator.normal(0.9, 0.02, 5), generator.normal(0.92, 0.03, 5)
    records = [record("dp-sgd", "3", seed, float(value)) for seed, value in enumerate(dense)]
    records += [
        record("tp-topk", "3", seed, float(value)) for seed, value in reversed(list(enumerate(sparse)))
    ]
    base, row = make_rows(records, "accuracy", METHODS)
    assert base.difference is None
    assert row.seeds == (0, 1, 2, 3, 4)
    assert row.score.mean == pytest.approx(np.mean(sparse))
    assert row.score.std == pytest.approx(np.std(sparse, ddof=1))
    interval = stats.ttest_rel(sparse, dense).confidence_interval(0.95)
    assert row.difference is not None
    assert row.difference.mean == pytest.approx(np.mean(sparse - dense))
    assert (row.difference.low, row.difference.high) == pytest.approx((interval.low, interval.high))


def test_only_common_seeds_of_the_same_cell_are_paired():
    records = [
        record("dp-sgd", "3", 0, 0.5),
        record("dp-sgd", "3", 1, 0.6),
        record("dp-sgd", "8", 2, 0.1),
        record("tp-topk", "3", 1, 0.7),
        record("tp-topk", "3", 2, 0.9),
        record("on-rand", "8", 0, 0.9),
    ]
    rows = {tuple(row.cell.values()): row for row in make_rows(records, "accuracy", METHODS)}
    difference = rows["tp-topk", "3"].difference
    assert difference is not None
    assert (difference.count, difference.low) == (1, None)
    assert difference.mean == pytest.approx(0.1)
    assert rows["on-rand", "8"].difference is None


def test_the_evaluator_agrees_with_scikit_learn_on_many_classes():
    test = digits().test
    model = build_model("mlp", {}, (1, 8, 8), 10, seed=1)
    with torch.no_grad():
        found = evaluator(test)(model)
        logits = model(test.inputs)
    probabilities = torch.softmax(logits.double(), dim=1).numpy()
    assert found["accuracy"] == metrics.accuracy_score(test.targets, logits.argmax(1))
    assert found["loss"] == pytest.approx(metrics.log_loss(test.targets, probabilities), rel=1e-6)
    assert "auc" not in found
    assert math.isfinite(found["loss"])
