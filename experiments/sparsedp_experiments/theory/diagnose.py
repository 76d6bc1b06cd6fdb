"""A finished run under the papers' theory: what un-noised gradients show at its weights, and the bounds there.

It is not private, and its values go into `nonprivate.json` of the run's folder and nowhere else.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from sparsedp._files import write_json
from sparsedp.batch import LossFunction, MicroBatch, per_sample_loss
from sparsedp.clipping import FlatClip
from sparsedp.distributed import require_one_process
from sparsedp.errors import SparseDPError
from sparsedp.grad_sample import make_engine
from sparsedp.methods.support_scheduler import noise_on_mean
from sparsedp.privacy.plan import Phase
from sparsedp.randomness import PublicRandomness
from sparsedp.runs.run import Run, load_weights
from sparsedp_experiments.runs.execute import check, load_data, loss_of, model_of, moments_in
from sparsedp_experiments.runs.settings import Settings, settings_of_run
from sparsedp_experiments.theory.bounds import (
    Descent,
    alignment_bound,
    budget_bound,
    kappa,
    noisy_bound,
    private_alignment_bound,
    progress_measure,
    projected_bound,
    retained_energy,
    retention_bound,
)
from sparsedp_experiments.theory.criteria import energy_captured, one_step, random_capture
from sparsedp_experiments.theory.oracle import (
    asymmetry_p_value,
    clipping_report,
    deviations,
    held_out,
    lopsidedness,
    lopsidedness_by_chance,
    mean_gradient,
    mean_loss,
    projected_deviations,
    smoothness,
    symmetry_error,
)
from sparsedp_experiments.theory.trajectory import energy_capture, measure, read_snapshots

NONPRIVATE = "nonprivate.json"
BANNER = (
    f"Not private: computed from the run's data without noise. The results go to RUN/{NONPRIVATE} and into no other "
    "file. Do not publish them or choose anything by them."
)
RATE_REMARK = (
    "Bounds: the learning rate is taken as eta/(1 - momentum), the least loss as zero, the smoothness as that of the "
    "final weights, and the largest deviation as that of the units looked at. They say what theory promises a run "
    "like this, not how it did."
)
_BATCH = 128


def diagnose_run(folder: Path, side: str, rows: int) -> dict[str, Any]:
    """Measure a run that the laboratory trained, on at most `rows` units of one side of its data. Not private."""
    settings = check(Settings.from_json(settings_of_run(folder)))
    bundle = load_data(settings)
    sides = {"test": bundle.test, "train": bundle.train}
    if side not in sides:
        raise SparseDPError(f"--data: got {side!r}, expected test or train")
    split = replace(sides[side], units=None) if settings.unit == "row" else sides[side]
    model, fresh = (model_of(settings, bundle) for _ in range(2))
    if moments_in(model) is not None:
        raise SparseDPError(
            "least squares: got a run whose loss is linear in its weights, expected one with gradients that change "
            "as it trains: there is no curvature, support or progress to measure"
        )
    batches = held_out(split, rows, _BATCH, seed=0)
    return diagnose_nonprivate(folder, model, per_sample_loss(loss_of(model)), batches, fresh=fresh)


# How much the slow parts look at: rows of the smoothness, rows whose units are looked at one by one, the same at each
# snapshot, numbers in the matrix of deviations (units times d), most units in it.
_CURVATURE_ROWS, _UNIT_ROWS, _SNAPSHOT_ROWS = 512, 1024, 256
_DEVIATIONS, _DEVIATING_UNITS = 2**24, 256


def diagnose_nonprivate(
    folder: Path | str,
    model: nn.Module,
    loss: LossFunction,
    batches: Sequence[MicroBatch],
    *,
    fresh: nn.Module | None = None,
) -> dict[str, Any]:
    """Measure a finished run with un-noised gradients at its final weights; gives what `nonprivate.json` then holds.

    Args:
        folder: of the run.
        model: of the run's architecture; gets its weights, and evaluation mode.
        loss: the per-example loss.
        batches: rows to measure on: held-out ones for the support's quality (TP-TopK, Sec. 7.4).
        fresh: a model as the run began; without one, and without snapshots, there are no bounds.

    **Privacy.** The file is not private, whatever rows were used; nothing of it flows back.
    """
    require_one_process("the diagnosis")
    run = Run.open(folder)
    load_weights(folder, model)
    values, remarks = _measurements(folder, model.eval(), loss, batches, run, fresh)
    lost = [name for name, value in values.items() if not math.isfinite(value)]
    document = {
        "format": 1,
        "values": [{"name": n, "value": v, "note": BANNER} for n, v in values.items() if n not in lost],
        "remarks": [
            *remarks,
            *(f"Not a finite number, so left out: {name}. Have the weights diverged?" for name in lost),
        ],
    }
    write_json(Path(folder) / NONPRIVATE, document)
    return document


def _measurements(
    folder: Path | str,
    model: nn.Module,
    loss: LossFunction,
    batches: Sequence[MicroBatch],
    run: Run,
    fresh: nn.Module | None,
) -> tuple[dict[str, float], list[str]]:
    """Values by name, and what could not be computed."""
    public, support = PublicRandomness(0), run.active
    engine, phase = make_engine(model, loss), run.plan.phases[-1]
    gradient, few = mean_gradient(engine, batches), _some(batches, _UNIT_ROWS)
    energies = gradient**2
    low, high = random_capture(energies, support.size).interval()
    beta = smoothness(model, loss, _some(batches, _CURVATURE_ROWS), public).value
    points = projected_deviations(engine, few, public)
    chance = lopsidedness_by_chance(points, public)
    values = {
        "gradient energy on the support (alpha_oracle)": energy_captured(energies, support),
        "random support, lower end of 95 %": low,
        "random support, upper end of 95 %": high,
        "squared gradient norm": float(energies.sum()),
        "smoothness (largest curvature)": beta,
        "lopsidedness of gradient deviations (0 to 1)": lopsidedness(points),
        "lopsidedness of a symmetric cloud, 95 % point": float(chance[round(0.95 * (len(chance) - 1))]),
        "p-value of symmetry": asymmetry_p_value(points, public),
    }
    if phase.clip_norm is None:
        return values, ["No bounds: this run did not clip."]
    clip = FlatClip(phase.clip_norm)
    clipped = mean_gradient(engine, batches, clip)
    step = one_step(clipped, support, noise_on_mean(run.plan, phase))
    retained = retained_energy(clipped, support)
    report = clipping_report(engine, few, support, clip)
    values |= {
        "signal loss of the support": step.signal_loss,
        "noise saved by the support": step.noise_saved,
        "energy retained by the support (AdaDPIGU, alpha)": retained,
        "clipping bias": report.bias,
        "bound on the clipping bias (Lemma 6.4)": report.bias_bound,
        "variance of a clipped gradient": report.unit_variance,
        "share of units that are clipped": float((report.norms > clip.norm).double().mean()),
    }
    along = measure(model, loss, read_snapshots(folder), _some(batches, _SNAPSHOT_ROWS), clip)
    if along:
        values["energy captured along the run (alpha_T)"] = energy_capture(along)
    elif fresh is None:
        return values, ["No bounds: the loss at the start of the run is not known."]
    start = along[0].loss if along or fresh is None else mean_loss(fresh.eval(), loss, batches)
    most = max(2, min(_DEVIATING_UNITS, _DEVIATIONS // support.dimension))
    mean, rows = deviations(engine, batches, most)
    measurable = progress_measure(mean, rows, clip.norm) > 0
    measured = Measured(
        smoothness=beta,
        start_loss=start,
        end_loss=mean_loss(model, loss, batches),
        retained=retained,
        captured=energy_capture(along) if along else energy_captured(energies, support),
        largest_deviation=float(torch.linalg.vector_norm(rows, dim=1).max()),
        symmetry_error=symmetry_error(mean, rows, clip),
        kappa=kappa(mean, rows, clip.norm, 1 - support.active_ratio, public) if measurable else None,
        squared_biases=tuple(point.bias**2 for point in along) or (report.bias**2,),
        unit_variance=max((point.unit_variance for point in along), default=report.unit_variance),
    )
    values |= {"loss where the run began": start, "loss at the final weights": measured.end_loss}
    bounds, remarks = bounds_of(measured, run)
    return {**values, **bounds}, remarks


def _some(batches: Sequence[MicroBatch], rows: int) -> list[MicroBatch]:
    """The first batches that hold at least so many rows."""
    before = itertools.accumulate((one.example_count for one in batches), initial=0)
    return [batch for batch, seen in zip(batches, before, strict=False) if seen < rows]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the bounds need from un-noised gradients: at the final weights, or the largest seen where the run was.

    `retained` and `captured` are shares of energy on the support, of the clipped gradient and of the whole one
    (`alpha_T` where snapshots tell); `kappa` is None where it cannot be measured.
    """

    smoothness: float
    start_loss: float
    end_loss: float
    retained: float
    captured: float
    largest_deviation: float
    symmetry_error: float
    kappa: float | None
    squared_biases: tuple[float, ...]
    unit_variance: float


def _long_run_rate(run: Run) -> float | None:
    """`eta/(1 - momentum)` of SGD, by which a constant gradient moves in the long run; None for other optimizers."""
    optimizer = run.record["settings"]["optimizer"]
    if optimizer["class"] != "SGD" or not optimizer["groups"]:
        return None
    group = optimizer["groups"][0]
    return float(group["lr"]) / (1 - float(group.get("momentum", 0.0)))


def bounds_of(m: Measured, run: Run) -> tuple[dict[str, float], list[str]]:
    """Every bound that can be stated for the run's last phase, and remarks."""
    phase, eta = run.plan.phases[-1], _long_run_rate(run)
    if phase.clip_norm is None or eta is None:
        return {}, [
            "No bounds: they are for SGD with clipping, and this run had another optimizer or no clip."
        ]
    if not 0 < m.smoothness < math.inf:
        return {}, ["No bounds: the loss shows no curvature here, or no finite one."]
    remarks = [RATE_REMARK]
    if eta * m.smoothness > 1:
        remarks.append(
            "Theorem 6.3 covers rates up to 1/smoothness; the run's is larger: its terms are of that."
        )
    if m.kappa is None:
        remarks.append(
            "RS's kappa cannot be measured here: no unit's gradient is within 3/4 of the clip norm of the mean. "
            "sqrt(k/d) stands for it, as in its App. G."
        )
    if phase.geometry != "identity":
        remarks.append("The bounds are for gradients as they are; this run standardized them.")
    return {
        **_rs(m, run, phase, eta),
        **_adadpigu(m, run, phase, eta),
        **_tp_topk(m, run, phase, eta),
    }, remarks


def _rs(m: Measured, run: Run, phase: Phase, eta: float) -> dict[str, float]:
    """RS: Delta_C, Delta_sigma, r* and the bounds of its theorems at the run's rate of frozen coordinates."""
    plan, d, clip = run.plan, run.active.dimension, phase.clip_norm or 1.0
    rate, batch = 1 - run.active.active_ratio, plan.expected_batch_size(phase)
    share = m.kappa or math.sqrt(1 - rate)
    seen: Any = {
        "loss_gap": m.start_loss, "smoothness": m.smoothness, "dimension": d, "batch_size": batch,
        "steps": phase.steps,
    }  # fmt: skip
    descent = Descent(
        **seen, learning_rate=eta, clip_norm=clip, noise_multiplier=phase.gradient_noise,
        symmetry_error=m.symmetry_error,
    )  # fmt: skip
    unclipped = noisy_bound(
        **seen, deviation_bound=m.largest_deviation, noise_std=phase.gradient_noise * clip, rate=rate
    )
    found = {
        "Delta_C (RS)": descent.enlarged,
        "Delta_sigma (RS)": descent.noise,
        "best share to freeze, r* (RS)": descent.best_rate,
        "kappa (RS), measured or sqrt(k/d)": share,
        "bound of RS, Theorem 3.2 (noise, no clip)": unclipped,
        "bound of RS, Theorem 3.4 (clip, no noise)": descent.clipped_bound(share),
        "bound of RS, Theorem 3.5": descent.private_bound(rate, share),
        "bound of RS, eq. 15 (all coordinates)": descent.private_bound(0.0, 1.0),
    }
    epsilon, delta, q = plan.target_epsilon, plan.delta, phase.sampling_rate
    if epsilon and delta:
        # The constant of Abadi et al. that gives the plan's own noise.
        constant = phase.noise_multiplier * epsilon / (q * math.sqrt(phase.steps * math.log(1 / delta)))
        found["bound of RS, Corollary C.1.1"] = budget_bound(
            descent, rate, share, epsilon=epsilon, delta=delta, sampling_rate=q, constant=constant
        )
    return found


def _adadpigu(m: Measured, run: Run, phase: Phase, eta: float) -> dict[str, float]:
    """AdaDPIGU: Theorems 13, 16 and 17."""
    clip, active, batch = phase.clip_norm or 1.0, run.active.size, run.plan.expected_batch_size(phase)
    rate: Any = {"smoothness": m.smoothness, "learning_rate": eta, "clip_norm": clip}
    found = {
        "bound of AdaDPIGU, Theorem 13": alignment_bound(loss_gap=m.start_loss, steps=phase.steps, **rate),
        "bound of AdaDPIGU, Theorem 17": private_alignment_bound(
            loss_decrease=(m.start_loss - m.end_loss) / phase.steps, noise_multiplier=phase.gradient_noise,
            active=active, batch_size=batch, **rate,
        ),
    }  # fmt: skip
    if m.retained > 0:
        found["bound of AdaDPIGU, Theorem 16"] = retention_bound(
            loss_gap=m.start_loss, smoothness=m.smoothness, steps=phase.steps, retained=m.retained,
            deviation_bound=m.largest_deviation, noise_std=phase.noise_multiplier * clip, active=active,
            batch_size=batch,
        )  # fmt: skip
    return found


def _tp_topk(m: Measured, run: Run, phase: Phase, eta: float) -> dict[str, float]:
    """TP-TopK: the four terms of Theorem 6.3, their sum, and Corollary 6.6."""
    terms = projected_bound(
        loss_gap=m.start_loss,
        smoothness=m.smoothness,
        learning_rate=min(eta, 1 / m.smoothness),
        steps=phase.steps,
        squared_biases=m.squared_biases,
        batch_variance=m.unit_variance / run.plan.expected_batch_size(phase),
        mean_active=run.active.size,
        noise_std=noise_on_mean(run.plan, phase),
    )
    found = {
        "Theorem 6.3, progress": terms.progress,
        "Theorem 6.3, clipping bias": terms.clipping_bias,
        "Theorem 6.3, mini-batches": terms.mini_batch,
        "Theorem 6.3, DP noise": terms.dp_noise,
        "bound of Theorem 6.3 (gradient on the support)": terms.total,
    }
    if m.captured > 0:
        found["bound of Corollary 6.6 (whole gradient)"] = terms.full_gradient(m.captured)
    return found
