import pytest
import torch
from torch.utils.data import TensorDataset

import sparsedp
from diagnostic_probes import LOSS, batches, gradients_by_loop, network, rows
from sparsedp.clipping import FlatClip
from sparsedp.errors import SparseDPError
from sparsedp.parameters import ParameterLayout, Support
from sparsedp.runs.snapshots import Snapshot
from sparsedp.training.planning import changed_method
from sparsedp_experiments.theory.trajectory import (
    FreezeCount,
    Snapshots,
    bound_along,
    energy_capture,
    install,
    measure,
)

DATA = TensorDataset(*rows(60))


def a_run(method="tp-topk", callbacks=(), model=None):
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


def test_training_is_the_same_to_the_bit_with_diagnostics_on():
    model = network()
    snapshots, frozen = Snapshots(model, every=2), FreezeCount(43)
    watched = a_run(callbacks=(snapshots, frozen), model=model)
    measured = measure(model, LOSS, snapshots.kept, batches(), FlatClip(0.5))
    alone = a_run()
    layout = ParameterLayout.of(alone.model)
    assert torch.equal(layout.flatten(watched.model), layout.flatten(alone.model))
    assert watched.support == alone.support
    assert [s.step for s in snapshots.kept] == [0, 2, 4, 6, 8, 10]
    assert len(measured) == 6


def test_the_freeze_count_is_every_step_a_coordinate_was_off_the_support():
    frozen, main_steps = FreezeCount(43), 12 - 4
    result = a_run(callbacks=(frozen,))
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
    bound = bound_along(points, smoothness=1.0, learning_rate=0.5, steps=10, batch_size=20, noise_std=0.1)
    assert bound.progress == pytest.approx(2 * points[0].loss / 5)
    assert bound.dp_noise == pytest.approx(0.5 * (15 + 43) / 2 * 0.01)
    assert bound.mini_batch == pytest.approx(0.5 * max(p.unit_variance for p in points) / 20)


def test_wrong_requests_are_refused():
    with pytest.raises(SparseDPError, match="snapshots"):
        measure(network(), LOSS, [], batches(), FlatClip(1.0))
    with pytest.raises(SparseDPError, match="d=43"):
        install(network(), torch.zeros(4))
    with pytest.raises(SparseDPError, match="every"):
        Snapshots(network(), every=0)
