"""Along a run: snapshots kept by a callback, and what the un-noised gradients at them say afterwards.

Give `Snapshots` to a run as a callback and keep it; `measure` then walks through what it kept. Snapshots are copies
of weights, which follow from releases; only `measure` looks at data, and its result is `NonPrivate`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from sparsedp.batch import MicroBatch, PerSampleLoss
from sparsedp.clipping import FlatClip
from sparsedp.errors import SparseDPError
from sparsedp.grad_sample import make_engine
from sparsedp.parameters import Layout
from sparsedp.results import StepReport
from sparsedp.runs.record import EpochMetrics
from sparsedp.runs.snapshots import Snapshot
from sparsedp_experiments.theory.convergence import ProjectedBound, projected_bound
from sparsedp_experiments.theory.criteria import energy_captured, trajectory_capture
from sparsedp_experiments.theory.curvature import mean_loss
from sparsedp_experiments.theory.nonprivate import NonPrivate
from sparsedp_experiments.theory.oracle import clipping_report, mean_gradient


@final
class Snapshots:
    """A callback that keeps the model's weights every so many steps: 4 bytes per coordinate and snapshot."""

    def __init__(self, model: nn.Module, every: int = 50) -> None:
        if every < 1:
            raise SparseDPError(f"every: got {every}, expected a number of steps >= 1")
        self._model, self._layout, self._every = model, Layout.of(model), every
        self.kept: list[Snapshot] = []

    def __call__(self, event: StepReport | EpochMetrics) -> None:
        """Keep the weights if it is time."""
        if isinstance(event, StepReport) and event.step % self._every == 0:
            weights = self._layout.flatten(self._model)
            self.kept.append(Snapshot(event.step, event.phase, event.released.support, weights))


@final
class FreezeCount:
    """A callback that counts how many steps each coordinate was frozen (RS, Fig. 12)."""

    def __init__(self, dimension: int) -> None:
        self.steps = 0
        self._active = torch.zeros(dimension, dtype=torch.int64)

    def __call__(self, event: StepReport | EpochMetrics) -> None:
        """Count a step."""
        if isinstance(event, StepReport):
            self.steps += 1
            self._active += event.released.support.mask()

    def frozen(self) -> Tensor:
        """Steps each coordinate was frozen for, a d-vector."""
        return self.steps - self._active


@final
@dataclass(frozen=True, slots=True)
class Waypoint:
    """What was measured at one snapshot.

    Attributes:
        step: of the run.
        active: k.
        energy: `||G||^2`, the full mean gradient's squared norm.
        captured: `||P G||^2`, that of its part on the support.
        bias: `||b||`, the clipping bias on the support.
        bias_bound: Lemma 6.4's bound on it.
        unit_variance: tau^2.
        loss: the mean loss.
    """

    step: int
    active: int
    energy: float
    captured: float
    bias: float
    bias_bound: float
    unit_variance: float
    loss: float


def measure(
    model: nn.Module,
    loss: PerSampleLoss,
    snapshots: Sequence[Snapshot],
    batches: Sequence[MicroBatch],
    clip: FlatClip,
    progress: Callable[[int, int], None] | None = None,
) -> NonPrivate[tuple[Waypoint, ...]]:
    """Gradients and clipping at each snapshot, on data of your choice; the model itself is left alone.

    Args:
        model: the architecture; a copy of it, in evaluation mode, takes the snapshots' weights.
        loss: the per-sample loss.
        snapshots: what a run kept, of the phase of interest.
        batches: rows to measure on.
        clip: the phase's clip.
        progress: called with (done, all) after each snapshot.
    """
    if not snapshots:
        raise SparseDPError("measure: got no snapshots; give Snapshots(model) to the run as a callback")
    replica = copy.deepcopy(model).eval()
    points, touched = [], ""
    for done, snapshot in enumerate(snapshots, start=1):
        install(replica, snapshot.weights)
        engine = make_engine(replica, loss)
        gradient = mean_gradient(engine, batches)
        clipping = clipping_report(engine, batches, snapshot.support, clip).value
        energies = gradient.value**2
        total = float(energies.sum())
        points.append(
            Waypoint(
                step=snapshot.step,
                active=snapshot.support.size,
                energy=total,
                captured=total * energy_captured(energies, snapshot.support),
                bias=clipping.bias,
                bias_bound=clipping.bias_bound,
                unit_variance=clipping.unit_variance,
                loss=mean_loss(replica, loss, batches).value,
            )
        )
        touched = f"{gradient.touched} at {done} points of a run"
        if progress is not None:
            progress(done, len(snapshots))
    return NonPrivate(tuple(points), touched)


def install(model: nn.Module, weights: Tensor) -> None:
    """Put a flat vector of weights into a model's trainable parameters."""
    layout = Layout.of(model)
    if weights.shape != (layout.dimension,):
        raise SparseDPError(
            f"weights: got shape {tuple(weights.shape)}, expected d={layout.dimension} numbers"
        )
    with torch.no_grad():
        for slot, parameter in zip(layout, layout.parameters(model), strict=True):
            parameter.copy_(weights[slot.span].reshape(slot.shape))


def energy_capture(points: Sequence[Waypoint]) -> float:
    """`alpha_T` (TP-TopK, Def. 6.5), over the snapshots."""
    return trajectory_capture([p.captured for p in points], [p.energy for p in points])


def bound_along(
    points: Sequence[Waypoint],
    *,
    smoothness: float,
    learning_rate: float,
    steps: int,
    batch_size: float,
    noise_std: float,
    least_loss: float = 0.0,
) -> ProjectedBound:
    """The four terms of TP-TopK, Theorem 6.3 as measured at snapshots of the phase, for `steps` steps of plain SGD.

    Measured means stand for the theorem's expectations and the largest variance seen for its tau^2; the smoothness is
    that seen at some points, not a proven constant. So the sum is an estimate of the bound.
    """
    return projected_bound(
        loss_gap=points[0].loss - least_loss,
        smoothness=smoothness,
        learning_rate=learning_rate,
        steps=steps,
        squared_biases=[point.bias**2 for point in points],
        batch_variance=max(point.unit_variance for point in points) / batch_size,
        mean_active=sum(point.active for point in points) / len(points),
        noise_std=noise_std,
    )
