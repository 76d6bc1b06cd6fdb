"""Along a run: the one-step criterion, alpha_T, the terms of TP-TopK's Theorem 6.3 and RS's best rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sparsedp.batch import MicroBatch
from sparsedp.clipping import FlatClip
from sparsedp.diagnostics import step_progress
from sparsedp.errors import SparseDPError
from sparsedp.grad_sample import make_engine
from sparsedp.methods.method import MAIN
from sparsedp.methods.scores import Energy
from sparsedp.methods.support_scheduler import noise_on_mean
from sparsedp.privacy.plan import Phase, Plan
from sparsedp.randomness import PublicRandomness
from sparsedp.runs.snapshots import Snapshot
from sparsedp_experiments.data.bundle import Split
from sparsedp_experiments.figures.config import Point, Study
from sparsedp_experiments.figures.cost import Costs
from sparsedp_experiments.figures.measures.warmup import ranked, scored
from sparsedp_experiments.figures.runs import (
    LOSS,
    Releases,
    held_out,
    open_trainer,
    switch_of,
    train_until,
    unit_gradients,
)
from sparsedp_experiments.theory.criteria import one_step, random_signal_loss, split_of
from sparsedp_experiments.theory.curvature import mean_loss, smoothness
from sparsedp_experiments.theory.oracle import mean_gradient
from sparsedp_experiments.theory.sparsification import Descent, kappa
from sparsedp_experiments.theory.symmetry import symmetry_error
from sparsedp_experiments.theory.trajectory import (
    Snapshots,
    Waypoint,
    bound_along,
    energy_capture,
    install,
)
from sparsedp_experiments.theory.trajectory import measure as walk


def measure(study: Study, point: Point) -> dict[str, Any]:
    """One whole run with snapshots, then everything the theory asks for at them."""
    options, costs, settings = study.measure, Costs(), study.run_settings(point).resolved()
    trainer, bundle = open_trainer(settings)
    plan, model = trainer.plan, trainer.model
    phase, nu = plan.phases[-1], noise_on_mean(plan, plan.phases[-1])
    kept, releases = Snapshots(model, options["every"]), Releases()
    with costs.of("training with snapshots (for comparison)"):
        train_until(trainer, switch_of(trainer), (kept, releases))
        train_until(trainer, plan.total_steps, (kept,))
    trainer.close()
    model.eval()
    rate, d = settings.lr or 0.0, trainer.support.dimension
    seed = int(point["seed"])
    batches = held_out(bundle.test, options["held_out"], options["batch"], seed)
    few = held_out(bundle.test, options["few"], options["batch"], seed)
    clip = FlatClip(phase.clip_norm or 1.0)
    rows = [
        _at(snapshot, model, batches, few, clip, nu, costs, options)
        | _deviations(snapshot, model, bundle.test, clip, options, seed, costs)
        for snapshot in kept.kept
    ]
    main = [snapshot for snapshot in kept.kept if snapshot.phase == MAIN.name]
    with costs.of(f"clipping, energy and loss at {len(main)} snapshots"):
        waypoints = walk(model, LOSS, main, few, clip).value
    smooth = max(row["smoothness"] for row in rows)
    return {
        "d": d,
        "steps": plan.total_steps,
        "switch": switch_of(trainer),
        "noise_std": nu,
        "learning_rate": settings.lr,
        "momentum": settings.momentum,
        "largest_smoothness": smooth,
        "alpha_T": energy_capture(waypoints),
        "snapshots": [row | _best_rate(row, plan, phase, rate, d) for row in rows],
        "waypoints": [_waypoint(found) for found in waypoints],
        "theorem": _theorem(waypoints, smooth, rate, phase, plan, nu),
        "split_gain": _split_gain(releases, nu, main[0].support.size),
        "costs": costs.to_json(),
    }


def _at(
    snapshot: Snapshot, model: nn.Module, batches: Sequence[MicroBatch], few: Sequence[MicroBatch],
    clip: FlatClip, nu: float, costs: Costs, options: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """The one-step criterion and the curvature at one snapshot."""
    install(model, snapshot.weights)
    with costs.of("clipped mean gradient"):
        gradient = mean_gradient(make_engine(model, LOSS), batches, clip).value
    step = one_step(gradient, snapshot.support, nu)
    energy = float((gradient**2).sum())
    captured = energy - step.signal_loss
    k, d = snapshot.support.size, snapshot.support.dimension
    with costs.of("smoothness by power iteration"):
        curvature = smoothness(model, LOSS, few, PublicRandomness(0), iterations=options["iterations"]).value
    return {
        "step": snapshot.step,
        "phase": snapshot.phase,
        "active": k,
        "clipped_energy": energy,
        "signal_loss": step.signal_loss,
        "random_signal_loss": random_signal_loss(gradient, k),
        "noise_saved": step.noise_saved,
        "noise_full": step.full_error,
        "progress_over_dense": step_progress(captured, k, nu) / step_progress(energy, d, nu),
        "smoothness": curvature.value,
        "smoothness_iterations": curvature.iterations,
        "loss": mean_loss(model, LOSS, few).value,
    }


def _deviations(
    snapshot: Snapshot,
    model: nn.Module,
    split: Split,
    clip: FlatClip,
    options: Mapping[str, Any],
    seed: int,
    costs: Costs,
) -> dict[str, Any]:
    """What RS's bounds ask of the gradients of single units."""
    gradients = unit_gradients(make_engine(model, LOSS), split, options["units"], seed)
    mean = gradients.mean(0)
    deviations = gradients - mean
    near = float((torch.linalg.vector_norm(deviations, dim=1) < 0.75 * clip.norm).double().mean())
    found: dict[str, Any] = {
        "near": near,
        "symmetry_error": symmetry_error(mean, deviations, clip),
        "kappa": None,
    }
    if near:
        with costs.of(f"kappa, {options['masks']} masks"):
            rate = options["kappa_rate"]
            found["kappa"] = kappa(mean, deviations, clip.norm, rate, PublicRandomness(0), options["masks"])
    return found


def _best_rate(
    row: dict[str, Any], plan: Plan, phase: Phase, rate: float, dimension: int
) -> dict[str, float]:
    """RS's r* from this snapshot on: the loss still to lose over the steps still to take."""
    run = Descent(
        loss_gap=row["loss"],
        smoothness=row["smoothness"],
        learning_rate=rate,
        clip_norm=phase.clip_norm or 1.0,
        noise_multiplier=phase.noise_multiplier,
        dimension=dimension,
        batch_size=plan.expected_batch_size(phase),
        steps=max(1, plan.total_steps - row["step"]),
        symmetry_error=row["symmetry_error"],
    )
    return {
        "best_rate": run.best_rate,
        "enlarged": run.enlarged,
        "noise_term": rate * run.noise,
        "printed_rate": max(0.0, 1 - run.enlarged / run.noise) if run.noise else 0.0,
    }


def _theorem(
    points: Sequence[Waypoint], smooth: float, rate: float, phase: Phase, plan: Plan, nu: float
) -> dict[str, Any]:
    """The four terms, or why the theorem is silent."""
    seen = {
        "projected_energy": sum(p.captured for p in points) / len(points),
        "full_energy": sum(p.energy for p in points) / len(points),
        "rate_times_smoothness": rate * smooth,
    }
    try:
        bound = bound_along(
            points,
            smoothness=smooth,
            learning_rate=rate,
            steps=phase.steps,
            batch_size=plan.expected_batch_size(phase),
            noise_std=nu,
        )
    except SparseDPError as error:
        return {**seen, "silent": str(error)}
    return {
        **seen,
        "progress": bound.progress,
        "clipping_bias": bound.clipping_bias,
        "mini_batch": bound.mini_batch,
        "dp_noise": bound.dp_noise,
        "total": bound.total,
        "full_gradient": bound.full_gradient(energy_capture(points)),
    }


def _waypoint(point: Waypoint) -> dict[str, Any]:
    return {name: getattr(point, name) for name in point.__slots__}


def _split_gain(releases: Releases, nu: float, size: int) -> dict[str, float]:
    """Prop. 5.1's gain at the switch as the warm-up alone estimates it."""
    seen = releases.stacked()
    half = len(seen) // 2
    gain = split_of(ranked(scored(Energy(), seen[:half], nu)), seen[half:], nu).gain(size, nu)
    return {"value": gain.value, "std": gain.std}
