"""A probe looks and does not touch: charged step by step, and neither weights nor momentum move."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import a_trainer, advance, check_that_a_cut_changes_nothing, weights

from sparsedp.methods import MethodOptions
from sparsedp.runs.ledger_file import FileLedger

pytestmark = pytest.mark.usefixtures("checked_once")

METHOD, HALF = "head-probe", MethodOptions(active_ratio=0.5)


def momentum(trainer) -> torch.Tensor:
    optimizer = trainer._stepper.learner._optimizer
    return torch.cat([state["momentum_buffer"].flatten() for state in optimizer.state.values()])


def test_no_weight_moves_in_the_probe_and_every_step_of_it_is_charged(tmp_path: Path) -> None:
    trainer = a_trainer(METHOD, options=HALF, out=tmp_path / "run")
    head, probe, _ = trainer.plan.phases
    assert (probe.name, probe.sampling_rate, probe.noise_multiplier) == (
        "probe", head.sampling_rate, head.noise_multiplier,
    )  # fmt: skip
    advance(trainer, head.steps)
    before, pushed = weights(trainer.model), momentum(trainer)
    advance(trainer, probe.steps)
    assert torch.equal(weights(trainer.model), before)
    kept = momentum(trainer)
    assert torch.equal(kept[kept != 0], pushed[pushed != 0])
    advance(trainer, 1)
    assert not torch.equal(weights(trainer.model), before)
    advance(trainer).finish()
    assert FileLedger.read(tmp_path / "run" / "ledger.jsonl").charged == trainer.plan.total_steps == 15


@pytest.mark.parametrize("into", [0, 1])
def test_a_run_cut_in_the_probe_ends_with_the_same_bits(into: int, tmp_path: Path) -> None:
    check_that_a_cut_changes_nothing(METHOD, HALF, "probe", into, tmp_path)
