"""The loop: it is plain training without noise and clip, moves only the support, and keeps to itself."""

from __future__ import annotations

import io
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

from runs import ROWS, a_plan, a_trainer, advance, finished, loss_fn, network, rows, sgd, weights
from sparsedp import Callback
from sparsedp.batch import MicroBatch
from sparsedp.callbacks import live
from sparsedp.errors import DataError, ModelError, PrivacyError, SparseDPError
from sparsedp.loading import DataConfig
from sparsedp.methods import OffSupport, build_plan, get_method, list_methods
from sparsedp.privacy import mechanism, plan_epsilon
from sparsedp.randomness import SeededRandomness
from sparsedp.results import StepReport
from sparsedp.runs.record import EpochMetrics
from sparsedp.sampling import LogicalBatch, PoissonSampler

OPTIMIZERS = {
    "momentum": sgd,
    "decay": lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05),
}

SPARSE = [method for method in list_methods() if method.ranking is not None]


@pytest.fixture
def no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SeededRandomness, "add_rounded_gaussian", lambda self, bits, sums, key: None)
    monkeypatch.setattr(mechanism, "MARGIN_BITS", 40)


@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trainer_divides_a_sampled_batch_by_the_expected_size_never_by_its_own(name):
    """Without noise, and with a clip that reaches nothing, it is plain training on Poisson batches."""
    how = {"units": ROWS, "batch_size": 20, "epochs": 6, "noise_multiplier": 1.0, "max_grad_norm": 50.0}
    make = {"plan": build_plan("dp-sgd", **how), "seed": 4, "optimizer": OPTIMIZERS[name]}
    private, plain = advance(a_trainer("dp-sgd", **make)).model, network()
    optimizer = OPTIMIZERS[name](plain.parameters())
    sampler = PoissonSampler(rows(1), sampling_rate=20 / ROWS, randomness=SeededRandomness(4))
    sizes = set()
    for batch in sampler.batches(0, 18):
        optimizer.zero_grad()
        for part in batch:
            inputs, targets = part.rows
            sizes.add(len(inputs))
            (loss_fn(plain(inputs), targets).sum() / 20).backward()
        optimizer.step()
    assert len(sizes) > 3
    torch.testing.assert_close(weights(private), weights(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", SPARSE, ids=lambda method: method.name)
def test_trainer_moves_a_coordinate_off_the_support_only_where_the_method_coasts(method):
    trainer = a_trainer(method.name, optimizer=OPTIMIZERS["decay"], options={"active_ratio": 0.3})
    moved_off_support = 0
    for batch in trainer:
        before = weights(trainer.model)
        trainer.step(batch)
        moved = weights(trainer.model) != before
        moved_off_support += int((moved & ~trainer.support.mask()).sum())
    assert (moved_off_support > 0) == (method.off_support is OffSupport.COASTS or method.denoise)


def test_trainer_that_prunes_zeroes_what_the_first_selection_freezes():
    trainer = advance(a_trainer("adadpigu", options={"prune": True}))
    frozen = ~trainer.support.mask()
    assert (weights(trainer.model)[frozen] == 0).all()


@pytest.mark.parametrize(("seed", "workers"), [(0, 0), (None, 1)])
def test_trainer_neither_moves_nor_follows_the_global_generators(seed, workers):
    how = {"seed": seed, "data": DataConfig(num_workers=workers)}
    found = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
        found.append(weights(finished(model=network(dropout=0.5), **how).model))
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]  # noqa: NPY002
    assert torch.equal(*found) == (seed is not None)


def test_trainer_tells_callbacks_every_step_and_epoch_in_order_and_the_end():
    heard, events = {"step": [], "epoch": [], "end": []}, []
    hears = Callback()
    hears.on_step, hears.on_epoch, hears.on_end = (told.append for told in heard.values())
    evaluate = lambda model: {"loss": float("inf"), "fine": 1}  # noqa: E731
    trainer = advance(a_trainer(callbacks=[hears, events.append, Callback()], evaluate=evaluate))
    result = trainer.finish()
    assert trainer.finish() is result
    assert result.metrics == {"loss": None, "fine": 1.0}
    steps = [event for event in events if isinstance(event, StepReport)]
    epochs = [event for event in events if isinstance(event, EpochMetrics)]
    assert heard == {"step": steps, "epoch": epochs, "end": [result]}
    assert [event.step for event in steps] == list(range(15))
    assert [(epoch.epoch, epoch.step, events.index(epoch)) for epoch in epochs] == [
        (n, 3 * n, 4 * n - 1) for n in range(1, 6)
    ]
    assert tuple(epochs) == result.history
    epsilons = [epoch.epsilon for epoch in epochs]
    assert epsilons == sorted(epsilons)
    assert 0.995 * 8 <= epsilons[-1] <= 8.0


@pytest.mark.parametrize("decay", [0.5, 1.0])
def test_trainer_with_an_average_evaluates_it_gives_it_back_and_trains_as_without(decay):
    """A decay of 1 is the average of the whole run, each step by its number."""
    evaluated, seen = [], []
    trainer = a_trainer(ema_decay=decay, evaluate=lambda model: {"norm": float(weights(model).norm())})
    average = weights(trainer.model)
    for done, batch in enumerate(trainer):
        trainer.step(batch)
        seen.append(weights(trainer.model))
        average = average.lerp(seen[-1], 1 - min(decay, (1 + done) / (10 + done)))
        if decay == 1.0:
            average = sum(n * one for n, one in enumerate(seen, start=1)) / sum(range(1, len(seen) + 1))
        evaluated.append(float(average.norm()))
    result = trainer.finish()
    torch.testing.assert_close(weights(result.model), average)
    assert [epoch.metrics["norm"] for epoch in result.history] == pytest.approx(evaluated[2::3], rel=1e-5)
    assert torch.equal(seen[-1], weights(advance(a_trainer()).model))


@pytest.mark.parametrize("which", ["a later one", "one again", "one it did not draw"])
def test_trainer_refuses_a_batch_that_it_did_not_draw_for_this_step(which):
    """It would not be Poisson-sampled at the planned rate."""
    trainer = a_trainer()
    batches = list(trainer)
    if which == "one again":
        trainer.step(batches[0])
    foreign = LogicalBatch(0, SeededRandomness(0).secret((0,)), iter([MicroBatch(rows(1).tensors)]))
    given = {"a later one": batches[1], "one again": batches[0], "one it did not draw": foreign}
    with pytest.raises(SparseDPError, match="expected the one this trainer gave for step"):
        trainer.step(given[which])


def test_trainer_that_is_finished_takes_no_further_step():
    trainer = advance(a_trainer(), 3)
    batch = next(iter(trainer))
    result = trainer.finish()
    assert not result.complete
    assert result.ledger.steps == 3
    assert result.ledger.epsilon < result.epsilon <= 8.0
    assert trainer.finish() is result
    with pytest.raises(SparseDPError, match="finished or closed"):
        trainer.step(batch)


def test_trainer_refuses_a_batch_norm_that_is_switched_on_after_the_start():
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    trainer = advance(a_trainer("dp-sgd", model=model.eval()), 2)
    model.train()
    with pytest.raises(ModelError, match="BatchNorm1d"):
        advance(trainer, 1)


def test_trainer_samples_units_as_units():
    plan = build_plan(
        "dp-sgd", units=20, unit_name="patient", batch_size=10, epochs=2, epsilon=8.0, delta=1e-3, accountant="rdp"
    )  # fmt: skip
    units = DataConfig(unit_ids=torch.arange(ROWS) // 3, rows_per_unit=2)
    trainer = a_trainer("dp-sgd", plan=plan, data=units)
    assert max(part.units.max().item() + 1 for batch in trainer for part in batch) <= 20
    assert advance(trainer).finish().unit == "patient"
    with pytest.raises(DataError, match="plan is for 20 units"):
        a_trainer("dp-sgd", plan=plan)
    with pytest.raises(PrivacyError, match="patient of every row"):
        a_trainer("dp-sgd", plan=a_plan(get_method("dp-sgd"), unit="patient"))


@pytest.mark.parametrize(("factor", "accepted"), [(0.99, False), (0.5, False), (1.5, True)])
def test_trainer_refuses_a_plan_that_costs_more_than_its_target(factor, accepted):
    """The plan as an editor would leave it: other noise, the same target."""
    honest = a_plan(get_method("dp-sgd"))
    noisier = (replace(phase, noise_multiplier=factor * phase.noise_multiplier) for phase in honest.phases)
    plan = replace(honest, phases=tuple(noisier))
    if accepted:
        assert a_trainer("dp-sgd", plan=plan).plan == plan
    else:
        with pytest.raises(PrivacyError, match="its target is 8"):
            a_trainer("dp-sgd", plan=plan)


def test_the_bar_shows_step_epoch_epsilon_ratio_accuracy_and_nothing_private():
    console = Console(file=io.StringIO(), force_terminal=True, width=160)
    plan = a_plan(get_method("tp-topk"))
    with live(plan, console) as show:
        result = advance(a_trainer(callbacks=[show])).finish()
    text = console.file.getvalue()
    for words in ("tp-topk", "15/15", "epoch 5/5", "epsilon", "active 18%", "held-out accuracy"):
        assert words in text
    assert f"epsilon ≤ {math.ceil(100 * plan_epsilon(plan)) / 100:g}" in text
    assert result.k == 7
    assert "loss" not in text
