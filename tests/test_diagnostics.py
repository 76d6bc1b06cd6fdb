"""What a run's folder shows anyone, against a plain computation from its files."""

import shutil
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

import sparsedp
from diagnostic_probes import network, rows
from sparsedp.cli import app
from sparsedp.diagnostics import SplitEnergies, inspect_run, split_concentration, statistics_of
from sparsedp.errors import DataError
from sparsedp.results import StepReport
from sparsedp.runs.run import Run

pytestmark = pytest.mark.usefixtures("checked_once")
LOSS = nn.CrossEntropyLoss(reduction="none")
BUDGET = {"epsilon": 8.0, "delta": 1e-3, "accountant": "rdp"}


def a_run(out, method="tp-topk", model=None, **more):
    return sparsedp.fit(
        model or network(), TensorDataset(*rows(80)), LOSS, method=method, **BUDGET,
        **{"epochs": 5, "batch_size": 20, "max_grad_norm": 0.5, "seed": 3, "progress": False, "run_dir": out, **more},
    )  # fmt: skip


def test_split_concentration_is_the_share_of_the_best_ranked():
    means = torch.full((43,), 0.01, dtype=torch.float64)
    means[:3] = torch.tensor([2.0, 3.0, 1.0], dtype=torch.float64)
    found = split_concentration(SplitEnergies(torch.arange(43), means, means.clone(), 1e-4, 1e-4), 8)
    assert found.share.value == pytest.approx((14 + 5 * 1e-4) / (14 + 40 * 1e-4))
    assert found.active_ratio == pytest.approx(8 / 43)


def test_look_proxy_layers_overlaps_and_noise_follow_from_the_run(tmp_path):
    result = a_run(tmp_path / "run")
    seen = inspect_run(tmp_path / "run")
    assert (seen.k, seen.d, seen.shown, seen.missing) == (8, 43, 8, None)
    assert {layer.name: layer.active for layer in seen.layers} == dict(result.supports[-1].by_parameter)
    by_energy = statistics_of(Run.open(tmp_path / "run"))["energy"].order[:8].tolist()
    shared = len(set(by_energy) & set(result.support.indices.tolist()))
    assert seen.overlaps["energy"].shared == shared
    assert seen.noise_std == pytest.approx(result.plan.phases[-1].noise_multiplier * 0.5 / 20)
    positive = result.scores.clamp(min=0)
    proxy = seen.to_json()["proxy"]
    assert proxy["seen"] == pytest.approx(float(positive[result.support.indices].sum() / positive.sum()))
    assert 0.5 < proxy["null"]["mean"] < 1
    assert proxy["surprise"] == pytest.approx((proxy["seen"] - proxy["null"]["mean"]) / proxy["null"]["std"])


def test_look_at_a_dense_run_says_that_all_is_trained_and_what_a_fifth_would_hold(tmp_path):
    a_run(tmp_path / "run", "dp-sgd")
    seen = inspect_run(tmp_path / "run")
    assert (seen.k, seen.d, seen.shown, seen.overlaps, seen.proxy) == (43, 43, 8, {}, None)
    assert set(seen.splits) == {"energy", "coherent"}
    told = CliRunner().invoke(app, ["diagnose", str(tmp_path / "run")], env={"COLUMNS": "120"}).output
    assert "43 of 43 coordinates" in told
    assert "what a support of 8 would have held" in told


@pytest.mark.parametrize("method", ["tp-topk", "dp-sgd"])
def test_a_run_keeps_its_warm_up(tmp_path, method):
    released = []

    def keep(event):
        if isinstance(event, StepReport):
            released.append(event.released.dense())

    out = tmp_path / "run"
    a_run(out, method, callbacks=(keep,))
    run = Run.open(out)
    seen, found = torch.stack(released[:6]).double(), statistics_of(run)
    split = found["energy"]
    torch.testing.assert_close(split.first, seen[4])
    torch.testing.assert_close(split.second, seen[[3, 5]].mean(0))
    energy_order = torch.sort((seen[:3] ** 2).mean(0), descending=True, stable=True).indices
    assert torch.equal(split.order, energy_order)
    coherent_order = torch.sort(seen[:3].mean(0) ** 2, descending=True, stable=True).indices
    assert torch.equal(found["coherent"].order, coherent_order)
    phase = run.plan.phases[0]
    noise = phase.noise_multiplier * phase.clip_norm / 20
    assert (split.first_variance, split.second_variance) == pytest.approx((noise**2, noise**2 / 2))


@pytest.mark.parametrize(("method", "active"), [("head", 18), ("head-first", 43), ("on-rand", 8)])
def test_a_run_that_is_sparse_from_the_start_is_told_r_alone(tmp_path, method, active):
    out = tmp_path / "run"
    a_run(out, method)
    with pytest.raises(DataError, match=f"{method} has no warm-up"):
        statistics_of(Run.open(out))
    seen, phase = inspect_run(out), Run.open(out).plan.phases[-1]
    assert f"{method} has no warm-up" in seen.missing
    for name, count in {"all": 43, "head": 18, "bias": 8, "support": active}.items():
        assert seen.noise_ratios[name] == pytest.approx(phase.noise_multiplier / 20 * count**0.5)


def at_step(step, do):
    def act(event):
        if isinstance(event, StepReport) and event.step == step:
            do()

    return act


def stop():
    signal.raise_signal(signal.SIGINT)


def test_an_unseeded_run_leaves_the_lost_steps_out(tmp_path):
    """Killed at step 31 of a warm-up of 90, and stopped after it: a block of three steps was paid for and lost."""
    out, killed = tmp_path / "run", tmp_path / "killed"
    settings = {"epochs": 30, "batch_size": 8, "seed": None}
    with pytest.raises(KeyboardInterrupt):
        a_run(out, callbacks=(at_step(31, lambda: (shutil.copytree(out, killed), stop())),), **settings)
    with pytest.raises(DataError, match=r"not over.*--resume"):
        statistics_of(Run.open(killed))
    with pytest.raises(KeyboardInterrupt):
        a_run(killed, callbacks=(at_step(92, stop),), resume=True, **settings)
    kept = Run.open(killed).warmup
    assert sum(int(kept[f"{part}_steps"]) for part in ("rank", "even", "odd")) == 90 - 3
