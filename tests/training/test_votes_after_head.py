"""A vote after the head: taken at the head's trained weights, charged where it stands, and never made twice."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import (
    CLASSES,
    FEATURES,
    a_trainer,
    advance,
    check_that_a_cut_changes_nothing,
    loss_fn,
    network,
    rows,
    weights,
)

from sparsedp.core.errors import PrivacyError, SparseDPError
from sparsedp.core.randomness import SeededRandomness
from sparsedp.methods import MethodOptions, Votes
from sparsedp.privacy.grid import Grid
from sparsedp.runs.ledger_file import FileLedger
from sparsedp.training.keeper import RunKeeper

pytestmark = pytest.mark.usefixtures("checked_once")

METHOD, HIDDEN, MOST, RATIO = "head-votes", 4, 2, 0.5
OPTIONS = MethodOptions(active_ratio=RATIO, ranking=Votes(most=MOST))
GROUPS = 2 * HIDDEN  # rows of the first weight, entries of its bias
WIDTHS = [FEATURES] * HIDDEN + [1] * HIDDEN
BELOW = FEATURES * HIDDEN + HIDDEN
ALL = BELOW + HIDDEN * CLASSES + CLASSES


def expected_support(model: torch.nn.Module, noise: np.ndarray) -> list[int]:
    """Told again: a backward pass for each row, its best groups below the head, the noisy sum, whole rows by it."""
    total = np.zeros(GROUPS)
    for x, y in rows(1):
        loss = loss_fn(model(x[None]), y[None]).sum()
        parts = [g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))]
        below = torch.cat(parts).double().numpy()[:BELOW]
        energy = [float((part**2).sum()) for part in np.split(below, np.cumsum(WIDTHS)[:-1])]
        best = [i for i in sorted(range(GROUPS), key=lambda i: (-energy[i], i))[:MOST] if energy[i] > 0]
        total[best] += 1 / np.sqrt(max(1, len(best)))
    noisy, starts = total + noise, np.cumsum([0, *WIDTHS])
    order = sorted(range(GROUPS), key=lambda group: (-noisy[group], group))
    wanted = [place for group in order for place in range(starts[group], starts[group + 1])]
    return sorted([*wanted[: int(RATIO * BELOW)], *range(BELOW, ALL)])


def test_the_vote_is_taken_at_the_trained_head_and_charged_between_head_and_support(tmp_path: Path) -> None:
    trainer = a_trainer(METHOD, options=OPTIONS, out=tmp_path / "run")
    head, select, main = trainer.plan.phases
    assert [phase.name for phase in trainer.plan.phases] == ["head", "select", "main"]
    assert (select.steps, select.sampling_rate, select.trains) == (1, 1.0, False)
    assert select.noise_multiplier != head.noise_multiplier == main.noise_multiplier
    advance(trainer, head.steps)
    then = copy.deepcopy(trainer.model)
    before = weights(network())
    assert torch.equal(weights(then)[:BELOW], before[:BELOW])
    assert not torch.equal(weights(then)[BELOW:], before[BELOW:])
    advance(trainer).finish()
    grid = Grid.of(1.0, select.noise_multiplier, GROUPS)
    draws = SeededRandomness(0).rounded_gaussian(grid.noise_bits, GROUPS, key=(head.steps,))
    wanted = expected_support(then, draws.numpy() * grid.step)
    assert trainer.support.indices.tolist() == wanted
    assert wanted != expected_support(network(), draws.numpy() * grid.step)
    ledger = FileLedger.read(tmp_path / "run" / "ledger.jsonl")
    charged = [(block.phase, block.noise_multiplier) for block in ledger.blocks for _ in range(block.steps)]
    assert charged == [(p.name, p.noise_multiplier) for p in trainer.plan.phases for _ in range(p.steps)]


@pytest.mark.parametrize("into", [-1, 0, 1])
def test_a_run_cut_around_the_vote_ends_with_the_same_bits(into: int, tmp_path: Path) -> None:
    check_that_a_cut_changes_nothing(METHOD, OPTIONS, "select", into, tmp_path)


def test_a_vote_that_was_paid_for_and_lost_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    trainer = a_trainer(METHOD, options=OPTIONS, out=tmp_path / "cut", seed=None)
    with monkeypatch.context() as patch:
        patch.setattr(RunKeeper, "end_preliminary", killed)
        with pytest.raises(KeyboardInterrupt):
            advance(trainer)
    trainer.close()
    with pytest.raises(PrivacyError, match="its selection"):
        a_trainer(METHOD, options=OPTIONS, out=tmp_path / "cut", seed=None, resume=True)


def test_batches_taken_ahead_of_their_steps_are_refused_at_the_vote() -> None:
    trainer = a_trainer(METHOD, options=OPTIONS)
    with pytest.raises(SparseDPError, match="take each batch as it comes"):
        list(trainer)
    assert trainer.position == 0
