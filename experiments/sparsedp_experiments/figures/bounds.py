"""Measurements along a run: one-step criterion, bounds of TP-TopK and RS, symmetry of deviations (RS, Fig. 6-9)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparsedp.batch import MicroBatch
from sparsedp.clipping import FlatClip
from sparsedp.errors import SparseDPError
from sparsedp.grad_sample import make_engine
from sparsedp.methods.method import MAIN
from sparsedp.methods.support_scheduler import noise_on_mean
from sparsedp.privacy.plan import Phase, Plan
from sparsedp.randomness import PublicRandomness
from sparsedp_experiments.data.bundle import Split
from sparsedp_experiments.figures.study import Point, Study
from sparsedp_experiments.figures.support import LOSS, open_trainer, switch_of, train_until, unit_gradients
from sparsedp_experiments.theory.bounds import Descent, kappa, projected_bound
from sparsedp_experiments.theory.criteria import one_step, random_signal_loss
from sparsedp_experiments.theory.oracle import (
    asymmetry_p_value,
    held_out,
    lopsidedness,
    lopsidedness_by_chance,
    mean_gradient,
    mean_loss,
    smoothness,
    symmetry_error,
)
from sparsedp_experiments.theory.trajectory import Snapshot, Snapshots, Waypoint, energy_capture, install
from sparsedp_experiments.theory.trajectory import measure as walk


def measure_bounds(study: Study, point: Point) -> dict[str, Any]:
    """One whole run with snapshots, then everything the theory asks for at them."""
    options, settings = study.measure, study.run_settings(point).resolved()
    trainer, bundle = open_trainer(settings)
    plan, model = trainer.plan, trainer.model
    phase, nu = plan.phases[-1], noise_on_mean(plan, plan.phases[-1])
    kept = Snapshots(model, options["every"])
    train_until(trainer, plan.total_steps, (kept,))
    trainer.close()
    model.eval()
    rate, d = settings.lr or 0.0, trainer.support.dimension
    seed = int(point["seed"])
    batches = held_out(bundle.test, options["held_out"], options["batch"], seed)
    few = held_out(bundle.test, options["few"], options["batch"], seed)
    clip = FlatClip(phase.clip_norm or 1.0)
    rows = [
        _at(snapshot, model, batches, few, clip, nu, options)
        | _deviations(snapshot, model, bundle.test, clip, options, seed)
        for snapshot in kept.kept
    ]
    main = [snapshot for snapshot in kept.kept if snapshot.phase == MAIN.name]
    waypoints = walk(model, LOSS, main, few, clip)
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
        "theorem": _theorem(waypoints, smooth, rate, phase, plan, nu),
    }


def _at(
    snapshot: Snapshot, model: nn.Module, batches: Sequence[MicroBatch], few: Sequence[MicroBatch],
    clip: FlatClip, nu: float, options: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """The one-step criterion and the curvature at one snapshot."""
    install(model, snapshot.weights)
    gradient = mean_gradient(make_engine(model, LOSS), batches, clip)
    step = one_step(gradient, snapshot.support, nu)
    energy, k = float((gradient**2).sum()), snapshot.support.size
    curvature = smoothness(model, LOSS, few, PublicRandomness(0), iterations=options["iterations"])
    return {
        "step": snapshot.step,
        "phase": snapshot.phase,
        "active": k,
        "clipped_energy": energy,
        "signal_loss": step.signal_loss,
        "random_signal_loss": random_signal_loss(gradient, k),
        "noise_saved": step.noise_saved,
        "noise_full": step.full_error,
        "smoothness": curvature.value,
        "smoothness_iterations": curvature.iterations,
        "loss": mean_loss(model, LOSS, few),
    }


def _deviations(
    snapshot: Snapshot, model: nn.Module, split: Split, clip: FlatClip, options: Mapping[str, Any], seed: int
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
    """The four terms, or why the theorem is silent; measured means stand for its expectations."""
    seen = {
        "projected_energy": sum(p.captured for p in points) / len(points),
        "full_energy": sum(p.energy for p in points) / len(points),
        "rate_times_smoothness": rate * smooth,
    }
    try:
        bound = projected_bound(
            loss_gap=points[0].loss,
            smoothness=smooth,
            learning_rate=rate,
            steps=phase.steps,
            squared_biases=[point.bias**2 for point in points],
            batch_variance=max(point.unit_variance for point in points) / plan.expected_batch_size(phase),
            mean_active=sum(point.active for point in points) / len(points),
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


_AXES = 2


def measure_symmetry(study: Study, point: Point) -> dict[str, Any]:
    """A run, looked at after some epochs."""
    options, seed = study.measure, int(point["seed"])
    trainer, bundle = open_trainer(study.run_settings(point))
    per_epoch = trainer.plan.steps_per_epoch
    clip_norm = trainer.plan.phases[-1].clip_norm
    stops: list[dict[str, Any]] = []
    for epoch in options["after_epochs"]:
        if epoch:
            train_until(trainer, epoch * per_epoch)
        model = copy.deepcopy(trainer.model).eval()
        gradients = unit_gradients(make_engine(model, LOSS), bundle.test, options["units"], seed)
        stops.append(_look(gradients, FlatClip(clip_norm or 1.0), options, PublicRandomness(seed), epoch))
    trainer.close()
    return {"units": options["units"], "d": gradients.shape[1], "stops": stops}


def _look(
    gradients: Tensor, clip: FlatClip, options: Mapping[str, Any], public: PublicRandomness, epoch: int
) -> dict[str, Any]:
    mean = gradients.mean(0)
    deviations = gradients - mean
    planes = [_project(deviations, public, plane) for plane in range(options["planes"])]
    shown = planes[0][: options["shown"]]
    scale = float(torch.linalg.vector_norm(planes[0], dim=1).median())
    factors = clip.factors(torch.linalg.vector_norm(gradients, dim=1))
    progress = float((factors * (gradients @ mean)).mean())
    chances = [lopsidedness_by_chance(plane, public) for plane in planes]
    return {
        "epoch": epoch,
        "points": [[round(float(v) / scale, 2) for v in row] for row in shown],
        "lopsidedness": [lopsidedness(plane) for plane in planes],
        "by_chance": [float(chance.mean()) for chance in chances],
        "by_chance_95": [float(chance[int(0.95 * len(chance))]) for chance in chances],
        "p_values": [asymmetry_p_value(plane, public) for plane in planes],
        "symmetry_error": symmetry_error(mean, deviations, clip),
        "progress": progress,
        "near": float((torch.linalg.vector_norm(deviations, dim=1) < 0.75 * clip.norm).double().mean()),
    }


def _project(deviations: Tensor, public: PublicRandomness, plane: int) -> Tensor:
    directions = torch.stack(
        [public.normal(deviations.shape[1], (10, plane, axis)) for axis in range(_AXES)], 1
    )
    found: Tensor = deviations @ (directions / torch.linalg.vector_norm(directions, dim=0))
    return found
