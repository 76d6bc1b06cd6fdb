"""Federated runs on disk: the same files, verified by the same program; interrupted and resumed."""

from __future__ import annotations

import pytest
import torch
from federated_tools import CLIENTS, LOSS, Loopback, a_plan, all_rows, make_model, sgd

import sparsedp
from sparsedp.batch import per_sample_loss
from sparsedp.federated import FederatedTrainer
from sparsedp.runs.run import Run


def start(plan, out=None, **options):
    evaluate = sparsedp.held_out(all_rows()[0], per_sample_loss(LOSS))
    return FederatedTrainer(make_model(), plan=plan, optimizer=sgd, evaluate=evaluate, run_dir=out, **options)


def test_the_folder_is_a_runs_and_verifies(tmp_path):
    with start(a_plan(), tmp_path / "run") as trainer:
        Loopback(steps=3, lr=0.2).run(trainer)
        result = trainer.finish()
    assert result.complete
    assert result.unit == "client"
    assert result.for_release
    found = sparsedp.verify(tmp_path / "run", independent=False)
    assert found.passed, found.reasons
    record = Run.open(tmp_path / "run").record
    assert record["units"] == CLIENTS
    assert record["settings"]["engine"] == "federated"
    assert "client" in result.report(tmp_path / "report.html").read_text()


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path):
    plan = a_plan("tp-topk", epochs=6)
    with start(plan, seed=9) as trainer:
        Loopback().run(trainer)
        whole = trainer.finish()
    with start(plan, tmp_path / "run", seed=9) as trainer:
        clients = Loopback()
        for _ in range(plan.total_steps // 2):
            clients.round(trainer)
        trainer.begin()  # dies in the middle of a round
    with start(plan, tmp_path / "run", seed=9, resume=True) as trainer:
        clients.run(trainer)  # clients remember the first half; the server does not rely on it
        resumed = trainer.finish()
    assert all(map(torch.equal, whole.model.parameters(), resumed.model.parameters()))
    assert sparsedp.verify(tmp_path / "run", independent=False).passed


def test_an_unseeded_run_pays_for_lost_rounds_and_never_twice(tmp_path):
    plan = a_plan("dp-sgd", epochs=70)  # 210 rounds: blocks of two
    trainer = start(plan, tmp_path / "run")
    clients = Loopback()
    clients.round(trainer)
    trainer.close()  # no checkpoint: as a kill would
    with start(plan, tmp_path / "run", resume=True) as trainer:
        assert trainer.position == 2
        clients.round(trainer)
    with pytest.raises(sparsedp.SparseDPError, match="closed"):
        trainer.begin()


def test_rounds_come_one_at_a_time():
    trainer = start(a_plan())
    begun = trainer.begin()
    with pytest.raises(sparsedp.SparseDPError, match="complete it first"):
        trainer.begin()
    trainer.complete(begun, {})
    with pytest.raises(sparsedp.SparseDPError, match="another round"):
        trainer.complete(begun, {})
    trainer.pause()
