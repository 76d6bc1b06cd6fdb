"""The study of wide data: its generators, its simulator beside `fit`, and how rates are chosen."""

import math

import pytest
import torch

from sparsedp_experiments.figures.wide import LEVEL, accuracy_at, figure, promised
from sparsedp_experiments.wide.data import blocks, independent, msprime_genotypes
from sparsedp_experiments.wide.simulate import Training, oracle, simulate
from sparsedp_experiments.wide.study import best_rates, run_cell, table

CELL = {
    "name": "part", "data": "independent", "features": 60, "causes": 6, "epsilon": 3.0, "records": 600,
    "epochs": 10, "batch_size": 100, "max_grad_norm": 0.5, "delta": 1e-5, "engine": "simulator",
    "arms": ["dense", "adaptive", "raw", "energy 0.2", "oracle"], "rates": [0.3, 1.0],
}  # fmt: skip


def accuracy(data, weights):
    return float(((data.test_x.times(weights[:, None])[:, 0] > 0).float() == data.test_y).float().mean())


def test_simulate_without_noise_every_rate_learns_and_the_oracle_is_best():
    data, training = independent(2000, 60, 6, 0), Training(0.0, 100, 200, 0.5)
    dense = simulate(data, training, [("dense", 1.0)], 0)["dense", 1.0][0]
    known, kept = oracle(data, training, [("oracle", 1.0)], 0)["oracle", 1.0]
    assert kept == 6
    assert not known[torch.ones(60).index_fill(0, data.causes, 0).bool()].any()
    assert accuracy(data, known) >= accuracy(data, dense) > 0.8


def test_simulate_where_signal_is_spread_adaptive_is_dense_training():
    data, training = independent(600, 60, 60, 0), Training(0.2, 60, 100, 0.5)
    named = [(arm, rate) for arm in ("dense", "adaptive", "raw") for rate in (0.3, 1.0)]
    found = simulate(data, training, named, 0)
    for rate in (0.3, 1.0):
        for arm in ("adaptive", "raw"):
            assert found[arm, rate][1] == 60
            assert torch.allclose(found[arm, rate][0], found["dense", rate][0], atol=1e-3)


def test_simulate_with_a_ratio_trains_so_many_after_the_warm_up():
    data, training = independent(600, 60, 6, 0), Training(1.0, 60, 100, 0.5)
    for arm in ("energy 0.2", "coherent 0.05", "random 0.2"):
        assert simulate(data, training, [(arm, 0.3)], 0)[arm, 0.3][1] == math.floor(60 * float(arm[-4:]))


@pytest.mark.parametrize("engine", ["simulator", "fit"])
def test_run_cell_tests_at_the_rates_of_the_validation_seeds_alone(engine):
    cell = CELL | {"engine": engine}
    first = list(run_cell(cell, 100, None, {}))
    chosen = best_rates(first, "accuracy")
    assert all(len(row["rates"]) == 2 for row in first if row["arm"] != "best")
    second = list(run_cell(cell, 0, None, chosen))
    assert [list(row["rates"]) for row in second if row["arm"] != "best"] == [
        [chosen[arm]] for arm in cell["arms"]
    ]
    assert best_rates(first + second, "accuracy") == chosen
    shown = table(first + second)
    assert all(f"| {arm} |" in shown for arm in cell["arms"])


def test_promised_gain_falls_with_the_share_of_causes_and_ends_at_none():
    gains = [promised(0.66, 5000, share * 5000) for share in (0.001, 0.01, 0.1, LEVEL, 0.5)]
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] == pytest.approx(0.0, abs=1e-6)
    assert gains[-2] == pytest.approx(0.0, abs=1e-3)
    assert accuracy_at(0.0) == pytest.approx(0.8766, abs=1e-3)


def test_figure_has_a_line_for_every_number_of_features():
    rows = [
        {**{n: CELL[n] for n in ("data", "causes")}, "epsilon": 1.0, "part": "map", "records": 20_000, "arm": arm,
         "features": features, "engine": "simulator", "seed": seed, "rates": {"1.0": {"accuracy": value, "kept": 1}}}
        for features in (500, 5000) for seed in (100, 0, 1) for arm, value in (("dense", 0.66), ("adaptive", 0.8))
    ]  # fmt: skip
    drawn = figure(rows)
    assert "500 features" in drawn
    assert "5,000 features" in drawn


@pytest.mark.parametrize("make", [blocks, msprime_genotypes])
def test_genotypes_are_scaled_by_public_frequencies_and_half_are_cases(make):
    if make is msprime_genotypes:
        pytest.importorskip("msprime", reason="pip install 'sparsedp-experiments[wide]'")
    data = make(400, 100, 5, 0)
    assert data.x.matrix.shape == (400, 100)
    assert 0.3 < float(data.y.mean()) < 0.7
    assert float(data.x.matrix.square().sum(1).mean()) == pytest.approx(1.0, abs=0.15)
    assert len(data.causes) == 5
