"""The loop: it is plain training without noise and clip, moves only the support, and keeps to itself."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from runs import ROWS, a_plan, a_trainer, advance, loss_fn, network, rows, weights
from sparsedp import Callback
from sparsedp.batch import MicroBatch, PerExampleLoss
from sparsedp.errors import DataError, ModelError, SparseDPError
from sparsedp.loading import DataConfig
from sparsedp.methods import MethodOptions, OffSupport, build_plan, get_method, list_methods
from sparsedp.privacy import mechanism
from sparsedp.privacy.plan import Plan
from sparsedp.randomness import SeededRandomness
from sparsedp.results import Event, StepReport
from sparsedp.runs.checkpoint import read_checkpoint
from sparsedp.runs.record import EpochMetrics
from sparsedp.sampling import LogicalBatch, PoissonSampler
from sparsedp.training.trainer import Trainer

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.2),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9),
    "decay": lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
}
SPARSE = [method for method in list_methods() if method.ranking is not None]


def noiseless(batch_size: int) -> Plan:
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
def test_without_noise_and_clip_on_all_rows_it_is_plain_training(name: str) -> None:
    trainer = a_trainer("dp-sgd", plan=noiseless(ROWS), optimizer=OPTIMIZERS[name])
    private = advance(trainer).model
    plain = network()
    optimizer = OPTIMIZERS[name](plain.parameters())
    inputs, targets = rows(1).tensors
    for _ in range(6):
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(inputs), targets).backward()
        optimizer.step()
    torch.testing.assert_close(weights(private), weights(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("no_noise")
def test_a_sampled_batch_is_divided_by_the_expected_size_never_by_its_own() -> None:
    private = advance(a_trainer("dp-sgd", plan=noiseless(20), seed=4)).model
    plain = network()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.2, momentum=0.9)
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


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_frozen_coordinates_keep_their_bits_for_a_whole_phase(name: str) -> None:
    trainer = a_trainer("tp-topk", optimizer=OPTIMIZERS[name])
    first = trainer.plan.first_step("main")
    advance(trainer, first)
    at_switch = weights(trainer.model)
    advance(trainer)
    frozen = ~trainer.support.mask()
    after = weights(trainer.model)
    assert int(frozen.sum()) > 20
    assert torch.equal(after[frozen].view(torch.int32), at_switch[frozen].view(torch.int32))
    assert not torch.equal(after[~frozen], at_switch[~frozen])


@pytest.mark.parametrize("method", SPARSE, ids=lambda method: method.name)
def test_a_coordinate_moves_off_the_support_only_where_the_table_says_it_coasts(method: object) -> None:
    trainer = a_trainer(method.name, optimizer=OPTIMIZERS["decay"], options=MethodOptions(active_ratio=0.3))
    moved_off_support = 0
    for batch in trainer:
        before = weights(trainer.model)
        trainer.step(batch)
        moved = weights(trainer.model) != before
        moved_off_support += int((moved & ~trainer.support.mask()).sum())
    assert (moved_off_support > 0) == (method.off_support is OffSupport.COASTS or method.denoise)


def test_pruning_zeroes_what_the_first_selection_freezes() -> None:
    trainer = advance(a_trainer("adadpigu", options=MethodOptions(prune=True)))
    frozen = ~trainer.support.mask()
    assert (weights(trainer.model)[frozen] == 0).all()


@pytest.mark.parametrize("workers", [0, 1])
def test_the_global_generators_are_left_as_they_were(workers: int) -> None:
    for seed in (0, None):
        before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
        trainer = a_trainer(seed=seed, model=network(dropout=0.5), data=DataConfig(num_workers=workers))
        advance(trainer).finish()
        assert torch.equal(torch.get_rng_state(), before[0])
        assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002
        assert random.getstate() == before[2]


def test_a_seeded_run_does_not_depend_on_the_callers_generators() -> None:
    found = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        found.append(weights(advance(a_trainer(model=network(dropout=0.5))).model))
    assert torch.equal(*found)


def test_unseeded_runs_differ() -> None:
    one, other = (weights(advance(a_trainer(seed=None), 2).model) for _ in range(2))
    assert not torch.equal(one, other)


def test_callbacks_see_every_step_and_epoch_in_order() -> None:
    events: list[Event] = []
    trainer = advance(a_trainer(callbacks=[events.append]))
    steps = [event.step for event in events if isinstance(event, StepReport)]
    epochs = [event for event in events if isinstance(event, EpochMetrics)]
    assert steps == list(range(15))
    assert [epoch.step for epoch in epochs] == [3, 6, 9, 12, 15]
    assert [epoch.epoch for epoch in epochs] == [1, 2, 3, 4, 5]
    assert trainer.history == tuple(epochs)
    assert events.index(epochs[0]) == 3
    epsilons = [epoch.epsilon for epoch in epochs]
    assert epsilons == sorted(epsilons)
    assert epsilons[-1] == pytest.approx(8.0, rel=0.005)
    assert epsilons[-1] <= 8.0


def test_the_average_is_what_is_evaluated_and_given_back() -> None:
    evaluated = []
    trainer = a_trainer(ema_decay=0.5, evaluate=lambda model: {"norm": float(weights(model).norm())})
    average = weights(trainer.model)
    for done, batch in enumerate(trainer):
        trainer.step(batch)
        average = average.lerp(weights(trainer.model), 1 - min(0.5, (1 + done) / (10 + done)))
        evaluated.append(float(average.norm()))
    result = trainer.finish()
    torch.testing.assert_close(weights(result.model), average)
    assert [epoch.metrics["norm"] for epoch in result.history] == pytest.approx(evaluated[2::3], rel=1e-5)


def test_an_average_without_decay_is_of_the_whole_run_each_step_by_its_number() -> None:
    trainer = a_trainer(ema_decay=1.0)
    seen = []
    for batch in trainer:
        trainer.step(batch)
        seen.append(weights(trainer.model))
    average = sum(number * one for number, one in enumerate(seen, start=1)) / sum(range(1, len(seen) + 1))
    torch.testing.assert_close(weights(trainer.finish().model), average)


def test_an_average_does_not_change_the_training_itself() -> None:
    plain = advance(a_trainer())
    averaged = advance(a_trainer(ema_decay=0.9))
    assert torch.equal(weights(plain.model), weights(averaged.model))


def test_a_metric_that_is_not_finite_is_kept_as_none() -> None:
    result = advance(a_trainer(evaluate=lambda model: {"loss": float("inf"), "fine": 1})).finish()
    assert result.metrics == {"loss": None, "fine": 1.0}


def test_batches_must_be_taken_once_and_in_order() -> None:
    trainer = a_trainer()
    batches = list(trainer)
    with pytest.raises(SparseDPError, match="gave for step 0"):
        trainer.step(batches[1])
    trainer = a_trainer()
    batches = list(trainer)
    trainer.step(batches[0])
    with pytest.raises(SparseDPError, match="gave for step 1"):
        trainer.step(batches[0])


def test_a_batch_that_was_not_drawn_by_the_trainer_is_refused() -> None:
    """It would not be Poisson-sampled at the planned rate."""
    trainer = a_trainer()
    next(iter(trainer))
    with pytest.raises(SparseDPError, match="gave for step 0"):
        trainer.step(LogicalBatch(0, SeededRandomness(0).secret((0,)), iter([MicroBatch(rows(1).tensors)])))


def test_a_finished_trainer_takes_no_further_step() -> None:
    trainer = advance(a_trainer(), 3)
    batch = next(iter(trainer))
    result = trainer.finish()
    assert not result.complete
    assert result.ledger.steps == 3
    assert result.ledger.epsilon < result.epsilon <= 8.0
    assert trainer.finish() is result
    with pytest.raises(SparseDPError, match="finished or closed"):
        trainer.step(batch)


class Counting(nn.Module):
    """Counts its forward passes in a buffer, as BatchNorm does; `sly` ones only once the check is over."""

    def __init__(self, sly: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.sly = sly
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.sly:
            self.passes += 1
        return self.layer(inputs)


@pytest.mark.parametrize("sly", [False, True])
def test_a_buffer_that_watches_the_data_is_refused_and_never_saved(sly: bool, tmp_path: Path) -> None:
    model = Counting(sly)

    def train() -> None:
        with a_trainer("dp-sgd", model=model, out=tmp_path / "run") as trainer:
            model.sly = False
            advance(trainer)

    with pytest.raises(SparseDPError, match="passes"):
        train()
    assert sly or list(tmp_path.iterdir()) == []
    if sly:
        assert read_checkpoint(tmp_path / "run" / "checkpoint.safetensors").state["model"]["passes"] == 0


def test_a_batch_norm_switched_on_after_the_start_is_refused() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    trainer = a_trainer("dp-sgd", model=model.eval())
    advance(trainer, 2)
    model.train()
    with pytest.raises(ModelError, match="BatchNorm1d"):
        advance(trainer, 1)


def test_units_are_sampled_as_units() -> None:
    row = get_method("dp-sgd")
    plan = build_plan(
        row,
        units=20,
        batch_size=10,
        epochs=2,
        epsilon=8.0,
        delta=1e-3,
        max_grad_norm=1.0,
        unit_name="patient",
        accountant="rdp",
    )
    patients = torch.arange(ROWS) // 3
    trainer = a_trainer("dp-sgd", plan=plan, data=DataConfig(unit_ids=patients, rows_per_unit=2))
    sizes = {part.units.max().item() + 1 for batch in trainer for part in batch}
    assert max(sizes) <= 20
    result = advance(trainer).finish()
    assert result.unit == "patient"
    with pytest.raises(DataError, match="plan is for 20 units"):
        a_trainer("dp-sgd", plan=plan)


def test_micro_batches_change_nothing() -> None:
    whole = advance(a_trainer(engine="reference"))
    cut = advance(a_trainer(engine="reference", data=DataConfig(max_physical_batch=7)))
    torch.testing.assert_close(weights(whole.model), weights(cut.model), rtol=1e-5, atol=1e-6)


def test_a_general_loss_trains_too() -> None:
    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return loss_fn(model(batch[0]), batch[1])

    row = get_method("tp-topk")
    one = advance(a_trainer())
    other = Trainer(
        network(),
        rows(1),
        PerExampleLoss(loss),
        plan=a_plan(row),
        optimizer=OPTIMIZERS["momentum"],
        seed=0,
    )
    assert torch.equal(weights(one.model), weights(advance(other).model))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"optimizer": lambda p: "sgd"}, "optimizer: got str"),
        ({"lr_scheduler": lambda o, n: torch.optim.lr_scheduler.ReduceLROnPlateau(o)}, "needs no metric"),
        (
            {
                "lr_scheduler": torch.optim.lr_scheduler.ConstantLR(
                    torch.optim.SGD(network().parameters(), lr=1)
                )
            },
            "another optimizer",
        ),
        ({"ema_decay": 1.1}, "ema_decay"),
        ({"engine": "magic"}, "engine: got 'magic'"),
    ],
)
def test_wrong_choices_are_refused_before_anything_is_written(
    changed: dict[str, object], words: str, tmp_path: Path
) -> None:
    with pytest.raises(SparseDPError, match=words):
        a_trainer(out=tmp_path / "run", **changed)
    assert list(tmp_path.iterdir()) == []


def test_a_callback_hears_of_every_step_every_epoch_and_the_end_and_a_function_of_the_first_two():
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
    assert [report.step for report in heard.steps] == list(range(15))
    assert tuple(heard.epochs) == result.history
    assert heard.ends == [result]
    assert events == sorted([*heard.steps, *heard.epochs], key=events.index)
    assert len(events) == 20
