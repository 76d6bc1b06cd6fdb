"""A run stops before a release in which rows were mixed, whenever that begins; looking changes nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import CLASSES, FEATURES, a_trainer, advance, weights
from torch import Tensor, nn

from sparsedp.errors import PrivacyError
from sparsedp.grad_sample.witness import WatchedEngine
from sparsedp.guards import guard as guards
from sparsedp.guards.guard import CompanyGuard
from sparsedp.randomness import SeededRandomness, SystemRandomness


class Turning(nn.Module):
    """Sound, until it is told to mix its rows, in the backward pass only and not in a forward of few rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(FEATURES, 4), nn.Linear(4, CLASSES)
        self.mixes = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).tanh()
        return self.head(h + 3 * (h.mean(0) - h.mean(0).detach()) if self.mixes and len(h) > 3 else h)


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("seed", [0, None])
@pytest.mark.parametrize("engine", ["bookkeeping", "reference"])
def test_a_model_that_begins_to_mix_stops_the_run_within_an_epoch_and_before_the_release(engine, seed):
    model = Turning()
    trainer = a_trainer("dp-sgd", model=model, engine=engine, seed=seed, epochs=5)
    advance(trainer, 3)
    model.mixes = True
    before = weights(model).clone()
    if engine == "reference":  # rows have no company there
        advance(trainer, 3)
        return
    released = []
    trainer._keeper._callbacks = (released.append,)
    with pytest.raises(PrivacyError, match="another gradient in their batch than alone"):
        advance(trainer, 6)
    assert len(released) <= 5
    assert bool(released) or torch.equal(weights(model), before)


def test_the_first_step_of_every_process_is_looked_at(tmp_path):
    model = Turning()
    trainer = a_trainer("dp-sgd", model=model, out=tmp_path / "run", seed=None)
    model.mixes = True
    with pytest.raises(PrivacyError):
        advance(trainer, 1)
    trainer.close()
    written = files(tmp_path / "run")
    assert all(b"alone" not in content for content in written.values())
    model = Turning()
    trainer = a_trainer("dp-sgd", model=model, out=tmp_path / "run", seed=None, resume=True)
    model.mixes = True
    with pytest.raises(PrivacyError):
        advance(trainer, 1)


def test_looking_changes_no_bit_of_a_seeded_run(tmp_path, monkeypatch):
    found = []
    for often in (1, 10**9):
        monkeypatch.setattr(guards, "NOW_AND_THEN", often)
        out = tmp_path / f"every {often}"
        trainer = advance(a_trainer("tp-topk", out=out, seed=3))
        trainer.finish()
        found.append(((out / "metrics.jsonl").read_bytes(), weights(trainer.model)))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def guard_of(randomness) -> CompanyGuard:
    from sparsedp.batch import supervised
    from sparsedp.grad_sample import make_engine

    model, loss = Turning(), supervised(nn.CrossEntropyLoss(reduction="none"))
    return CompanyGuard(make_engine(model, loss), model, loss, (50, 100, 150, 170), randomness)


def looked_at(guard: CompanyGuard, first: int) -> list[int]:
    return [step for step in range(first, 170) if isinstance(guard.engine_for(step), WatchedEngine)]


@pytest.mark.parametrize("first", [0, 60, 169])
def test_the_first_step_and_one_of_every_epoch_are_looked_at(first, monkeypatch):
    monkeypatch.setattr(guards, "NOW_AND_THEN", 10**9)
    for seed in range(20):
        steps = looked_at(guard_of(SeededRandomness(seed)), first)
        assert steps[0] == first
        starts = [start for start in (0, 50, 100, 150) if start + 50 > first and start < 170]
        ends = dict(zip((0, 50, 100, 150), (50, 100, 150, 170), strict=True))
        for start in starts:
            assert 1 <= sum(max(start, first) <= step < ends[start] for step in steps) <= 2
        assert len(steps) <= len(starts) + 1


def test_steps_are_looked_at_now_and_then_and_nobody_can_tell_which():
    rounds = [looked_at(guard_of(SystemRandomness()), 0) for _ in range(240)]
    others = sum(len(steps) - 5 for steps in rounds)
    expected = 240 * 165 / guards.NOW_AND_THEN
    assert abs(others - expected) < 5 * expected**0.5
    assert len({tuple(steps) for steps in rounds}) > 200


def test_a_single_row_that_differs_makes_the_next_step_looked_at(monkeypatch):
    monkeypatch.setattr(guards, "NOW_AND_THEN", 10**9)
    guard = guard_of(SeededRandomness(0))
    first = guard.engine_for(0)
    assert isinstance(first, WatchedEngine)
    first.agreed = False
    assert isinstance(guard.engine_for(1), WatchedEngine)
    assert not isinstance(guard.engine_for(2), WatchedEngine) or 2 in guard._due
