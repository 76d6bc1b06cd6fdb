"""Snapshots in a run's folder: which steps, that they come back, and that keeping them changes nothing."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import sparsedp
from diagnostic_probes import network, rows
from sparsedp.errors import DataError, SparseDPError
from sparsedp.parameters import ParameterLayout, Support
from sparsedp.runs.run import Run
from sparsedp.runs.snapshots import Snapshot, read_snapshots, write_snapshot
from sparsedp_experiments.theory.trajectory import (
    SnapshotFiles,
    snapshot_steps,
)


def a_run(out, watch=lambda model: (), method="tp-topk"):
    model = network()
    result = sparsedp.fit(
        model, TensorDataset(*rows(60)), nn.CrossEntropyLoss(reduction="none"), method=method, epsilon=8.0,
        delta=1e-3, epochs=4, batch_size=20, max_grad_norm=0.5, seed=3, progress=False, accountant="rdp", run_dir=out,
        callbacks=watch(model),
    )  # fmt: skip
    return result, ParameterLayout.of(model).flatten(result.model)


def test_snapshots_are_the_weights_of_the_last_phase_and_training_is_the_same_without(tmp_path):
    out = tmp_path / "run"
    result, weights = a_run(out, lambda model: (SnapshotFiles(model, out, count=3),))
    kept = read_snapshots(out)
    assert [shot.step for shot in kept] == [4, 8, 11]
    assert {shot.phase for shot in kept} == {"main"}
    assert all(shot.support == result.support for shot in kept)
    assert torch.equal(kept[-1].weights, weights)
    assert not torch.equal(kept[0].weights, weights)
    _, alone = a_run(tmp_path / "alone")
    assert torch.equal(weights, alone)
    assert read_snapshots(tmp_path / "alone") == ()


def test_steps_are_spread_over_the_last_phase_with_both_ends(tmp_path):
    a_run(tmp_path / "run")
    plan = Run.open(tmp_path / "run").plan
    assert snapshot_steps(plan, 2) == (4, 11)
    assert snapshot_steps(plan) == tuple(range(4, 12))
    with pytest.raises(SparseDPError, match="at least 2"):
        snapshot_steps(plan, 1)


def test_a_snapshot_comes_back_whole_and_damage_is_noticed(tmp_path):
    (tmp_path / "snapshots").mkdir()
    full = Snapshot(7, "train", Support.full(3), torch.tensor([1.0, 2.0, 3.0]))
    sparse = Snapshot(70, "train", Support([0, 2], 3), torch.tensor([4.0, 5.0, 6.0]))
    path = write_snapshot(tmp_path, sparse)
    write_snapshot(tmp_path, full)
    for found, made in zip(read_snapshots(tmp_path), (full, sparse), strict=True):
        assert (found.step, found.phase, found.support) == (made.step, made.phase, made.support)
        assert torch.equal(found.weights, made.weights)
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(DataError, match="damaged"):
        read_snapshots(tmp_path)
