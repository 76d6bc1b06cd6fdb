"""What un-noised gradients show about a finished run: on request, marked, and in a file of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn

from sparsedp.batch import MicroBatch, PerSampleLoss
from sparsedp.clipping import FlatClip
from sparsedp.diagnostics import Proxy, RunView
from sparsedp.grad_sample import make_engine
from sparsedp.grad_sample.query import Engine
from sparsedp.methods.support_scheduler import noise_on_mean
from sparsedp.randomness import PublicRandomness
from sparsedp.ranks.here import refuse_ranks
from sparsedp.runs.run import Run, load_weights
from sparsedp.runs.snapshots import read_snapshots
from sparsedp_experiments.theory.convergence import retained_energy
from sparsedp_experiments.theory.criteria import energy_captured
from sparsedp_experiments.theory.curvature import mean_loss, smoothness
from sparsedp_experiments.theory.measured import (
    capture_findings,
    clipping_findings,
    criterion_findings,
    symmetry_findings,
    trajectory_findings,
)
from sparsedp_experiments.theory.measured_bounds import Measured, bound_findings
from sparsedp_experiments.theory.nonprivate import Findings, NonPrivate, write_nonprivate
from sparsedp_experiments.theory.oracle import (
    clipping_report,
    deviations,
    mean_gradient,
    projected_deviations,
)
from sparsedp_experiments.theory.sparsification import kappa, progress_measure
from sparsedp_experiments.theory.symmetry import symmetry_error
from sparsedp_experiments.theory.trajectory import Waypoint, energy_capture, measure

__all__ = ["Limits", "Proxy", "RunView", "diagnose_nonprivate"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much the slow parts look at.

    Attributes:
        curvature_rows: rows of the smoothness.
        unit_rows: rows whose units are looked at one by one.
        snapshot_rows: the same, at each snapshot of a run.
        deviations: numbers in the matrix of deviations, units times d; 8 bytes each.
        deviating_units: most units in it.
    """

    curvature_rows: int = 512
    unit_rows: int = 1024
    snapshot_rows: int = 256
    deviations: int = 2**24
    deviating_units: int = 256


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Subject:
    """What is looked at, and who is told."""

    model: nn.Module
    loss: PerSampleLoss
    engine: Engine
    batches: Sequence[MicroBatch] = field(repr=False)
    view: RunView
    public: PublicRandomness
    limits: Limits
    say: Callable[[str], None]
    progress: Callable[[int, int], None] | None

    def some(self, rows: int) -> list[MicroBatch]:
        """The first batches that hold at least so many rows."""
        kept: list[MicroBatch] = []
        for batch in self.batches:
            if sum(b.row_count for b in kept) >= rows:
                break
            kept.append(batch)
        return kept


def diagnose_nonprivate(
    folder: Path | str,
    model: nn.Module,
    loss: PerSampleLoss,
    batches: Sequence[MicroBatch],
    public: PublicRandomness,
    say: Callable[[str], None] = lambda _: None,
    *,
    progress: Callable[[int, int], None] | None = None,
    fresh: nn.Module | None = None,
    limits: Limits = Limits(),  # noqa: B008
) -> Path:
    """Measure a finished run with un-noised gradients at its final weights, into the run's `nonprivate.json`.

    Args:
        folder: of the run.
        model: of the run's architecture; gets its weights, and evaluation mode.
        loss: the per-sample loss.
        batches: rows to measure on: held-out ones for the support's quality (TP-TopK, Sec. 7.4).
        public: where power iteration, projections and masks come from.
        say: told what is being done.
        progress: called with (done, all) within a stage.
        fresh: a model as the run began; without one, and without snapshots, there are no bounds.
        limits: how much the slow parts look at.

    **Privacy.** The file is not private, whatever rows were used; nothing of it flows back.
    **Edge cases.** A value that is not finite, as diverged weights give, is left out with a remark.
    """
    refuse_ranks("the diagnosis")
    view = RunView.of(Run.open(folder))
    load_weights(folder, model)
    model.eval()
    subject = _Subject(model, loss, make_engine(model, loss), batches, view, public, limits, say, progress)
    say("mean gradient")
    gradient = mean_gradient(subject.engine, batches)
    found = capture_findings(gradient, view)
    phase = view.plan.phases[-1]
    if phase.clip_norm is None:
        found |= _curvature(subject)[1] | _symmetry(subject)
    else:
        found |= _clipped(folder, subject, gradient, FlatClip(phase.clip_norm), fresh)
    found = _finite(found)
    return write_nonprivate(folder, found.values, found.figures, found.remarks)


def _clipped(
    folder: Path | str,
    subject: _Subject,
    gradient: NonPrivate[Tensor],
    clip: FlatClip,
    fresh: nn.Module | None,
) -> Findings:
    """What there is to say about a run that clips."""
    view, engine = subject.view, subject.engine
    subject.say("clipped mean gradient")
    clipped = mean_gradient(engine, subject.batches, clip)
    found = criterion_findings(clipped, view, noise_on_mean(view.plan, view.plan.phases[-1]))
    subject.say("clipping, unit by unit")
    report = clipping_report(
        engine, subject.some(subject.limits.unit_rows), view.support, clip, subject.progress
    )
    found |= clipping_findings(report, clip.norm)
    beta, curved = _curvature(subject)
    found |= curved | _symmetry(subject)
    points = _along(folder, subject, clip)
    if points is not None:
        found |= trajectory_findings(points, view.support.dimension)
    start = _start_loss(subject, points, fresh)
    if start is None:
        return found | Findings(remarks=("No bounds: the loss at the start of the run is not known.",))
    subject.say("deviations and bounds")
    spread, off, share = _deviations(subject, clip)
    end = mean_loss(subject.model, subject.loss, subject.batches)
    along = [] if points is None else list(points.value)
    measured = Measured(
        smoothness=beta.value,
        start_loss=start.value,
        end_loss=end.value,
        retained=retained_energy(clipped.value, view.support),
        captured=energy_capture(along) if along else energy_captured(gradient.value**2, view.support),
        largest_deviation=spread,
        symmetry_error=off,
        kappa=share,
        squared_biases=tuple(p.bias**2 for p in along) or (report.value.bias**2,),
        unit_variance=max((p.unit_variance for p in along), default=report.value.unit_variance),
    )
    touched = "; ".join(dict.fromkeys([report.touched, beta.touched, start.touched]))
    values = {"loss where the run began": start, "loss at the final weights": end}
    return found | Findings(values) | bound_findings(NonPrivate(measured, touched), view)


def _finite(found: Findings) -> Findings:
    lost = [name for name, marked in found.values.items() if not math.isfinite(marked.value)]
    kept = {name: marked for name, marked in found.values.items() if name not in lost}
    remarks = (f"Not a finite number, so left out: {name}. Have the weights diverged?" for name in lost)
    return Findings(kept, found.figures, (*found.remarks, *remarks))


def _curvature(subject: _Subject) -> tuple[NonPrivate[float], Findings]:
    subject.say("smoothness")
    rows = subject.some(subject.limits.curvature_rows)
    found = smoothness(subject.model, subject.loss, rows, subject.public, progress=subject.progress)
    value = found.map(lambda s: s.value)
    return value, Findings({"smoothness (largest curvature)": value})


def _symmetry(subject: _Subject) -> Findings:
    subject.say("symmetry of deviations")
    rows = subject.some(subject.limits.unit_rows)
    points = projected_deviations(subject.engine, rows, subject.public, subject.progress)
    return symmetry_findings(points, subject.public)


def _along(folder: Path | str, subject: _Subject, clip: FlatClip) -> NonPrivate[tuple[Waypoint, ...]] | None:
    snapshots = read_snapshots(folder)
    if not snapshots:
        return None
    subject.say("gradients along the run")
    rows = subject.some(subject.limits.snapshot_rows)
    return measure(subject.model, subject.loss, snapshots, rows, clip, subject.progress)


def _start_loss(
    subject: _Subject, points: NonPrivate[tuple[Waypoint, ...]] | None, fresh: nn.Module | None
) -> NonPrivate[float] | None:
    if points is not None:
        return points.map(lambda p: p[0].loss)
    return None if fresh is None else mean_loss(fresh.eval(), subject.loss, subject.batches)


def _deviations(subject: _Subject, clip: FlatClip) -> tuple[float, float, float | None]:
    """The longest deviation, RS's symmetry error and its kappa, where it can be measured. Not private."""
    limits, d = subject.limits, subject.view.support.dimension
    most = max(2, min(limits.deviating_units, limits.deviations // d))
    mean, rows = deviations(subject.engine, subject.batches, most, subject.progress).value
    longest = float(torch.linalg.vector_norm(rows, dim=1).max())
    rate = 1 - subject.view.support.active_ratio
    measurable = progress_measure(mean, rows, clip.norm) > 0
    share = kappa(mean, rows, clip.norm, rate, subject.public) if measurable else None
    return longest, symmetry_error(mean, rows, clip), share
