"""A run that was cut goes on: seeded to the same bits, unseeded within its budget."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from every_day import by_method
from runs import ROWS, a_trainer, advance, network, weights
from sparsedp.errors import DataError, PrivacyError, SparseDPError
from sparsedp.loading import DataConfig
from sparsedp.methods import MethodOptions, build_plan, get_method, list_methods
from sparsedp.privacy.ledger import Ledger
from sparsedp.results import Event, Result, StepReport

pytestmark = pytest.mark.usefixtures("checked_once")

METHODS = [method.name for method in list_methods()]
EPOCHS = 70
"""210 steps: ledger blocks of two steps, so that there is a middle of a block."""


def cosine(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def public_files(run: Path) -> dict[str, object]:
    record = json.loads((run / "record.json").read_text())
    del record["timing"], record["ledger"]
    return {"record": record, "metrics": (run / "metrics.jsonl").read_text()}


def assert_same_outcome(one: Result, other: Result) -> None:
    assert torch.equal(weights(one.model), weights(other.model))
    assert one.support == other.support
    assert one.supports == other.supports
    assert one.history == other.history
    assert one.metrics == other.metrics
    assert one.epsilon == other.epsilon
    assert one.ledger.steps == other.ledger.steps
    assert one.out is not None
    assert other.out is not None
    assert public_files(one.out) == public_files(other.out)


@pytest.mark.parametrize("method", by_method(METHODS))
def test_a_seeded_run_cut_in_several_places_ends_with_the_same_bits(method: str, tmp_path: Path) -> None:
    whole = advance(a_trainer(method, out=tmp_path / "whole")).finish()
    cut = tmp_path / "cut"
    advance(a_trainer(method, out=cut), 4).close()
    for steps in (1, 0, 5):
        advance(a_trainer(method, out=cut, resume=True), steps).close()
    assert_same_outcome(whole, advance(a_trainer(method, out=cut, resume=True)).finish())


@pytest.mark.nightly
def test_a_seeded_run_cut_anywhere_replays_and_charges_each_step_once(tmp_path: Path) -> None:
    """Blocks of two steps, the first phase 63: before the first step, between blocks, inside them, at the end."""
    make = {"epochs": EPOCHS, "ema_decay": 0.9, "lr_scheduler": cosine}
    whole = advance(a_trainer(out=tmp_path / "whole", **make)).finish()
    cut = tmp_path / "cut"
    trainer, lost = a_trainer(out=cut, **make), 0
    for steps in (0, 1, 2, 3, 62, 64, 101, 150, 209):
        advance(trainer, steps - trainer.position).close()
        charged = Ledger.read(cut / "ledger.jsonl").charged
        assert steps <= charged <= steps + 1
        trainer = a_trainer(out=cut, resume=True, **make)
        assert charged - 2 <= trainer.position <= steps
        lost += steps - trainer.position
    assert lost > 2
    assert_same_outcome(whole, advance(trainer).finish())


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "rmsprop"])
def test_other_optimizers_and_dropout_replay_to_the_bit(optimizer: str, tmp_path: Path) -> None:
    make = {
        "optimizer": {
            "adam": lambda p: torch.optim.Adam(p, lr=0.05),
            "adamw": lambda p: torch.optim.AdamW(p, lr=0.05),
            "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
        }[optimizer],
        "options": MethodOptions(active_ratio=0.15),
    }
    whole = advance(a_trainer(out=tmp_path / "whole", model=network(dropout=0.4), **make)).finish()
    cut = tmp_path / "cut"
    advance(a_trainer(out=cut, model=network(dropout=0.4), **make), 7).close()
    resumed = a_trainer(out=cut, resume=True, model=network(1, dropout=0.4), **make)
    assert_same_outcome(whole, advance(resumed).finish())


def test_an_unseeded_run_counts_what_it_lost_and_never_takes_a_step_twice(tmp_path: Path) -> None:
    make = {"epochs": EPOCHS, "seed": None, "lr_scheduler": cosine}
    run = tmp_path / "run"
    taken = []
    trainer = a_trainer(out=run, callbacks=[taken.append], **make)
    advance(trainer, 51).close()
    for steps in (0, 3, 40):
        trainer = a_trainer(out=run, resume=True, callbacks=[taken.append], **make)
        assert trainer.position == Ledger.read(run / "ledger.jsonl").charged
        advance(trainer, steps).close()
    last = a_trainer(out=run, resume=True, callbacks=[taken.append], **make)
    result = advance(last).finish()
    steps_taken = [event.step for event in taken if hasattr(event, "released")]
    assert steps_taken == sorted(set(steps_taken))
    assert len(steps_taken) == 210 - 3
    assert result.ledger.steps == 210
    assert result.epsilon <= 8.0
    assert result.complete
    learning_rate = next(e.learning_rates[0] for e in taken if hasattr(e, "released") and e.step == 209)
    assert learning_rate == pytest.approx(0.1 * (1 + math.cos(math.pi * 209 / 210)))


def test_an_unseeded_run_draws_fresh_noise_and_batches_after_a_resume(tmp_path: Path) -> None:
    """Two resumes of copies of one run go different ways: nothing is replayed."""
    make = {"epochs": EPOCHS, "seed": None}
    advance(a_trainer(out=tmp_path / "one", **make), 5).close()
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    after = [
        weights(advance(a_trainer(out=tmp_path / name, resume=True, **make), 1).model)
        for name in ("one", "other")
    ]
    assert not torch.equal(*after)


def test_a_finished_run_resumes_to_the_same_result_without_another_step(tmp_path: Path) -> None:
    one = advance(a_trainer(out=tmp_path / "run")).finish()
    again = a_trainer(out=tmp_path / "run", resume=True)
    assert list(again) == []
    assert_same_outcome(one, again.finish())


def test_a_paused_run_goes_on_where_it_was(tmp_path: Path) -> None:
    whole = advance(a_trainer(out=tmp_path / "whole", epochs=EPOCHS)).finish()
    cut = tmp_path / "cut"
    with a_trainer(out=cut, epochs=EPOCHS) as trainer:
        advance(trainer, 33)
    assert json.loads((cut / "record.json").read_text())["status"] == "stopped"
    resumed = a_trainer(out=cut, resume=True, epochs=EPOCHS)
    assert resumed.position == 33
    assert_same_outcome(whole, advance(resumed).finish())


def test_only_one_process_goes_on_with_a_run(tmp_path: Path) -> None:
    first = a_trainer(out=tmp_path / "run")
    with pytest.raises(PrivacyError, match="in use"):
        a_trainer(out=tmp_path / "run", resume=True)
    first.close()


REFUSED: dict[str, tuple[dict[str, object], type[SparseDPError], str]] = {
    "another model": ({"model": nn.Linear(5, 3)}, SparseDPError, "another model|dimension"),
    "another plan": ({"epochs": 6}, PrivacyError, "another plan"),
    "another seed": ({"seed": 1}, SparseDPError, "seed was 0 and is 1"),
    "no seed": ({"seed": None}, SparseDPError, "seed was 0 and is null"),
    "another optimizer": (
        {"optimizer": lambda p: torch.optim.Adam(p)},
        SparseDPError,
        'optimizer.class was "SGD" and is "Adam"',
    ),
    "another learning rate": (
        {"optimizer": lambda p: torch.optim.SGD(p, lr=0.4, momentum=0.9)},
        SparseDPError,
        r"optimizer.groups.0.lr was 0.2 and is 0.4",
    ),
    "a parameter in another group": (
        {"optimizer": lambda p: torch.optim.SGD([{"params": list(p)[::-1]}], lr=0.2, momentum=0.9)},
        SparseDPError,
        "details.parameters",
    ),
    "another average": ({"ema_decay": 0.9}, SparseDPError, "ema_decay was null and is 0.9"),
    "another engine": ({"engine": "reference"}, SparseDPError, 'engine was "bookkeeping" and is "reference"'),
    "another scheduler": (
        {"lr_scheduler": cosine},
        SparseDPError,
        'scheduler was null and is "CosineAnnealingLR"',
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_belong_to_the_run_is_refused(what: str, tmp_path: Path) -> None:
    advance(a_trainer(out=tmp_path / "run"), 4).close()
    changed, error, words = REFUSED[what]
    before = (tmp_path / "run" / "ledger.jsonl").read_bytes()
    with pytest.raises(error, match=words):
        a_trainer(out=tmp_path / "run", resume=True, **changed)
    assert (tmp_path / "run" / "ledger.jsonl").read_bytes() == before


def test_a_finished_run_is_not_resumed_at_another_rate_and_keeps_its_record(tmp_path: Path) -> None:
    advance(a_trainer(out=tmp_path / "run")).finish()
    before = (tmp_path / "run" / "record.json").read_bytes()
    with pytest.raises(SparseDPError, match=r"lr was 0.2 and is 0.4"):
        a_trainer(out=tmp_path / "run", resume=True, optimizer=lambda p: torch.optim.SGD(p, 0.4, 0.9))
    assert (tmp_path / "run" / "record.json").read_bytes() == before


def test_a_schedule_of_another_length_is_refused(tmp_path: Path) -> None:
    advance(a_trainer(out=tmp_path / "run", lr_scheduler=cosine), 4).close()
    with pytest.raises(SparseDPError, match=r"details.schedule.state.T_max was 15 and is 30"):
        a_trainer(out=tmp_path / "run", resume=True, lr_scheduler=lambda one, steps: cosine(one, 2 * steps))


def test_another_number_of_rows_of_a_unit_is_refused(tmp_path: Path) -> None:
    row, patients = get_method("dp-sgd"), torch.arange(ROWS) // 3
    plan = build_plan(
        row, units=20, batch_size=10, epochs=2, epsilon=8.0, delta=1e-3, max_grad_norm=1.0, unit_name="patient",
        accountant="rdp",
    )  # fmt: skip
    advance(
        a_trainer("dp-sgd", plan=plan, data=DataConfig(unit_ids=patients), out=tmp_path / "run"), 2
    ).close()
    loading = DataConfig(unit_ids=patients, rows_per_unit=2)
    with pytest.raises(SparseDPError, match="rows_per_unit was 1 and is 2"):
        a_trainer("dp-sgd", plan=plan, data=loading, out=tmp_path / "run", resume=True)


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    advance(a_trainer(out=tmp_path / "run"), 4).close()
    file = tmp_path / "run" / "checkpoint.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match="damaged"):
        a_trainer(out=tmp_path / "run", resume=True)


def test_a_ledger_that_lost_lines_since_the_checkpoint_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparsedp.training.recorder.SAVE_EVERY", 0.0)
    advance(a_trainer(out=tmp_path / "run"), 4).close()
    file = tmp_path / "run" / "ledger.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(PrivacyError, match="lines were removed"):
        a_trainer(out=tmp_path / "run", resume=True)


def test_a_missing_run_or_ledger_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no run"):
        a_trainer(out=tmp_path / "nothing", resume=True)
    with pytest.raises(SparseDPError, match="got no out"):
        a_trainer(resume=True)
    a_trainer(out=tmp_path / "run").close()
    (tmp_path / "run" / "ledger.jsonl").unlink()
    with pytest.raises(PrivacyError, match="no ledger"):
        a_trainer(out=tmp_path / "run", resume=True)


def test_a_line_cut_short_in_the_ledger_counts_as_spent(tmp_path: Path) -> None:
    run = tmp_path / "run"
    advance(a_trainer(out=run, seed=None), 4).close()
    with open(run / "ledger.jsonl", "ab") as file:
        file.write(b'{"first_step":4,"ha')
    taken: list[Event] = []
    resumed = a_trainer(out=run, seed=None, resume=True, callbacks=[taken.append])
    assert resumed.position == 5
    result = advance(resumed).finish()
    assert [event.step for event in taken if isinstance(event, StepReport)] == list(range(5, 15))
    assert result.ledger.steps == 15
    assert result.ledger.epsilon <= 8.0
