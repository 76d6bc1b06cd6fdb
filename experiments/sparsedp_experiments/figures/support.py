"""Measurements on supports: warm-up (TP-TopK, Fig. 1, Sec. 7.4), freezing (RS, Fig. 12), bytes sent (RS, Sec. 5)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from sparsedp._validate import exact_ratio, share_of
from sparsedp.batch import LossFunction, MicroBatch, from_criterion
from sparsedp.clipping import FlatClip
from sparsedp.diagnostics import overlap, proxy_concentration, pure_noise, split_concentration
from sparsedp.errors import SparseDPError
from sparsedp.grad_sample import make_engine
from sparsedp.grad_sample.query import ClippedSumEngine
from sparsedp.loading import DataConfig
from sparsedp.methods import build_plan
from sparsedp.methods.method import WARM_UP
from sparsedp.methods.scores import Coherent, Energy, NoisyGradient
from sparsedp.methods.support_scheduler import noise_on_mean
from sparsedp.parameters import Support
from sparsedp.randomness import PublicRandomness
from sparsedp.results import CallbackLike, StepReport, tell
from sparsedp.runs.record import EpochMetrics
from sparsedp.training.trainer import Trainer
from sparsedp_experiments.data.bundle import DataBundle, Split
from sparsedp_experiments.figures.study import Point, Study
from sparsedp_experiments.runs.execute import load_data, new_model
from sparsedp_experiments.runs.settings import Settings
from sparsedp_experiments.theory.criteria import (
    concentration_curve,
    energy_captured,
    random_capture,
    recovery_curve,
    split_of,
)
from sparsedp_experiments.theory.oracle import HELD_OUT, held_out, mean_gradient
from sparsedp_experiments.theory.trajectory import FreezeCount, Snapshot, Snapshots, install

CRITERION = nn.CrossEntropyLoss(reduction="none")
LOSS: LossFunction = from_criterion(CRITERION)


def open_trainer(settings: Settings) -> tuple[Trainer, DataBundle]:
    """A trainer of these settings, as `sparsedp train` would make it, and its data. SGD."""
    found = settings.resolved()
    bundle = load_data(found)
    train, rate = bundle.train, found.lr
    if rate is None:
        raise SparseDPError(f"lr: not given, and {found.dataset} has no recipe for {found.model}; give one")
    plan = build_plan(
        found.configured_method(), units=train.unit_count, unit_name=bundle.unit, **found.asked()
    )
    model = new_model(found, bundle)
    model.train()
    trainer = Trainer(
        model,
        train,
        CRITERION,
        plan=plan,
        optimizer=functools.partial(torch.optim.SGD, lr=rate, momentum=found.momentum or 0.0),
        data=DataConfig(unit_ids=train.units, max_physical_batch=found.max_physical_batch),
        seed=found.seed,
    )
    return trainer, bundle


def train_until(trainer: Trainer, step: int, callbacks: Sequence[CallbackLike] = ()) -> None:
    """Take the steps before `step`; what was planned and not done is given up."""
    for batch in trainer:
        report = trainer.step(batch)
        tell(callbacks, report)
        if trainer.position >= step:
            break


def switch_of(trainer: Trainer) -> int:
    """The first step after the warm-up."""
    plan = trainer.plan
    warm_up = next(phase for phase in plan.phases if phase.name == WARM_UP.name)
    return plan.first_step(WARM_UP.name) + warm_up.steps


def unit_gradients(engine: ClippedSumEngine, split: Split, units: int, seed: int) -> Tensor:
    """One un-noised gradient for each of some random held-out rows, `[units, d]`. Not private."""
    rows = PublicRandomness(seed).permutation(len(split), (HELD_OUT,))[:units]
    singles = (MicroBatch(split.rows_at(row.reshape(1))) for row in rows)
    return torch.stack([mean_gradient(engine, [single]) for single in singles])


SCORES: tuple[Energy | Coherent, ...] = (Energy(), Coherent())


def measure_warmup(study: Study, point: Point) -> dict[str, Any]:
    """One private warm-up, and everything Fig. 1 and Sec. 7.4 ask of it."""
    options, released = study.measure, []
    settings = study.run_settings(point)
    trainer, bundle = open_trainer(settings)
    plan = trainer.plan
    nu = noise_on_mean(plan, plan.phases[0])

    def keep(event: StepReport | EpochMetrics) -> None:
        if isinstance(event, StepReport):
            released.append(event.released.mean.detach().to("cpu", torch.float32))

    train_until(trainer, switch_of(trainer), (keep,))
    trainer.close()
    model = trainer.model.eval()
    seen = torch.stack(released).double()
    batches = held_out(bundle.test, options["held_out"], options["batch"], int(point["seed"]))
    engine = make_engine(model, LOSS)
    gradients = torch.stack([mean_gradient(engine, [batch]) for batch in batches])
    clip = FlatClip(plan.phases[0].clip_norm or 1.0)
    clipped = mean_gradient(engine, batches, clip) ** 2
    energies = gradients.mean(0) ** 2
    fair = gradients[0::2].mean(0) * gradients[1::2].mean(0)
    scores = {score.name: scored(score, seen, nu) for score in SCORES}
    shown = {"mean gradient": energies, "mini-batch gradients": (gradients**2).mean(0), "clipped": clipped}
    curves = _curves(shown, scores, options["shares"], int(point["seed"]))
    supports = [_at_ratio(ratio, scores, seen, nu, energies, fair, clipped) for ratio in options["ratios"]]
    total = float(energies.sum())
    return {
        "d": seen.shape[1],
        "warmup_steps": seen.shape[0],
        "noise_multiplier": plan.phases[0].noise_multiplier,
        "noise_std": nu,
        "unit": bundle.unit,
        "held_out_units": options["held_out"],
        "energy": total,
        "energy_less_sampling": float(fair.sum()),
        "clipped_energy": float(clipped.sum()),
        "clipped_energy_over_noise": float(clipped.sum()) / (seen.shape[1] * nu**2),
        **curves,
        "supports": supports,
    }


def scored(score: Energy | Coherent, seen: Tensor, noise_std: float) -> Tensor:
    """The scores of a stack of dense releases."""
    state = score.init(seen.shape[1])
    variance = torch.full((seen.shape[1],), noise_std**2, dtype=torch.float64)
    for gradient in seen:
        state = score.update(state, NoisyGradient(gradient, variance))
    return score.scores(state)


def ranked(scores: Tensor) -> Tensor:
    """Coordinates, best first; ties go to the lower index."""
    return torch.sort(scores, descending=True, stable=True).indices


def _curves(
    shown: dict[str, Tensor], scores: dict[str, Tensor], shares: Sequence[float], seed: int
) -> dict[str, Any]:
    energies = shown["mean gradient"]
    curves = {name: recovery_curve(energies, ranked(found), shares) for name, found in scores.items()}
    first = next(iter(curves.values()))
    chance = PublicRandomness(seed).permutation(energies.numel(), (8,))
    return {
        "shares": list(shares),
        "concentration": {name: concentration_curve(values, shares) for name, values in shown.items()},
        "recovery": {
            **{name: [step.learned for step in curve] for name, curve in curves.items()},
            "random": [step.learned for step in recovery_curve(energies, chance, shares)],
            "oracle": [step.oracle for step in first],
        },
    }


def _at_ratio(
    ratio: float,
    scores: dict[str, Tensor],
    seen: Tensor,
    nu: float,
    energies: Tensor,
    fair: Tensor,
    clipped: Tensor,
) -> dict[str, Any]:
    d, steps = energies.numel(), seen.shape[0]
    k = max(1, share_of(exact_ratio(ratio), d))
    chance = random_capture(energies, k)
    found: dict[str, Any] = {
        "ratio": ratio,
        "k": k,
        "active_ratio": k / d,
        "random_std": chance.std,
        "by": {},
    }
    squares = {"energy": steps, "coherent": 1}
    half = steps // 2
    for score in SCORES:
        support = Support(ranked(scores[score.name])[:k], len(energies))
        null = pure_noise(k, d, squares[score.name])
        early = ranked(scored(score, seen[:half], nu))
        split = split_concentration(split_of(early, seen[half:], nu), k)
        found["by"][score.name] = {
            "alpha": energy_captured(energies, support),
            "alpha_less_sampling": float(support.gather(fair).sum() / fair.sum()),
            "alpha_clipped": energy_captured(clipped, support),
            "rho_sig": proxy_concentration(scores[score.name], support),
            "null": null.mean,
            "null_std": null.std,
            "split": None if split.share is None else split.share.value,
            "split_std": None if split.share is None else split.share.std,
            "alpha_of_first_half": energy_captured(energies, Support(early[:k], d)),
        }
    best = Support(ranked(energies)[:k], len(energies))
    found["oracle"] = energy_captured(energies, best)
    return found


def measure_freezing(study: Study, point: Point) -> dict[str, Any]:
    """One run, its supports epoch by epoch, and the supports that un-noised gradients would have given."""
    trainer, bundle = open_trainer(study.run_settings(point))
    per_epoch = trainer.plan.steps_per_epoch
    counted = FreezeCount(trainer.support.dimension)
    kept = Snapshots(trainer.model, per_epoch)
    train_until(trainer, trainer.plan.total_steps, (counted, kept))
    trainer.close()
    snapshots = kept.kept
    batches = held_out(bundle.train, study.measure["rows"], study.measure["batch"], int(point["seed"]))
    clean = _clean_supports(trainer, snapshots, batches)
    supports = [snapshot.support for snapshot in snapshots]
    found = [overlap(own, true) for own, true in zip(supports[1:], clean[1:], strict=True) if not own.is_full]
    frozen = (counted.frozen().double() / per_epoch).round().to(torch.int64)
    return {
        "d": trainer.support.dimension,
        "epochs": len(supports),
        "active_ratios": [support.active_ratio for support in supports],
        "histograms": {
            "as it was": _histogram(frozen, len(supports)),
            "ranked without noise": _histogram(_times_frozen(clean), len(supports)),
        },
        "by_chance": by_chance([1 - support.active_ratio for support in supports]),
        "variance": {"as it was": _spread(frozen), "ranked without noise": _spread(_times_frozen(clean))},
        "overlap_with_clean": sum(o.share for o in found) / len(found),
        "overlap_by_chance": sum(o.random.mean for o in found) / len(found),
        "churn": sum(overlap(a, b).churn for a, b in pairwise(supports)) / (len(supports) - 1),
    }


def by_chance(rates: Sequence[float]) -> list[float]:
    """Probability of being frozen in 0, 1, ... of the epochs when each epoch freezes at random: Poisson-binomial."""
    chances = torch.tensor([1.0], dtype=torch.float64)
    for rate in rates:
        stay, more = torch.zeros(len(chances) + 1).double(), torch.zeros(len(chances) + 1).double()
        stay[:-1], more[1:] = chances * (1 - rate), chances * rate
        chances = stay + more
    return [float(chance) for chance in chances]


def _clean_supports(
    trainer: Trainer, snapshots: Sequence[Snapshot], batches: Sequence[MicroBatch]
) -> list[Support]:
    """As large as the run's own; each ranked by the clipped gradient at the weights an epoch before."""
    model = trainer.model.eval()
    clip_norm = trainer.plan.phases[-1].clip_norm
    clip = None if clip_norm is None else FlatClip(clip_norm)
    found = [snapshots[0].support]
    for before, now in pairwise(snapshots):
        install(model, before.weights)
        gradient = mean_gradient(make_engine(model, LOSS), batches, clip)
        found.append(Support(ranked(gradient.abs())[: now.support.size], len(gradient)))
    return found


def _times_frozen(supports: Sequence[Support]) -> Tensor:
    return torch.stack([~support.mask() for support in supports]).sum(0)


def _histogram(times: Tensor, epochs: int) -> list[int]:
    return [int(count) for count in torch.bincount(times, minlength=epochs + 1)]


def _spread(times: Tensor) -> float:
    return float(times.double().var(correction=0))


# Sparse updates on the wire: values every step, indices once per refresh. A message of indices is one byte that names
# the smaller of two encodings: a bitmap of d bits, or the gaps between sorted indices with the number of bits that
# makes them shortest (Golomb-Rice: quotient in unary, remainder in that many bits). Values are float32.

VALUE_BYTES = 4


def support_bytes(support: Support) -> int:
    """The length of a message of indices."""
    gaps = np.diff(support.indices.numpy(), prepend=-1) - 1
    rice = (int((gaps >> bits).sum()) + support.size * (1 + bits) for bits in range(32))
    return 1 + math.ceil(min(support.dimension, *rice) / 8 if support.size else support.dimension / 8)


@final
@dataclass(frozen=True, slots=True)
class BytesSent:
    """Bytes sent by a run of updates."""

    steps: int  # number of updates
    values: int  # bytes of values
    indices: int  # bytes of supports, sent when they change
    dense: int  # bytes that dense updates would have taken

    @property
    def share(self) -> float:
        return (self.values + self.indices) / self.dense if self.dense else 1.0


def traffic(supports: Sequence[Support]) -> BytesSent:
    """Count the bytes of an update on each support.

    **Edge cases.** A support is sent when it differs from the one before; a full one needs no indices.
    """
    indices, before = 0, None
    for support in supports:
        if support != before and not support.is_full:
            indices += support_bytes(support)
        before = support
    values, dense = (
        VALUE_BYTES * sum(sizes) for sizes in zip(*((s.size, s.dimension) for s in supports), strict=True)
    )
    return BytesSent(len(supports), values, indices, dense)


def measure_wire(study: Study, point: Point) -> dict[str, Any]:
    """One run; what the updates of its sparse phase take."""
    trainer, _ = open_trainer(study.run_settings(point))
    phase, supports = trainer.plan.phases[-1].name, []

    def keep(event: StepReport | EpochMetrics) -> None:
        if isinstance(event, StepReport) and event.phase == phase:
            supports.append(event.released.support)

    train_until(trainer, trainer.plan.total_steps, (keep,))
    trainer.close()
    sent, last = traffic(supports), supports[-1]
    return {
        "d": last.dimension,
        "k": last.size,
        "steps": sent.steps,
        "value_bytes": sent.values,
        "index_bytes": sent.indices,
        "dense_bytes": sent.dense,
        "share": sent.share,
        "one_support_bytes": support_bytes(last),
        "four_byte_indices": 4 * last.size,
    }
