"""Diagnostics of a run: snapshots, trajectories, quality of supports, bytes on the wire."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

import sparsedp
from diagnostic_probes import LOSS, batches, gradients_by_loop, network, rows
from sparsedp.clipping import FlatClip
from sparsedp.errors import DataError
from sparsedp.parameters import ParameterLayout, Support
from sparsedp.training.planning import changed_method
from sparsedp_experiments.figures.support import support_bytes, traffic
from sparsedp_experiments.theory.criteria import (
    concentration_curve,
    energy_captured,
    random_capture,
    recovery_curve,
)
from sparsedp_experiments.theory.diagnose import diagnose_nonprivate
from sparsedp_experiments.theory.trajectory import (
    FreezeCount,
    Snapshot,
    SnapshotFiles,
    energy_capture,
    measure,
    read_snapshots,
    write_snapshot,
)


def a_run(out, method):
    return sparsedp.fit(
        network(), TensorDataset(*rows(80)), nn.CrossEntropyLoss(reduction="none"), method=method, epsilon=8.0,
        delta=1e-3, epochs=4, batch_size=20, max_grad_norm=0.5, seed=3, progress=False, accountant="rdp", run_dir=out,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "tp-topk"
    return out, a_run(out, "tp-topk")


def test_the_file_holds_what_a_plain_loop_finds_and_nothing_else_changes(run):
    out, result = run
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    document = diagnose_nonprivate(out, network(7), LOSS, batches())
    after = {path.name: path.read_bytes() for path in out.iterdir()}
    assert set(after) - set(before) == {"nonprivate.json"}
    assert all(after[name] == content for name, content in before.items())
    assert json.loads((out / "nonprivate.json").read_text()) == document
    values = {entry["name"]: entry["value"] for entry in document["values"]}
    energies = gradients_by_loop(result.model, *rows()).mean(0) ** 2
    share = float(energies[result.support.indices].sum() / energies.sum())
    assert values["gradient energy on the support (alpha_oracle)"] == pytest.approx(share, rel=1e-3)
    assert values["random support, lower end of 95 %"] < 8 / 43 < values["random support, upper end of 95 %"]
    assert values["clipping bias"] <= values["bound on the clipping bias (Lemma 6.4)"] + 1e-12
    assert values["smoothness (largest curvature)"] > 0
    assert all("Not private" in entry["note"] for entry in document["values"])


# Snapshots in a run's folder: which steps, that they come back, and that keeping them changes nothing.


def a_run_of_snapshots(out, watch=lambda model: (), method="tp-topk"):
    model = network()
    result = sparsedp.fit(
        model, TensorDataset(*rows(60)), nn.CrossEntropyLoss(reduction="none"), method=method, epsilon=8.0,
        delta=1e-3, epochs=4, batch_size=20, max_grad_norm=0.5, seed=3, progress=False, accountant="rdp", run_dir=out,
        callbacks=watch(model),
    )  # fmt: skip
    return result, ParameterLayout.of(model).flatten(result.model)


def test_snapshots_are_the_weights_of_the_last_phase_and_training_is_the_same_without(tmp_path):
    out = tmp_path / "run"
    result, weights = a_run_of_snapshots(out, lambda model: (SnapshotFiles(model, out, count=3),))
    kept = read_snapshots(out)
    assert [shot.step for shot in kept] == [4, 8, 11]
    assert {shot.phase for shot in kept} == {"main"}
    assert all(shot.support == result.support for shot in kept)
    assert torch.equal(kept[-1].weights, weights)
    assert not torch.equal(kept[0].weights, weights)
    _, alone = a_run_of_snapshots(tmp_path / "alone")
    assert torch.equal(weights, alone)
    assert read_snapshots(tmp_path / "alone") == ()


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


DATA = TensorDataset(*rows(60))


def a_run_of_trajectory(method="tp-topk", callbacks=(), model=None):
    return sparsedp.fit(
        network() if model is None else model,
        DATA,
        torch.nn.CrossEntropyLoss(reduction="none"),
        method=changed_method(method, active_ratio=0.3),
        epsilon=8.0,
        delta=1e-3,
        epochs=4,
        batch_size=20,
        max_grad_norm=0.5,
        seed=3,
        accountant="rdp",
        progress=False,
        callbacks=callbacks,
    )


def test_the_freeze_count_is_every_step_a_coordinate_was_off_the_support():
    frozen, main_steps = FreezeCount(43), 12 - 4
    result = a_run_of_trajectory(callbacks=(frozen,))
    assert frozen.steps == 12
    expected = torch.where(result.support.mask(), 0, main_steps)
    assert torch.equal(frozen.frozen(), expected)


def test_waypoints_hold_the_energies_of_the_weights_they_were_taken_at():
    support = Support(range(0, 43, 3), 43)
    other = ParameterLayout.of(network(5)).flatten(network(5))
    kept = [Snapshot(7, "main", support, other), Snapshot(8, "main", Support.full(43), other)]
    model = network()
    before = ParameterLayout.of(model).flatten(model)
    points = measure(model, LOSS, kept, batches(), FlatClip(0.3))
    energies = gradients_by_loop(network(5), *rows()).mean(0) ** 2
    assert points[0].energy == pytest.approx(float(energies.sum()), rel=1e-4)
    assert points[0].captured == pytest.approx(float(energies[support.indices].sum()), rel=1e-4)
    assert points[1].captured == pytest.approx(points[1].energy)
    assert points[0].bias <= points[0].bias_bound
    alpha = energy_capture(points)
    assert alpha == pytest.approx((points[0].captured + points[1].energy) / (2 * points[0].energy))
    assert torch.equal(before, ParameterLayout.of(model).flatten(model))


ENERGIES = torch.tensor([4.0, 0.0, 1.0, 3.0, 2.0])


@given(st.integers(1, 40), st.integers(0, 10**6))
def test_projection_and_complement_make_one_and_the_full_support_captures_all(dimension, seed):
    rng = np.random.default_rng(seed)
    energies = torch.from_numpy(rng.standard_normal(dimension) ** 2)
    support = Support(np.flatnonzero(rng.random(dimension) < 0.4), dimension)
    captured = energy_captured(energies, support)
    rest = energy_captured(energies, Support.full(dimension).without(support))
    assert 0 <= captured <= 1
    assert captured + rest == pytest.approx(1.0)
    assert energy_captured(energies, Support.full(dimension)) == pytest.approx(1.0)


def test_random_supports_capture_k_over_d_with_the_stated_deviation():
    """z-test on the mean and chi-square-like test on the deviation, 4,000 draws; false-alarm rate below 1e-6."""
    rng, draws = np.random.default_rng(0), 4000
    energies = torch.from_numpy(rng.exponential(size=50) ** 2)
    baseline = random_capture(energies, 12)
    seen = [energy_captured(energies, Support(rng.permutation(50)[:12], 50)) for _ in range(draws)]
    assert baseline.mean == 12 / 50
    assert abs(np.mean(seen) - baseline.mean) < 5 * baseline.std / math.sqrt(draws)
    assert np.std(seen) == pytest.approx(baseline.std, rel=0.08)
    low, high = baseline.interval()
    assert 0.9 < np.mean([(low <= s <= high) for s in seen]) < 0.99


def test_curves_by_hand():
    assert concentration_curve(ENERGIES, [0.2, 0.4, 0.1, 1.0]) == pytest.approx((0.4, 0.7, 0.0, 1.0))
    order = torch.tensor([2, 0, 1, 3, 4])
    (point,) = recovery_curve(ENERGIES, order, [0.4])
    assert (point.size, point.learned, point.oracle, point.random.mean) == (2, 0.5, 0.7, 0.4)


@pytest.mark.parametrize("ratio", [0.01, 0.05, 0.2, 0.5])
def test_random_indices_cost_within_five_percent_of_their_entropy(ratio):
    d = 20_000
    support = Support(np.random.default_rng(0).permutation(d)[: int(ratio * d)], d)
    entropy = d * -(ratio * math.log2(ratio) + (1 - ratio) * math.log2(1 - ratio)) / 8
    assert entropy * 0.98 < support_bytes(support) < entropy * 1.05 + 1


@pytest.mark.parametrize(("indices", "bits"), [([], 40), (range(0, 40, 2), 40), ([9], 6), ([3, 4, 30], 12)])
def test_the_shorter_of_bitmap_and_golomb_rice_by_hand(indices, bits):
    """One index at gap 9: with remainders of 2 or 3 bits a quotient of 2 or 1 in unary, its end, and the remainder.

    Gaps 3, 0 and 25: with 3 or 4 bits a quotient of 3 or 1, three ends, three remainders.
    """
    counted = {6: min(2 + 1 + 2, 1 + 1 + 3), 12: min(3 + 3 + 9, 1 + 3 + 12, 6 + 3 + 6)}.get(bits, bits)
    assert support_bytes(Support(list(indices), 40)) == 1 + math.ceil(counted / 8)


def test_a_run_sends_indices_once_per_refresh():
    first, second, full = Support([1, 5, 9], 1000), Support([2, 5, 9], 1000), Support.full(1000)
    counted = traffic([full, first, first, first, second, second])
    assert counted.values == 4000 + 5 * 12
    assert counted.indices == support_bytes(first) + support_bytes(second)
    assert counted.dense == 6 * 4000
    assert counted.share == pytest.approx((4060 + counted.indices) / 24_000)
