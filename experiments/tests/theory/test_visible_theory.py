"""What the theory says of a run, against a plain computation from its files."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import sparsedp
from diagnostic_probes import network, rows
from sparsedp.diagnostics import SplitEnergies, WarmupStatistics
from sparsedp.methods import get_method
from sparsedp_experiments.theory.misranking import Pair, misranking_coherent, misranking_energy
from sparsedp_experiments.theory.sparsification import Descent, best_rate_at_most
from sparsedp_experiments.theory.visible import theory_of
from sparsedp_experiments.theory.wire import encode_support


def a_run(out, method="tp-topk", **more):
    return sparsedp.fit(
        network(), TensorDataset(*rows(60)), nn.CrossEntropyLoss(reduction="none"), method=method, epsilon=8.0,
        delta=1e-3, epochs=4, batch_size=20, max_grad_norm=0.5, seed=3, progress=False, accountant="rdp",
        run_dir=out, **more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    return out, a_run(out)


@pytest.fixture
def run(trained, monkeypatch):
    """A sparse run, with a warm-up made up by hand: three coordinates hold nearly all energy."""
    means = torch.full((43,), 0.01, dtype=torch.float64)
    means[:3] = torch.tensor([2.0, 3.0, 1.0], dtype=torch.float64)
    split = SplitEnergies(torch.arange(43), means, means.clone(), 1e-4, 1e-4)
    made_up = WarmupStatistics({"energy": split}, 4, 4, 0.02)
    monkeypatch.setattr("sparsedp_experiments.theory.visible.statistics_of", lambda run: made_up)
    return trained


def test_odds_are_those_of_an_average_active_against_an_average_frozen_coordinate(run):
    odds = theory_of(run[0]).odds["energy"]
    assert odds.larger == pytest.approx(math.sqrt((14 + 5 * 1e-4) / 8))
    assert odds.smaller == pytest.approx(0.01)
    pair = Pair(odds.larger, odds.smaller, 0.02, 4)
    assert (odds.energy, odds.coherent) == (misranking_energy(pair), misranking_coherent(pair))
    assert odds.energy <= odds.bernstein <= 1
    assert odds.energy <= odds.chebyshev <= 1


def test_the_wire_follows_from_the_files(run):
    out, result = run
    wire, main = theory_of(out).wire, result.plan.phases[-1].steps
    assert (wire.steps, wire.values) == (main, 4 * 8 * main)
    assert wire.indices == len(encode_support(result.support))
    assert wire.dense == 4 * 43 * main
    found = theory_of(out).to_json()["wire"]
    assert found["per_step"] == pytest.approx(found["share"] * 4 * 43)


def test_the_best_rate_is_that_of_the_plan(run):
    plan = run[1].plan
    nu = plan.phases[-1].noise_multiplier * 0.5 / 20
    assert theory_of(run[0]).best_rate_at_most == pytest.approx(max(0.0, 1 - 0.5**2 / (43 * nu**2)))


def test_a_dense_run_sends_everything(tmp_path):
    a_run(tmp_path / "run", "dp-sgd")
    assert theory_of(tmp_path / "run").wire.share == 1


def test_a_support_that_is_full_has_no_misranking_odds(tmp_path):
    a_run(tmp_path / "run", get_method("tp-topk", active_ratio=1.0))
    assert theory_of(tmp_path / "run").odds == {}


def test_no_run_has_a_best_rate_above_the_public_bound():
    """Whatever the loss gap, smoothness and learning rate; equal to it when there is nothing left to gain."""
    setting = {"noise_multiplier": 1.3, "dimension": 5000, "batch_size": 60.0}
    bound = best_rate_at_most(**setting)
    assert bound == pytest.approx(1 - 3600 / (1.69 * 5000))
    for gap in (0.0, 0.1, 2.0):
        for smoothness in (0.1, 10.0):
            for rate in (0.01, 1.0):
                run = Descent(
                    loss_gap=gap,
                    smoothness=smoothness,
                    learning_rate=rate,
                    clip_norm=0.7,
                    steps=100,
                    **setting,
                )
                assert run.best_rate <= bound + 1e-12
                if not gap:
                    assert run.best_rate == pytest.approx(bound)
    assert best_rate_at_most(noise_multiplier=0.0, dimension=10, batch_size=1.0) == 0
