"""A run that was cut goes on: seeded to the same bits, unseeded within its budget, whatever has cut it."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import killed_run
from runs import CLASSES, FEATURES, SETUPS, a_plan, a_trainer, advance, by_method, finished, network, weights
from sparsedp._files import write_atomically
from sparsedp.errors import DataError, ModelError, PrivacyError, SparseDPError
from sparsedp.loading import DataConfig
from sparsedp.methods import get_method, list_methods
from sparsedp.privacy.ledger import Ledger
from sparsedp.results import Event, Result, StepReport
from sparsedp.runs import directory
from sparsedp.runs.directory import CHECKPOINT
from sparsedp.runs.verify import verify

pytestmark = pytest.mark.usefixtures("checked_once")

EPOCHS = 70
"""210 steps: ledger blocks of two steps, so that there is a middle of a block."""


def cosine(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def with_optimizer(make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[], dict[str, Any]]:
    """A network with dropout under that optimizer."""
    return lambda: {
        "model": network(dropout=0.4), "optimizer": make, "options": {"active_ratio": 0.15}
    }  # fmt: skip


def public_files(run: Path) -> dict[str, object]:
    record = json.loads((run / "record.json").read_text())
    del record["timing"], record["ledger"]
    return {"record": record, "metrics": (run / "metrics.jsonl").read_text()}


def assert_same_outcome(one: Result, other: Result) -> None:
    assert torch.equal(weights(one.model), weights(other.model))
    for (name, found), wanted in zip(other.model.named_buffers(), one.model.buffers(), strict=True):
        assert torch.equal(found, wanted), name
    assert one.support == other.support
    assert one.supports == other.supports
    assert one.history == other.history
    assert one.metrics == other.metrics
    assert one.epsilon == other.epsilon
    assert one.ledger.steps == other.ledger.steps
    assert one.out is not None
    assert other.out is not None
    assert public_files(one.out) == public_files(other.out)


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    **{method.name: lambda name=method.name: {"method": name} for method in list_methods()},
    **SETUPS,
    "table-adafest-adam": lambda: {**SETUPS["table-adafest"](), "optimizer": killed_run.adam},
    "average, schedule": lambda: {"ema_decay": 0.9, "lr_scheduler": cosine},
    "adam": with_optimizer(lambda p: torch.optim.Adam(p, lr=0.05)),
    "adamw": with_optimizer(lambda p: torch.optim.AdamW(p, lr=0.05)),
    "rmsprop": with_optimizer(lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5)),
}
METHODS = by_method(method.name for method in list_methods())
OTHERS = [name for name in CASES if name not in {method.name for method in list_methods()}]


@pytest.mark.parametrize("case", [*METHODS, *OTHERS])
def test_resume_of_a_seeded_run_cut_in_several_places_ends_with_the_same_bits(
    case: str, tmp_path: Path
) -> None:
    whole = finished(**CASES[case](), out=tmp_path / "whole")
    cut = tmp_path / "cut"
    advance(a_trainer(**CASES[case](), out=cut), 4).close()
    for steps in (1, 0, 5):
        make = {"model": network(1), **CASES[case]()}  # its weights are the run's, not the given ones
        advance(a_trainer(**make, out=cut, resume=True), steps).close()
    assert_same_outcome(whole, finished(**CASES[case](), out=cut, resume=True))


def test_resume_of_an_unseeded_run_counts_what_it_lost_and_never_takes_a_step_twice(tmp_path: Path) -> None:
    make = {"epochs": EPOCHS, "seed": None, "lr_scheduler": cosine}
    run = tmp_path / "run"
    taken = []
    trainer = a_trainer(out=run, callbacks=[taken.append], **make)
    advance(trainer, 51).close()
    for steps in (0, 3, 40):
        trainer = a_trainer(out=run, resume=True, callbacks=[taken.append], **make)
        assert trainer.position == Ledger.read(run / "ledger.jsonl").charged
        advance(trainer, steps).close()
    result = finished(out=run, resume=True, callbacks=[taken.append], **make)
    steps_taken = [event.step for event in taken if isinstance(event, StepReport)]
    assert steps_taken == sorted(set(steps_taken))
    assert len(steps_taken) == 210 - 3
    assert result.ledger.steps == 210
    assert result.epsilon <= 8.0
    assert result.complete
    last = next(e.learning_rates[0] for e in taken if isinstance(e, StepReport) and e.step == 209)
    assert last == pytest.approx(0.1 * (1 + math.cos(math.pi * 209 / 210)))


def test_resume_of_an_unseeded_run_draws_fresh_noise_and_batches(tmp_path: Path) -> None:
    """Two resumes of copies of one run go different ways: nothing is replayed."""
    make = {"epochs": EPOCHS, "seed": None}
    one, other = tmp_path / "one", tmp_path / "other"
    advance(a_trainer(out=one, **make), 5).close()
    shutil.copytree(one, other)
    after = [weights(advance(a_trainer(out=out, resume=True, **make), 1).model) for out in (one, other)]
    assert not torch.equal(*after)


def test_resume_of_a_finished_run_gives_its_result_without_another_step(tmp_path: Path) -> None:
    one = finished(out=tmp_path / "run")
    again = a_trainer(out=tmp_path / "run", resume=True)
    assert list(again) == []
    assert_same_outcome(one, again.finish())


def test_resume_of_a_paused_run_goes_on_where_it_was(tmp_path: Path) -> None:
    """In the middle of a block, of which nothing is lost."""
    with a_trainer(out=tmp_path / "cut", epochs=EPOCHS) as trainer:
        advance(trainer, 33)
    assert json.loads((tmp_path / "cut" / "record.json").read_text())["status"] == "stopped"
    resumed = a_trainer(out=tmp_path / "cut", resume=True, epochs=EPOCHS)
    assert resumed.position == 33
    whole = advance(a_trainer(epochs=EPOCHS), 40)
    assert torch.equal(weights(advance(resumed, 7).model), weights(whole.model))


def reversed_order(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": list(parameters)[::-1]}], lr=0.2, momentum=0.9)


REFUSED: dict[str, tuple[dict[str, object], type[SparseDPError], str]] = {
    "another model": ({"model": nn.Linear(5, 3)}, SparseDPError, "another model|dimension"),
    "another plan": ({"epochs": 6}, PrivacyError, "another plan"),
    "another seed": ({"seed": 1}, SparseDPError, "seed"),
    "no seed": ({"seed": None}, SparseDPError, "seed"),
    "another optimizer": ({"optimizer": torch.optim.Adam}, SparseDPError, "optimizer.class"),
    "another rate": ({"optimizer": lambda p: torch.optim.SGD(p, 0.4, 0.9)}, SparseDPError, "groups.0.lr"),
    "another order of parameters": ({"optimizer": reversed_order}, SparseDPError, "details.parameters"),
    "another average": ({"ema_decay": 0.9}, SparseDPError, "ema_decay"),
    "another engine": ({"engine": "reference"}, SparseDPError, "engine"),
    "other rows of a unit": ({"data": DataConfig(rows_per_unit=2)}, SparseDPError, "rows_per_unit"),
    "no scheduler": ({"lr_scheduler": None}, SparseDPError, "scheduler"),
    "a longer schedule": ({"lr_scheduler": lambda o, n: cosine(o, 2 * n)}, SparseDPError, "schedule.*T_max"),
}


@pytest.mark.parametrize("after", [4, 15])
@pytest.mark.parametrize("what", REFUSED)
def test_resume_with_what_does_not_belong_to_the_run_is_refused_and_leaves_it_as_it_was(
    what: str, after: int, tmp_path: Path
) -> None:
    """Cut or finished; and the run can be resumed although the error, with all its frames, is kept."""
    make, out = {"lr_scheduler": cosine, "out": tmp_path / "run"}, tmp_path / "run"
    advance(a_trainer(**make), after).close()
    changed, error, words = REFUSED[what]
    before = [(out / name).read_bytes() for name in ("ledger.jsonl", "record.json")]
    with pytest.raises(error, match=words) as kept:
        a_trainer(**{**make, "resume": True, **changed})
    assert [(out / name).read_bytes() for name in ("ledger.jsonl", "record.json")] == before
    assert finished(**make, resume=True).complete
    assert kept.value is not None


class TwoLayers(nn.Module):
    """Two layers of one shape, whose parameters come in the order they are made in."""

    def __init__(self, names: tuple[str, str]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(5, 3) for name in names})

    def forward(self, rows: Tensor) -> Tensor:
        """Both see the rows."""
        found: Tensor = self.layers["query"](rows) - self.layers["value"](rows)
        return found


def test_resume_of_a_model_with_its_parameters_in_another_order_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "run"
    advance(a_trainer("dp-sgd", model=TwoLayers(("query", "value")), out=out), 3).close()
    with pytest.raises(ModelError, match="in another order"):
        a_trainer("dp-sgd", model=TwoLayers(("value", "query")), out=out, resume=True)


def test_resume_with_a_ledger_that_lost_lines_since_the_checkpoint_is_refused(tmp_path: Path) -> None:
    trainer = advance(a_trainer(out=tmp_path / "run"), 4)
    trainer.save()
    trainer.close()
    file = tmp_path / "run" / "ledger.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(PrivacyError, match="lines were removed"):
        a_trainer(out=tmp_path / "run", resume=True)


def test_resume_without_a_run_or_ledger_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing"):
        a_trainer(out=tmp_path / "nothing", resume=True)
    with pytest.raises(SparseDPError, match="resume"):
        a_trainer(resume=True)
    a_trainer(out=tmp_path / "run").close()
    (tmp_path / "run" / "ledger.jsonl").unlink()
    with pytest.raises(PrivacyError, match="ledger"):
        a_trainer(out=tmp_path / "run", resume=True)


def test_resume_with_a_line_cut_short_in_the_ledger_counts_it_as_spent(tmp_path: Path) -> None:
    run = tmp_path / "run"
    advance(a_trainer(out=run, seed=None), 4).close()
    with open(run / "ledger.jsonl", "ab") as file:
        file.write(b'{"first_step":4,"ha')
    taken: list[Event] = []
    result = finished(out=run, seed=None, resume=True, callbacks=[taken.append])
    assert [event.step for event in taken if isinstance(event, StepReport)] == list(range(5, 15))
    assert result.ledger.steps == 15
    assert result.ledger.epsilon <= 8.0


class Fragile(nn.Module):
    """Raises in a forward once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.broken = False

    def forward(self, x: Tensor) -> Tensor:
        if self.broken:
            raise RuntimeError("out of memory")
        return self.layer(x)


@pytest.mark.parametrize("seed", [0, None])
@pytest.mark.parametrize("step", [1, 2, 6])
def test_resume_after_a_model_that_raised_in_a_step_goes_on_with_what_was_paid_for(
    step: int, seed: int | None, tmp_path: Path
) -> None:
    """The step was charged, counted from 1; a seeded run replays it."""
    model, make = Fragile(), {"plan": a_plan(get_method("dp-sgd"), epochs=4), "seed": seed}
    trainer = advance(a_trainer(model=model, out=tmp_path / "cut", **make), step - 1)
    model.broken = True
    with pytest.raises(RuntimeError, match="out of memory"), trainer:
        advance(trainer, 1)
    trainer = a_trainer(model=Fragile(), out=tmp_path / "cut", resume=True, **make)
    assert trainer.position >= step or seed is not None
    result = advance(trainer).finish()
    assert result.complete
    assert result.ledger.steps == 12
    if seed is not None:
        assert torch.equal(weights(result.model), weights(finished(model=Fragile(), **make).model))


def test_resume_after_the_disk_was_full_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    trainer = advance(a_trainer("dp-sgd", out=out), 3)

    def full(path: Path, content: bytes) -> None:
        if path.name == CHECKPOINT:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_atomically(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(directory, "write_atomically", full)
        for _ in range(3):
            with pytest.raises(OSError, match="No space"):
                trainer.save()
    assert verify(out, independent=False).passed
    trainer.close()
    assert finished("dp-sgd", out=out, resume=True).complete


def test_resume_after_two_kills_before_a_checkpoint_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    trainer = advance(a_trainer("dp-sgd", out=out), 3)

    def killed(path: Path, content: bytes) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(directory, "write_atomically", killed)
        with pytest.raises(KeyboardInterrupt):
            trainer.save()
        trainer.close()  # as the end of the process does
        with pytest.raises(KeyboardInterrupt):
            a_trainer("dp-sgd", out=out, resume=True)
    assert finished("dp-sgd", out=out, resume=True).complete


BLOCK, EPOCH, ENOUGH = 2, 3, 8
"""That some kill falls inside a block is left to chance: none of eight does with probability below 0.001."""


def killed(folder: Path, seed: str, kills: int, epochs: int) -> dict[str, Any]:
    """What a run killed by SIGKILL at random moments left, kill by kill, and how it ended."""
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, killed_run.__file__, str(folder), seed, str(kills), str(epochs)],
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


@pytest.mark.nightly
@pytest.mark.parametrize(("kills", "epochs"), [(2, 14), (20, 70)])
def test_resume_of_an_unseeded_run_killed_anywhere_is_never_under_counted(
    kills: int, epochs: int, tmp_path: Path
) -> None:
    seen = killed(tmp_path / "killed", "none", kills, epochs)
    before, steps = 0, 3 * epochs
    for look in seen["looks"]:
        drawn = look["drawn"]
        assert len(drawn) == len(set(drawn))
        assert max(drawn, default=-1) < look["charged"] <= steps
        assert look["saved"] <= look["charged"]
        assert look["reasons"] == []
        assert look["charged"] >= before
        before = look["charged"]
    assert kills < ENOUGH or len(seen["looks"][-1]["drawn"]) < seen["looks"][-1]["charged"]
    assert seen["charged"] == steps
    assert seen["epsilon"] <= 8.0
    assert seen["epochs"] == sorted(set(seen["epochs"]))


@pytest.mark.nightly
@pytest.mark.parametrize(("kills", "epochs"), [(2, 14), (8, 70)])
def test_resume_of_a_seeded_run_killed_anywhere_ends_with_the_bits_of_one_left_alone(
    kills: int, epochs: int, tmp_path: Path
) -> None:
    seen = killed(tmp_path / "killed", "3", kills, epochs)
    for look in seen["looks"]:
        assert max(look["drawn"], default=-1) < look["charged"] <= look["saved"] + EPOCH + BLOCK
        assert look["reasons"] == []
    assert kills < ENOUGH or len(seen["looks"][-1]["drawn"]) > len(set(seen["looks"][-1]["drawn"]))
    assert seen["same_as_alone"]
    assert seen["charged"] == 3 * epochs
    assert seen["epochs"] == list(range(1, epochs + 1))
