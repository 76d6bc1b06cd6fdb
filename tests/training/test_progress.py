"""The live screen shows public numbers."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from runs import a_plan, a_trainer, advance
from sparsedp.callbacks import ScalarLog, live
from sparsedp.errors import DataError
from sparsedp.methods import get_method
from sparsedp.privacy import plan_epsilon
from sparsedp.results import StepReport
from sparsedp.runs.run import Run


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


class Writer:
    def __init__(self):
        self.scalars = {}

    def add_scalar(self, tag, value, step):
        self.scalars.setdefault(tag, {})[step] = value

    def flush(self):
        pass


def test_the_log_holds_released_public_and_held_out_numbers_only():
    writer, steps = Writer(), []
    result = advance(a_trainer(callbacks=[ScalarLog(lambda: writer), steps.append])).finish()
    steps = [event for event in steps if isinstance(event, StepReport)]
    epochs = result.history
    assert len(steps) == result.plan.total_steps
    assert writer.scalars == {
        "released/norm": {event.step: float(event.released.mean.norm()) for event in steps},
        "public/active_ratio": {event.step: event.released.support.active_ratio for event in steps},
        "public/learning_rate": {event.step: event.learning_rates[0] for event in steps},
        "public/epsilon": {event.step: event.epsilon for event in epochs},
        "held-out/loss": {event.step: event.metrics["loss"] for event in epochs},
        "held-out/accuracy": {event.step: event.metrics["accuracy"] for event in epochs},
    }
