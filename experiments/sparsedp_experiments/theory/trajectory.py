"""Along a run: weights kept by callbacks, and what un-noised gradients at them say afterwards."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from sparsedp._files import write_atomically
from sparsedp.batch import LossFunction, MicroBatch
from sparsedp.clipping import FlatClip
from sparsedp.grad_sample import make_engine
from sparsedp.parameters import ParameterLayout, Support
from sparsedp.privacy.plan import Plan
from sparsedp.results import CallbackLike, StepReport
from sparsedp.runs.record import EpochMetrics, wrap_read_errors
from sparsedp.runs.run import Run
from sparsedp_experiments.theory.criteria import energy_captured
from sparsedp_experiments.theory.oracle import clipping_report, mean_gradient, mean_loss

COUNT = 20
SNAPSHOTS = "snapshots"
"""A folder of a run, one safetensors file a step. Post-processing, so free."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The weights after a step, and the support it moved."""

    step: int
    phase: str
    support: Support
    weights: Tensor = field(repr=False)


def write_snapshot(folder: Path | str, snapshot: Snapshot) -> Path:
    """Write one snapshot into a run's folder."""
    path = Path(folder) / SNAPSHOTS / f"step-{snapshot.step:08d}.safetensors"
    support = snapshot.support
    tensors = {"weights": snapshot.weights.cpu().contiguous(), "support": support.indices.to(torch.int32)}
    facts = {"step": str(snapshot.step), "phase": snapshot.phase, "d": str(support.dimension)}
    write_atomically(path, save(tensors, facts))
    return path


def read_snapshots(folder: Path | str) -> tuple[Snapshot, ...]:
    """The snapshots a run kept, in order; none if it kept none."""
    return tuple(_read(path) for path in sorted((Path(folder) / SNAPSHOTS).glob("step-*.safetensors")))


def _read(path: Path) -> Snapshot:
    with wrap_read_errors(path), safe_open(path, framework="pt") as file:
        facts, indices = file.metadata(), file.get_tensor("support").long()
        support = Support(indices, int(facts["d"]))
        return Snapshot(int(facts["step"]), facts["phase"], support, file.get_tensor("weights"))


def snapshot_steps(plan: Plan, count: int = COUNT) -> tuple[int, ...]:
    """At most `count` steps spread evenly over the last phase, its first and last step among them."""
    phase = plan.phases[-1]
    first, last = plan.first_step(phase.name), phase.steps - 1
    return tuple(sorted({first + round(i * last / (count - 1)) for i in range(count)}))


@final
class SnapshotFiles:
    """A callback for a run with `out=`: keeps the weights of some steps of the last phase in the run's folder.

    A snapshot takes 4 bytes a coordinate, and 4 more for each active one.
    **Edge cases.** A replayed step writes the same file again; a lost one has none.
    """

    def __init__(self, model: nn.Module, out: Path | str, count: int = COUNT) -> None:
        self._model, self._layout, self._count = model, ParameterLayout.of(model), count
        self._run = Path(out)
        self._steps: frozenset[int] | None = None

    def __call__(self, event: StepReport | EpochMetrics) -> None:
        if not isinstance(event, StepReport):
            return
        if self._steps is None:
            self._steps = frozenset(snapshot_steps(Run.open(self._run).plan, self._count))
            (self._run / SNAPSHOTS).mkdir(exist_ok=True)
        if event.step in self._steps:
            weights = self._layout.flatten(self._model)
            write_snapshot(self._run, Snapshot(event.step, event.phase, event.released.support, weights))


def watching(folder: Path, snapshots: bool) -> Callable[[nn.Module], Sequence[CallbackLike]]:
    """What looks at the model of a run: snapshots of its weights, if asked for now or when the run began."""
    wanted = snapshots or (Path(folder) / SNAPSHOTS).is_dir()
    return lambda model: [SnapshotFiles(model, folder)] if wanted else []


@final
class Snapshots:
    """A callback that keeps the model's weights every so many steps: 4 bytes per coordinate and snapshot."""

    def __init__(self, model: nn.Module, every: int = 50) -> None:
        self._model, self._layout, self._every = model, ParameterLayout.of(model), every
        self.kept: list[Snapshot] = []

    def __call__(self, event: StepReport | EpochMetrics) -> None:
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
        if isinstance(event, StepReport):
            self.steps += 1
            self._active += event.released.support.mask()

    def frozen(self) -> Tensor:
        """Steps each coordinate was frozen for, a d-vector."""
        return self.steps - self._active


@final
@dataclass(frozen=True, slots=True)
class Waypoint:
    """What was measured at one snapshot."""

    step: int  # of the run
    active: int  # k
    energy: float  # `||G||^2`, the full mean gradient's squared norm
    captured: float  # `||P G||^2`, that of its part on the support
    bias: float  # `||b||`, the clipping bias on the support
    bias_bound: float  # Lemma 6.4's bound on it
    unit_variance: float  # tau^2
    loss: float  # the mean loss


def measure(
    model: nn.Module,
    loss: LossFunction,
    snapshots: Sequence[Snapshot],
    batches: Sequence[MicroBatch],
    clip: FlatClip,
) -> tuple[Waypoint, ...]:
    """Gradients and clipping at each snapshot, on data of your choice; the model itself is left alone."""
    replica = copy.deepcopy(model).eval()
    points = []
    for snapshot in snapshots:
        install(replica, snapshot.weights)
        engine = make_engine(replica, loss)
        gradient = mean_gradient(engine, batches)
        clipping = clipping_report(engine, batches, snapshot.support, clip)
        energies = gradient**2
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
                loss=mean_loss(replica, loss, batches),
            )
        )
    return tuple(points)


def install(model: nn.Module, weights: Tensor) -> None:
    """Put a flat vector of weights into a model's trainable parameters."""
    layout = ParameterLayout.of(model)
    with torch.no_grad():
        for slot, parameter in zip(layout, layout.parameters(model), strict=True):
            parameter.copy_(weights[slot.span].reshape(slot.shape))


def energy_capture(points: Sequence[Waypoint]) -> float:
    """`alpha_T` (TP-TopK, Def. 6.5): the sum of `||P_t G_t||^2` over that of `||G_t||^2`; 1 when that is zero."""
    whole = math.fsum(point.energy for point in points)
    return min(1.0, math.fsum(point.captured for point in points) / whole) if whole else 1.0
