"""Checkpoints between full ones: the values that moved, put on the last full one to the bit, whenever a run dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from sparsedp.core.errors import PrivacyError
from sparsedp.methods import MethodOptions, build_plan
from sparsedp.methods.adafest import Contributions
from sparsedp.runs import store
from sparsedp.runs.checkpoint import read_checkpoint
from sparsedp.runs.folder import CHECKPOINT, MOVED
from sparsedp.runs.packing import pack, same_tensors
from sparsedp.runs.reader import Run, load_weights
from sparsedp.runs.verify import verify
from sparsedp.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("checked_once")

ROWS, WORDS, WIDTH, LENGTH, STEPS = 60, 400, 4, 5, 12
LOSS = nn.CrossEntropyLoss(reduction="none")
OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
}


class Bag(nn.Module):
    """A table that also is the head of a second output: one parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.again = nn.Embedding(WORDS, WIDTH)
        self.again.weight = self.words.weight
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.words(tokens).mean(1) + self.again(tokens[:, :1]).mean(1))


def texts() -> TensorDataset:
    rng = np.random.default_rng(0)
    law = 1 / np.arange(1, WORDS + 1)
    tokens = rng.choice(WORDS, size=(ROWS, LENGTH), p=law / law.sum())
    return TensorDataset(torch.from_numpy(tokens), torch.from_numpy(rng.integers(0, 2, ROWS)))


def a_trainer(out: Path, method: str = "fest", optimizer: str = "momentum", **more: Any) -> Trainer:
    options = {
        "fest": MethodOptions(active_ratio=0.02),
        "adafest": MethodOptions(ranking=Contributions(2.0, 0.3), active_ratio=0.02),
        "tp-topk": MethodOptions(active_ratio=0.02),
    }[method]
    plan = build_plan(
        method, options, units=ROWS, batch_size=5, epochs=1, epsilon=8.0, delta=1e-3, accountant="rdp"
    )
    how = {"seed": 3, "optimizer": OPTIMIZERS[optimizer], "ema_decay": 0.9, **more}
    return Trainer(Bag(), texts(), LOSS, plan=plan, out=out, **how)


def advance(trainer: Trainer, until: int) -> Trainer:
    """Some steps; the trainer is left as a kill would leave it."""
    for batch in trainer:
        trainer.step(batch)
        if trainer.position >= until:
            break
    return trainer


def die(trainer: Trainer) -> None:
    trainer._keeper._store.close()


def packed(state: Any) -> tuple[Any, dict[str, Tensor]]:
    tensors: dict[str, Tensor] = {}
    return {name: pack(value, tensors, name) for name, value in state.items()}, tensors


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", ["fest", "adafest", "tp-topk"])
def test_what_is_read_back_is_the_whole_state_to_the_bit(tmp_path, method, optimizer):
    average = None if method == "tp-topk" else 0.9  # after a dense warm-up an average holds everything
    made = advance(a_trainer(tmp_path / "run", method, optimizer, ema_decay=average), 9)
    assert (tmp_path / "run" / MOVED).exists()
    assert read_checkpoint(tmp_path / "run" / CHECKPOINT).step < 9
    expected, found = made._keeper._state(), Run.open(tmp_path / "run").checkpoint
    die(made)
    assert found.step == 9
    state = {name: value for name, value in found.state.items() if name != "ledger"}
    (one, first), (other, second) = packed(expected.state), packed(state)
    assert one == other
    assert same_tensors(first, second)
    fresh = Bag()
    load_weights(tmp_path / "run", fresh)
    held = expected.state["model"] if average is None else expected.state["average"]["weights"]
    assert torch.equal(fresh.out.bias, held["out.bias"])
    assert verify(tmp_path / "run", independent=False).reasons == ()


@pytest.mark.parametrize("method", ["fest", "adafest"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_that_died_on_it_goes_on_to_the_same_bits_and_leaves_none(tmp_path, method, optimizer):
    straight = advance(a_trainer(tmp_path / "straight", method, optimizer), 99).finish()
    die(advance(a_trainer(tmp_path / "run", method, optimizer), 9))
    resumed = advance(a_trainer(tmp_path / "run", method, optimizer, resume=True), 99).finish()
    assert resumed.supports == straight.supports
    for one, other in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert not (tmp_path / "run" / MOVED).exists()
    assert verify(tmp_path / "run", independent=False).reasons == ()


def test_it_is_small(tmp_path):
    die(advance(a_trainer(tmp_path / "run", ema_decay=None), 9))
    sizes = {name: (tmp_path / "run" / name).stat().st_size for name in (CHECKPOINT, MOVED)}
    header = 12_000  # JSON
    assert sizes[CHECKPOINT] > 4 * WORDS * WIDTH
    assert sizes[MOVED] < header + 4 * (3 * 0.02 * WORDS * WIDTH)
    tensors = packed(read_checkpoint(tmp_path / "run" / MOVED).state)[1]
    assert sum(tensor.numel() for tensor in tensors.values()) < 0.3 * WORDS * WIDTH


def test_one_that_was_changed_or_taken_away_is_noticed(tmp_path):
    die(advance(a_trainer(tmp_path / "run"), 9))
    file = tmp_path / "run" / MOVED
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert any(MOVED in reason for reason in verify(tmp_path / "run", independent=False).reasons)
    file.unlink()
    assert any(MOVED in reason for reason in verify(tmp_path / "run", independent=False).reasons)
    die(advance(a_trainer(tmp_path / "other"), 7))
    file.write_bytes((tmp_path / "other" / MOVED).read_bytes())
    with pytest.raises(PrivacyError, match="not the one the ledger knows"):
        a_trainer(tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    "moment", [0, 3, *(pytest.param(moment, marks=pytest.mark.heavy) for moment in (1, 2, 4, 5))]
)
def test_a_kill_between_the_ledgers_line_and_the_file_leaves_a_run_that_goes_on(
    tmp_path, monkeypatch, moment
):
    """The first such files, a full one that makes them old, and the removal: each is what the kill prevents."""
    straight = advance(a_trainer(tmp_path / "straight"), 99).finish()

    class KilledError(Exception):
        pass

    counts = {"left": moment}
    write, remove = store.write_atomically, Path.unlink

    def killed(path: Path, *rest: Any) -> None:
        if path.name in (MOVED, CHECKPOINT) and counts["left"] == 0:
            raise KilledError
        counts["left"] -= path.name in (MOVED, CHECKPOINT)
        write(path, *rest)

    def not_removed(path: Path, missing_ok: bool = False) -> None:
        if path.name == MOVED:
            raise KilledError
        remove(path, missing_ok=missing_ok)

    made = a_trainer(tmp_path / "run")
    monkeypatch.setattr(store, "write_atomically", killed)
    monkeypatch.setattr(Path, "unlink", not_removed)
    with pytest.raises(KilledError):
        advance(made, 99).finish()
    die(made)
    monkeypatch.undo()
    assert verify(tmp_path / "run", independent=False).reasons == ()
    resumed = advance(a_trainer(tmp_path / "run", resume=True), 99).finish()
    for one, other in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert verify(tmp_path / "run", independent=False).reasons == ()


def test_weights_that_somebody_else_wrote_are_kept(tmp_path):
    made = advance(a_trainer(tmp_path / "run"), 7)
    with torch.no_grad():
        made.model.words.weight += 1.0
    advance(made, 9)
    expected = made.model.words.weight.detach().clone()
    die(made)
    assert torch.equal(Run.open(tmp_path / "run").weights["words.weight"], expected)
