"""A run that was cut goes on: seeded to the same bits, unseeded within its budget, whatever has cut it."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

from runs import CLASSES, FEATURES, SETUPS, a_plan, a_trainer, advance, by_method, finished, network, weights
from sparsedp import randomness
from sparsedp._files import write_atomically
from sparsedp.errors import DataError, PrivacyError, SparseDPError
from sparsedp.loading import DataConfig
from sparsedp.methods import get_method, list_methods
from sparsedp.privacy.ledger import Ledger
from sparsedp.results import StepReport
from sparsedp.runs import directory
from sparsedp.runs.directory import CHECKPOINT
from sparsedp.runs.run import Run
from sparsedp.runs.verify import verify

pytestmark = pytest.mark.usefixtures("checked_once")

EPOCHS = 70
"""210 steps: ledger blocks of two steps, so that there is a middle of a block."""


def cosine(optimizer, steps):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def sequential(optimizer, steps):
    parts = [cosine(optimizer, steps), torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[6])


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def with_optimizer(make):
    return lambda: {"model": network(dropout=0.4), "optimizer": make, "options": {"active_ratio": 0.15}}


CASES = {
    **{method.name: lambda name=method.name: {"method": name} for method in list_methods()},
    **SETUPS,
    "table-adafest-adam": lambda: {**SETUPS["table-adafest"](), "optimizer": adam},
    "average, schedule": lambda: {"ema_decay": 0.9, "lr_scheduler": cosine},
    "adam, two schedules": lambda: {**with_optimizer(adam)(), "lr_scheduler": sequential},
    "rmsprop": with_optimizer(lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5)),
}
METHODS = [method.name for method in list_methods()]


def outcome(result):
    """Everything a run gives and writes, but its time, its place and its ledger's hashes."""
    record = json.loads((result.out / "record.json").read_text())
    del record["timing"], record["ledger"]
    values = [weights(result.model), *result.model.buffers()]
    told = (
        result.support,
        result.supports,
        result.history,
        result.metrics,
        result.epsilon,
        result.ledger.steps,
    )
    return [value.tolist() for value in values], told, record, (result.out / "metrics.jsonl").read_text()


@pytest.mark.parametrize("case", [*by_method(METHODS), *(name for name in CASES if name not in METHODS)])
def test_resume_of_a_seeded_run_cut_in_several_places_ends_with_the_same_bits(case, tmp_path):
    whole, cut = finished(**CASES[case](), out=tmp_path / "whole"), tmp_path / "cut"
    advance(a_trainer(**CASES[case](), out=cut), 4).close()
    for steps in (1, 0, 5):
        make = {"model": network(1), **CASES[case]()}  # its weights are the run's, not the given ones
        advance(a_trainer(**make, out=cut, resume=True), steps).close()
    assert outcome(finished(**CASES[case](), out=cut, resume=True)) == outcome(whole)
    again = a_trainer(**CASES[case](), out=cut, resume=True)
    assert list(again) == []
    assert outcome(again.finish()) == outcome(whole)


def test_resume_of_an_unseeded_run_counts_what_it_lost_and_never_takes_a_step_twice(tmp_path):
    make = {"epochs": EPOCHS, "seed": None, "lr_scheduler": cosine}
    run, taken = tmp_path / "run", []
    advance(a_trainer(out=run, callbacks=[taken.append], **make), 51).close()
    for steps in (0, 3, 40):
        trainer = a_trainer(out=run, resume=True, callbacks=[taken.append], **make)
        assert trainer.position == Ledger.read(run / "ledger.jsonl").charged
        advance(trainer, steps).close()
    result = finished(out=run, resume=True, callbacks=[taken.append], **make)
    reports = [event for event in taken if isinstance(event, StepReport)]
    steps_taken = [report.step for report in reports]
    assert steps_taken == sorted(set(steps_taken))
    assert len(steps_taken) == 210 - 3
    assert result.ledger.steps == 210
    assert result.epsilon <= 8.0
    assert result.complete
    last = next(report.learning_rates[0] for report in reports if report.step == 209)
    assert last == pytest.approx(0.1 * (1 + math.cos(math.pi * 209 / 210)))


def test_resume_of_an_unseeded_run_draws_fresh_noise_and_batches(tmp_path):
    """Two resumes of copies of one run go different ways: nothing is replayed."""
    one, other = tmp_path / "one", tmp_path / "other"
    advance(a_trainer(out=one, seed=None), 5).close()
    shutil.copytree(one, other)
    after = [weights(advance(a_trainer(out=out, resume=True, seed=None), 1).model) for out in (one, other)]
    assert not torch.equal(*after)


def reversed_order(parameters):
    return torch.optim.SGD([{"params": list(parameters)[::-1]}], lr=0.2, momentum=0.9)


REFUSED = {
    "another model": ({"model": nn.Linear(5, 3)}, SparseDPError, "layout"),
    "another plan": ({"epochs": 6}, PrivacyError, "another plan"),
    "no seed": ({"seed": None}, SparseDPError, "seed"),
    "another rate": ({"optimizer": lambda p: torch.optim.SGD(p, 0.4, 0.9)}, SparseDPError, "groups.0.lr"),
    "another order of parameters": ({"optimizer": reversed_order}, SparseDPError, "details.parameters"),
    "another average": ({"ema_decay": 0.9}, SparseDPError, "ema_decay"),
    "other rows of a unit": ({"data": DataConfig(rows_per_unit=2)}, SparseDPError, "rows_per_unit"),
    "a longer schedule": ({"lr_scheduler": lambda o, n: cosine(o, 2 * n)}, SparseDPError, "schedule.*T_max"),
}


@pytest.mark.parametrize("after", [4, 15])
@pytest.mark.parametrize("what", REFUSED)
def test_resume_with_what_does_not_belong_to_the_run_is_refused_and_leaves_it_as_it_was(
    what, after, tmp_path
):
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


def test_resume_of_a_model_with_its_parameters_in_another_order_is_refused(tmp_path):
    def model(names):
        return nn.Sequential(OrderedDict((name, nn.Linear(5, 5)) for name in names))

    advance(a_trainer("dp-sgd", model=model(("query", "value")), out=tmp_path / "run"), 3).close()
    with pytest.raises(SparseDPError, match="layout"):
        a_trainer("dp-sgd", model=model(("value", "query")), out=tmp_path / "run", resume=True)


def test_resume_without_a_run_or_its_whole_ledger_is_refused(tmp_path):
    with pytest.raises(DataError, match="nothing"):
        a_trainer(out=tmp_path / "nothing", resume=True)
    with pytest.raises(SparseDPError, match="resume"):
        a_trainer(resume=True)
    trainer = advance(a_trainer(out=tmp_path / "run"), 4)
    trainer.save()
    trainer.close()
    file = tmp_path / "run" / "ledger.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(PrivacyError, match="lines were removed"):
        a_trainer(out=tmp_path / "run", resume=True)
    file.unlink()
    with pytest.raises(PrivacyError, match="ledger"):
        a_trainer(out=tmp_path / "run", resume=True)


class Fragile(nn.Module):
    """Raises in a forward once it is told to."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.broken = nn.Linear(FEATURES, CLASSES), False

    def forward(self, x):
        if self.broken:
            raise RuntimeError("out of memory")
        return self.layer(x)


@pytest.mark.parametrize("seed", [0, None])
@pytest.mark.parametrize("step", [1, 2, 6])
def test_resume_after_a_model_that_raised_in_a_step_goes_on_with_what_was_paid_for(step, seed, tmp_path):
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


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_resume_after_checkpoints_that_could_not_be_written_goes_on(error, tmp_path, monkeypatch):
    """Of a disk that was full, or a process that was killed before it; twice."""
    out = tmp_path / "run"
    trainer = advance(a_trainer("dp-sgd", out=out), 3)

    def fails(path, content):
        if path.name == CHECKPOINT or isinstance(error, KeyboardInterrupt):
            raise error
        write_atomically(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(directory, "write_atomically", fails)
        with pytest.raises(type(error)):
            trainer.save()
        assert verify(out, independent=False).passed
        trainer.close()
        with pytest.raises(type(error)):
            a_trainer("dp-sgd", out=out, resume=True).save()
    resumed = finished("dp-sgd", out=out, resume=True)
    assert torch.equal(weights(resumed.model), weights(finished("dp-sgd").model))


BLOCK, EPOCH, ENOUGH = 2, 3, 8
"""That some kill falls inside a block is left to chance: none of eight does with probability below 0.001."""


def train_and_log(out, seed, epochs, log):
    """Go on with the run, or start it; every draw of noise is logged before it is made."""
    source = randomness.SystemRandomness if seed is None else randomness.SeededRandomness
    draw = source.add_rounded_gaussian

    def logged(self, bits, sums, key):
        with open(log, "ab", buffering=0) as file:
            file.write(f"{key[0]}\n".encode())
        draw(self, bits, sums, key)

    source.add_rounded_gaussian = logged
    advance(a_trainer(out=out, resume=out.exists(), seed=seed, epochs=epochs, optimizer=adam)).finish()


def drawn_steps(log):
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def kill_and_look(out, seed, epochs, log, steps, delay):
    """One child, killed `delay` seconds after that many more draws of noise; then what its files say.

    Waiting for draws, not for time, makes the moment independent of how busy the machine is.
    """
    goal = len(drawn_steps(log)) + steps
    child = os.fork()
    if child == 0:
        train_and_log(out, seed, epochs, log)
        os._exit(0)
    while len(drawn_steps(log)) < goal and os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.001)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    drawn = drawn_steps(log)
    if not out.exists():
        return {"drawn": drawn, "charged": 0, "saved": 0, "reasons": []}
    run, reasons = Run.open(out), verify(out, independent=False).reasons
    return {"drawn": drawn, "charged": run.ledger.charged, "saved": run.checkpoint.step, "reasons": reasons}


def kill_and_resume(folder, seed, kills, epochs):
    """In a process of its own: what each kill left, and how the run ended."""
    torch.set_num_threads(1)
    make = {"seed": seed, "epochs": epochs, "optimizer": adam}
    alone = finished(**make)  # and what is slow once, before the first fork
    chance, run, log = random.Random(7), folder / "run", folder / "log"
    looks = [
        kill_and_look(run, seed, epochs, log, chance.randrange(8), chance.uniform(0, 0.02))
        for _ in range(kills)
    ]
    result = finished(out=run, resume=True, **make)
    same = torch.equal(weights(result.model), weights(alone.model))
    done = [report.epoch for report in result.history]
    ended = {"charged": result.ledger.steps, "epsilon": result.epsilon, "epochs": done, "same": same}
    return {"looks": looks, **ended}


@pytest.mark.nightly
@pytest.mark.parametrize(("seed", "kills", "epochs"), [(None, 2, 14), (None, 20, 70), (3, 2, 14), (3, 8, 70)])
def test_resume_of_a_run_killed_anywhere_is_never_under_counted(seed, kills, epochs, tmp_path):
    """And a seeded one ends with the bits of one left alone."""
    call = f"test_resume.kill_and_resume(pathlib.Path({str(tmp_path)!r}), {seed}, {kills}, {epochs})"
    code = f"import json, pathlib, test_resume; print(json.dumps({call}))"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=env, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr.decode()
    seen, before = json.loads(done.stdout), 0
    for look in seen["looks"]:
        drawn, charged = look["drawn"], look["charged"]
        assert look["reasons"] == []
        assert max(drawn, default=-1) < charged <= 3 * epochs
        assert look["saved"] <= charged
        assert before <= charged
        before = charged
        if seed is None:
            assert len(drawn) == len(set(drawn))
        else:
            assert charged <= look["saved"] + EPOCH + BLOCK
    lost = seen["looks"][-1]["charged"] - len(drawn) if seed is None else len(drawn) - len(set(drawn))
    assert kills < ENOUGH or lost > 0
    assert seen["charged"] == 3 * epochs
    assert seen["epsilon"] <= 8.0
    assert seen["epochs"] == (sorted(set(seen["epochs"])) if seed is None else list(range(1, epochs + 1)))
    assert seen["same"] == (seed is not None)
