"""What a run's folder shows anyone, against a plain computation from its files."""

import shutil
import signal

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sparsedp
from diagnostic_probes import network, rows
from sparsedp.diagnostics import RunView, SplitEnergies, inspect_run, split_concentration, statistics_of
from sparsedp.errors import DataError
from sparsedp.methods import build_plan
from sparsedp.parameters import ParameterLayout
from sparsedp.results import StepReport
from sparsedp.runs.run import Run
from sparsedp_experiments.runs.execute import execute
from sparsedp_experiments.runs.settings import Settings

pytestmark = pytest.mark.usefixtures("checked_once")
LOSS = nn.CrossEntropyLoss(reduction="none")
BUDGET = {"epsilon": 8.0, "delta": 1e-3, "accountant": "rdp"}


def a_run(out, method="tp-topk", model=None, **more):
    return sparsedp.fit(
        model or network(), TensorDataset(*rows(80)), LOSS, method=method, **BUDGET,
        **{"epochs": 5, "batch_size": 20, "max_grad_norm": 0.5, "seed": 3, "progress": False, "run_dir": out, **more},
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    return out, a_run(out)


def test_split_concentration_is_the_share_of_the_best_ranked():
    means = torch.full((43,), 0.01, dtype=torch.float64)
    means[:3] = torch.tensor([2.0, 3.0, 1.0], dtype=torch.float64)
    found = split_concentration(SplitEnergies(torch.arange(43), means, means.clone(), 1e-4, 1e-4), 8)
    assert found.share.value == pytest.approx((14 + 5 * 1e-4) / (14 + 40 * 1e-4))
    assert found.active_ratio == pytest.approx(8 / 43)


def test_look_layers_overlaps_and_noise_follow_from_the_run(trained):
    (out, result), phase = trained, trained[1].plan.phases[-1]
    seen, nu = inspect_run(trained[0]), phase.noise_multiplier * 0.5 / 20
    assert (seen.size, seen.dimension, seen.missing) == (8, 43, None)
    assert {layer.name: layer.active for layer in seen.layers} == dict(result.supports[-1].by_parameter)
    by_energy = statistics_of(Run.open(out)).splits["energy"].order[:8].tolist()
    shared = {second: overlap.shared for _, second, overlap in seen.overlaps}
    assert shared["energy, by half a warm-up"] == len(set(by_energy) & set(result.support.indices.tolist()))
    assert (seen.noise.sparse_energy, seen.noise.dense_energy) == pytest.approx((8 * nu**2, 43 * nu**2))
    proxy = seen.to_json()["proxy"]
    assert proxy["surprise"] == pytest.approx((proxy["seen"] - proxy["null"]["mean"]) / proxy["null"]["std"])


def test_look_at_a_dense_run_is_as_if_it_kept_a_fifth(tmp_path):
    a_run(tmp_path / "run", "dp-sgd")
    seen = inspect_run(tmp_path / "run")
    assert (seen.size, seen.overlaps) == (8, ())
    assert set(seen.splits) == {"energy", "coherent"}


@pytest.mark.parametrize(
    ("optimizer", "rate"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9), 2.0),
        (lambda p: torch.optim.Adam(p, lr=0.2), None),
    ],
)
def test_the_learning_rate_of_the_bounds_counts_momentum(tmp_path, optimizer, rate):
    a_run(tmp_path / "run", "dp-sgd", optimizer=optimizer)
    assert RunView.of(Run.open(tmp_path / "run")).learning_rate == pytest.approx(rate)


@pytest.mark.parametrize("method", ["tp-topk", "dp-sgd"])
def test_a_run_keeps_its_warm_up(tmp_path, method):
    released = []

    def keep(event):
        if isinstance(event, StepReport):
            released.append(event.released.dense())

    out = tmp_path / "run"
    a_run(out, method, callbacks=(keep,))
    found = statistics_of(Run.open(out))
    assert (found.steps, found.planned) == (6, 6)
    seen = torch.stack(released[:6]).double()
    split = found.splits["energy"]
    torch.testing.assert_close(split.first, seen[4])
    torch.testing.assert_close(split.second, seen[[3, 5]].mean(0))
    energy_order = torch.sort((seen[:3] ** 2).mean(0), descending=True, stable=True).indices
    assert torch.equal(split.order, energy_order)
    coherent_order = torch.sort(seen[:3].mean(0) ** 2, descending=True, stable=True).indices
    assert torch.equal(found.splits["coherent"].order, coherent_order)
    phase = Run.open(out).plan.phases[0]
    noise = phase.noise_multiplier * phase.clip_norm / 20
    assert found.noise_std == pytest.approx(noise)
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
        assert seen.noise.noise_ratios[name] == pytest.approx(phase.noise_multiplier / 20 * count**0.5)


STEPS, WARM_UP = 300, 90
"""So a ledger block is three steps."""


KILLED_AT = (30, 31, 32, WARM_UP - 1)


def resumable_run(out, callbacks=(), seed=3, resume=False):
    """A run that is stopped by Ctrl-C soon after its warm-up; gives the weights it had then."""
    model = network()
    watched = (*callbacks, at_step(WARM_UP + 2, stop))
    with pytest.raises(KeyboardInterrupt):
        a_run(out, model=model, epochs=30, batch_size=8, seed=seed, callbacks=watched, resume=resume)
    return ParameterLayout.of(model).flatten(model)


def at_step(step, do):
    def act(event):
        if isinstance(event, StepReport) and event.step == step:
            do()

    return act


def stop():
    signal.raise_signal(signal.SIGINT)


def same(one, other):
    assert (one.steps, one.planned, one.noise_std) == (other.steps, other.planned, other.noise_std)
    for name, split in one.splits.items():
        again = other.splits[name]
        assert torch.equal(split.order, again.order)
        assert torch.equal(split.first, again.first)
        assert torch.equal(split.second, again.second)
        assert (split.first_variance, split.second_variance) == (again.first_variance, again.second_variance)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing disturbed until after its warm-up, and its folder as a kill at some steps would leave it."""
    base = tmp_path_factory.mktemp("whole")
    out = base / "run"
    copies = [at_step(step, lambda step=step: shutil.copytree(out, base / f"{step}")) for step in KILLED_AT]
    return out, resumable_run(out, copies)


def kept(folder):
    return statistics_of(Run.open(folder))


@pytest.mark.parametrize("step", [0, 44, WARM_UP - 2])
def test_ctrl_c_loses_nothing(whole, tmp_path, step):
    out = tmp_path / "run"
    resumable_run(out, (at_step(step, stop),))
    with pytest.raises(DataError, match=r"not over.*--resume"):
        kept(out)
    assert torch.equal(whole[1], resumable_run(out, resume=True))
    same(kept(out), kept(whole[0]))


@pytest.mark.parametrize("step", KILLED_AT)
def test_a_kill_at_any_place_of_a_block_loses_nothing(whole, tmp_path, step):
    killed = shutil.copytree(whole[0].parent / f"{step}", tmp_path / "killed")
    assert torch.equal(whole[1], resumable_run(killed, resume=True))
    same(kept(killed), kept(whole[0]))


@pytest.mark.parametrize(("step", "lost"), [(31, 3), (WARM_UP - 1, 10)])
def test_an_unseeded_run_leaves_the_lost_steps_out(tmp_path, step, lost):
    out, killed = tmp_path / "run", tmp_path / "killed"
    resumable_run(out, (at_step(step, lambda: (shutil.copytree(out, killed), stop())),), seed=None)
    resumable_run(killed, seed=None, resume=True)
    found = kept(killed)
    # Of the epoch at work all steps are lost that were charged: a block of three, or all ten.
    assert (found.steps, found.planned) == (WARM_UP - lost, WARM_UP)


def by_fit(out):
    a_run(out, seed=None)


def by_a_loop_of_ones_own(out):
    plan = build_plan("tp-topk", units=60, batch_size=20, epochs=5, max_grad_norm=1.0, **BUDGET)
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    trainer = sparsedp.Trainer(
        network(), TensorDataset(*rows(60)), LOSS, plan=plan, optimizer=sgd, run_dir=out
    )
    for batch in trainer:
        trainer.step(batch)
    trainer.finish()


def by_make_private(out):
    model = network()
    loader = DataLoader(TensorDataset(*rows(60)), batch_size=20, shuffle=True)
    private = sparsedp.make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loader, LOSS, method="tp-topk", **BUDGET,
        epochs=5, run_dir=out,
    )  # fmt: skip
    for _ in range(5):
        for inputs, targets in private.loader:
            private.optimizer.zero_grad()
            private.criterion(private.model(inputs), targets).backward()
            private.optimizer.step()
    private.finish()


def by_an_experiment(out):
    settings = {
        "dataset": "digits",
        "epochs": 3,
        "batch_size": 30,
        "subset": 150,
        "seed": 1,
        "accountant": "rdp",
    }
    execute(Settings.from_json(settings), out=out)


def by_the_estimator(out):
    from sparsedp.sklearn import SparseDPClassifier

    rng = np.random.default_rng(0)
    X, y = rng.uniform(-1, 1, (120, 6)), rng.integers(0, 2, 120)
    settings = BUDGET | {"epochs": 3, "batch_size": 20}
    SparseDPClassifier(classes=[0, 1], bounds=(-1, 1), run_dir=out, **settings).fit(X, y)


DOORS = [by_fit, by_a_loop_of_ones_own, by_make_private, by_an_experiment, by_the_estimator]


@pytest.mark.parametrize("start", DOORS)
def test_a_run_can_be_diagnosed_whatever_started_it(start, tmp_path):
    start(tmp_path / "run")
    seen = inspect_run(tmp_path / "run")
    assert set(seen.splits) == {"energy", "coherent"}
    assert set(seen.noise.noise_ratios) >= {"all", "head", "support"}
    assert sparsedp.verify(tmp_path / "run", independent=False).reasons == ()
