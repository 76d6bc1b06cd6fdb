"""The loop: it is plain training without noise and clip, moves only the support, and keeps to itself."""

from __future__ import annotations

import io
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

from runs import ROWS, a_plan, a_trainer, advance, finished, loss_fn, network, rows, sgd, weights
from sparsedp import Callback, fit
from sparsedp.batch import MicroBatch, PerExampleLoss
from sparsedp.callbacks import live
from sparsedp.errors import DataError, ModelError, PrivacyError, SparseDPError
from sparsedp.loading import DataConfig
from sparsedp.methods import OffSupport, build_plan, get_method, list_methods
from sparsedp.privacy import mechanism, plan_epsilon
from sparsedp.privacy.plan import Plan
from sparsedp.randomness import SeededRandomness
from sparsedp.results import StepReport
from sparsedp.runs.record import EpochMetrics
from sparsedp.runs.run import Run
from sparsedp.sampling import LogicalBatch, PoissonSampler
from sparsedp.training.trainer import Trainer

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.2),
    "momentum": sgd,
    "decay": lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
}

SPARSE = [method for method in list_methods() if method.ranking is not None]

PATIENTS = torch.arange(ROWS) // 3


def noiseless(batch_size: int) -> Plan:
    """Its noise is left out by `no_noise`, and its clip reaches nothing."""
    return build_plan(
        get_method("dp-sgd"),
        units=ROWS,
        batch_size=batch_size,
        epochs=6,
        noise_multiplier=1.0,
        max_grad_norm=50.0,
    )


@pytest.fixture
def no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SeededRandomness, "add_rounded_gaussian", lambda self, bits, sums, key: None)
    monkeypatch.setattr(mechanism, "MARGIN_BITS", 40)


@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trainer_without_noise_and_clip_on_all_rows_is_plain_training(name: str) -> None:
    private = advance(a_trainer("dp-sgd", plan=noiseless(ROWS), optimizer=OPTIMIZERS[name])).model
    plain = network()
    optimizer = OPTIMIZERS[name](plain.parameters())
    inputs, targets = rows(1).tensors
    for _ in range(6):
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(inputs), targets).backward()
        optimizer.step()
    torch.testing.assert_close(weights(private), weights(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("no_noise")
def test_trainer_divides_a_sampled_batch_by_the_expected_size_never_by_its_own() -> None:
    private = advance(a_trainer("dp-sgd", plan=noiseless(20), seed=4)).model
    plain = network()
    optimizer = sgd(plain.parameters())
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
def test_trainer_moves_a_coordinate_off_the_support_only_where_the_method_coasts(method: Any) -> None:
    trainer = a_trainer(method.name, optimizer=OPTIMIZERS["decay"], options={"active_ratio": 0.3})
    moved_off_support = 0
    for batch in trainer:
        before = weights(trainer.model)
        trainer.step(batch)
        moved = weights(trainer.model) != before
        moved_off_support += int((moved & ~trainer.support.mask()).sum())
    assert (moved_off_support > 0) == (method.off_support is OffSupport.COASTS or method.denoise)


def test_trainer_that_prunes_zeroes_what_the_first_selection_freezes() -> None:
    trainer = advance(a_trainer("adadpigu", options={"prune": True}))
    frozen = ~trainer.support.mask()
    assert (weights(trainer.model)[frozen] == 0).all()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("seed", [0, None])
def test_trainer_leaves_the_global_generators_as_they_were(seed: int | None, workers: int) -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    finished(seed=seed, model=network(dropout=0.5), data=DataConfig(num_workers=workers))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002
    assert random.getstate() == before[2]


def test_trainer_with_a_seed_does_not_depend_on_the_callers_generators() -> None:
    found = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        found.append(weights(finished(model=network(dropout=0.5)).model))
    assert torch.equal(*found)


def test_trainer_tells_callbacks_every_step_and_epoch_in_order_and_the_end() -> None:
    class Heard(Callback):
        def __init__(self) -> None:
            self.steps, self.epochs, self.ends = [], [], []

        def on_step(self, report):
            self.steps.append(report)

        def on_epoch(self, metrics):
            self.epochs.append(metrics)

        def on_end(self, result):
            self.ends.append(result)

    heard, events = Heard(), []
    trainer = advance(a_trainer(callbacks=[heard, events.append, Callback()]))
    result = trainer.finish()
    trainer.finish()
    assert [event.step for event in events if isinstance(event, StepReport)] == list(range(15))
    epochs = [event for event in events if isinstance(event, EpochMetrics)]
    assert [(epoch.epoch, epoch.step) for epoch in epochs] == [(n, 3 * n) for n in range(1, 6)]
    assert [events.index(epoch) for epoch in epochs] == [3, 7, 11, 15, 19]
    assert tuple(epochs) == result.history
    assert (heard.epochs, heard.ends) == (epochs, [result])
    assert heard.steps == [event for event in events if isinstance(event, StepReport)]
    epsilons = [epoch.epsilon for epoch in epochs]
    assert epsilons == sorted(epsilons)
    assert 0.995 * 8 <= epsilons[-1] <= 8.0


@pytest.mark.parametrize("decay", [0.5, 1.0])
def test_trainer_with_an_average_evaluates_it_gives_it_back_and_trains_as_without(decay: float) -> None:
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


def test_trainer_keeps_a_metric_that_is_not_finite_as_none() -> None:
    result = finished(evaluate=lambda model: {"loss": float("inf"), "fine": 1})
    assert result.metrics == {"loss": None, "fine": 1.0}


def foreign_batch() -> LogicalBatch:
    """It would not be Poisson-sampled at the planned rate."""
    return LogicalBatch(0, SeededRandomness(0).secret((0,)), iter([MicroBatch(rows(1).tensors)]))


@pytest.mark.parametrize("which", ["a later one", "one again", "one it did not draw"])
def test_trainer_refuses_a_batch_that_it_did_not_draw_for_this_step(which: str) -> None:
    trainer = a_trainer()
    batches = list(trainer)
    if which == "one again":
        trainer.step(batches[0])
    given = {"a later one": batches[1], "one again": batches[0], "one it did not draw": foreign_batch()}
    with pytest.raises(SparseDPError, match="expected the one this trainer gave for step"):
        trainer.step(given[which])


def test_trainer_that_is_finished_takes_no_further_step() -> None:
    trainer = advance(a_trainer(), 3)
    batch = next(iter(trainer))
    result = trainer.finish()
    assert not result.complete
    assert result.ledger.steps == 3
    assert result.ledger.epsilon < result.epsilon <= 8.0
    assert trainer.finish() is result
    with pytest.raises(SparseDPError, match="finished or closed"):
        trainer.step(batch)


def test_trainer_refuses_a_batch_norm_that_is_switched_on_after_the_start() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    trainer = advance(a_trainer("dp-sgd", model=model.eval()), 2)
    model.train()
    with pytest.raises(ModelError, match="BatchNorm1d"):
        advance(trainer, 1)


def test_trainer_samples_units_as_units() -> None:
    plan = build_plan(
        "dp-sgd", units=20, unit_name="patient", batch_size=10, epochs=2, epsilon=8.0, delta=1e-3, accountant="rdp"
    )  # fmt: skip
    trainer = a_trainer("dp-sgd", plan=plan, data=DataConfig(unit_ids=PATIENTS, rows_per_unit=2))
    sizes = {part.units.max().item() + 1 for batch in trainer for part in batch}
    assert max(sizes) <= 20
    assert advance(trainer).finish().unit == "patient"
    with pytest.raises(DataError, match="plan is for 20 units"):
        a_trainer("dp-sgd", plan=plan)


def test_trainer_of_a_plan_for_patients_takes_the_patient_of_every_row() -> None:
    plan = a_plan(get_method("dp-sgd"), unit="patient")
    with pytest.raises(PrivacyError, match="patient of every row"):
        a_trainer("dp-sgd", plan=plan)
    assert a_trainer("dp-sgd", plan=plan, data=DataConfig(unit_ids=torch.arange(ROWS))).plan.unit == "patient"


@pytest.mark.parametrize(("factor", "accepted"), [(0.99, False), (0.5, False), (1.5, True)])
def test_trainer_refuses_a_plan_that_costs_more_than_its_target(factor: float, accepted: bool) -> None:
    """The plan as an editor would leave it: other noise, the same target."""
    honest = a_plan(get_method("dp-sgd"))
    noisier = (replace(phase, noise_multiplier=factor * phase.noise_multiplier) for phase in honest.phases)
    plan = replace(honest, phases=tuple(noisier))
    if accepted:
        assert a_trainer("dp-sgd", plan=plan).plan == plan
    else:
        with pytest.raises(PrivacyError, match="its target is 8"):
            a_trainer("dp-sgd", plan=plan)


def test_trainer_of_micro_batches_or_a_general_loss_gives_the_same_weights() -> None:
    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return loss_fn(model(batch[0]), batch[1])

    whole = weights(finished().model)
    cut = weights(finished(data=DataConfig(max_physical_batch=7)).model)
    torch.testing.assert_close(cut, whole, rtol=1e-5, atol=1e-6)
    general = Trainer(
        network(), rows(1), PerExampleLoss(loss), plan=a_plan(get_method("tp-topk")), optimizer=sgd, seed=0
    )
    assert torch.equal(weights(advance(general).model), whole)


def test_trainer_clears_the_state_of_an_optimizer_it_made_and_keeps_that_of_a_given_one() -> None:
    asked = {"method": get_method("tp-topk", active_ratio=0.1), "epsilon": 8.0, "delta": 1e-3, "epochs": 4}
    asked |= {"batch_size": 20, "seed": 0, "progress": False, "accountant": "rdp"}
    made: list[torch.optim.Optimizer] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.Adam(parameters, lr=0.01))
        return made[-1]

    model, other = network(), network()
    given = torch.optim.Adam(other.parameters(), lr=0.01)
    fit(model, rows(1), loss_fn, optimizer=make, **asked)
    fit(other, rows(1), loss_fn, optimizer=given, **asked)
    assert not made[0].state
    assert set(made[0].param_groups[0]["params"]) == set(model.parameters())
    assert all(state["exp_avg"].shape == parameter.shape for parameter, state in given.state.items())
    assert set(given.state) == set(other.parameters())
    assert torch.equal(weights(model), weights(other))


def scheduler_of_another_optimizer() -> Any:
    return torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(network().parameters(), lr=1))


@pytest.mark.parametrize(
    ("argument", "choice"),
    [
        ("optimizer", lambda p: "sgd"),
        ("lr_scheduler", lambda o, n: torch.optim.lr_scheduler.ReduceLROnPlateau(o)),
        ("lr_scheduler", scheduler_of_another_optimizer()),
        ("ema_decay", 1.1),
        ("engine", "magic"),
    ],
)
def test_trainer_refuses_a_wrong_choice_before_anything_is_written(
    argument: str, choice: Any, tmp_path: Path
) -> None:
    with pytest.raises(SparseDPError, match=argument.removeprefix("lr_")):
        a_trainer(out=tmp_path / "run", **{argument: choice})
    assert list(tmp_path.iterdir()) == []


def test_the_bar_shows_step_epoch_epsilon_ratio_accuracy_and_nothing_private() -> None:
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


def test_a_run_folder_reads_back_what_was_written(tmp_path: Path) -> None:
    trainer = a_trainer(out=tmp_path / "run")
    result = advance(trainer).finish()
    run = Run.open(tmp_path / "run")
    assert run.epochs == result.history
    assert run.plan == result.plan
    assert run.record["status"] == "finished"
    assert run.checkpoint.step == 15
    (run.path / "metrics.jsonl").write_text('{"epoch": 1')
    with pytest.raises(DataError, match="damaged"):
        assert Run.open(run.path).epochs
    (run.path / "record.json").write_text("{")
    with pytest.raises(DataError, match="not JSON"):
        assert Run.open(run.path).record
    (run.path / "record.json").unlink()
    with pytest.raises(DataError, match="missing"):
        assert Run.open(run.path).record
