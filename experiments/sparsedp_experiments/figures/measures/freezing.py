"""How often each coordinate was frozen: ranked, at random, and ranked without noise (RS, Fig. 12)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from sparsedp.batch import MicroBatch
from sparsedp.clipping import FlatClip
from sparsedp.diagnostics import overlap
from sparsedp.grad_sample import make_engine
from sparsedp.parameters import Support
from sparsedp.runs.snapshots import Snapshot
from sparsedp.training.trainer import Trainer
from sparsedp_experiments.figures.config import Point, Study
from sparsedp_experiments.figures.cost import Costs
from sparsedp_experiments.figures.runs import LOSS, held_out, open_trainer, train_until
from sparsedp_experiments.theory.oracle import mean_gradient
from sparsedp_experiments.theory.trajectory import FreezeCount, Snapshots, install


def measure(study: Study, point: Point) -> dict[str, Any]:
    """One run, its supports epoch by epoch, and the supports that un-noised gradients would have given."""
    costs = Costs()
    trainer, bundle = open_trainer(study.run_settings(point))
    per_epoch = trainer.plan.steps_per_epoch
    counted = FreezeCount(trainer.support.dimension)
    kept = Snapshots(trainer.model, per_epoch)
    with costs.of("training with freeze counts and snapshots"):
        train_until(trainer, trainer.plan.total_steps, (counted, kept))
    trainer.close()
    snapshots = kept.kept
    batches = held_out(bundle.train, study.measure["rows"], study.measure["batch"], int(point["seed"]))
    with costs.of("un-noised ranking at every epoch"):
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
        "costs": costs.to_json(),
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
        gradient = mean_gradient(make_engine(model, LOSS), batches, clip).value
        found.append(Support.top_k(gradient.abs(), now.support.size))
    return found


def _times_frozen(supports: Sequence[Support]) -> Tensor:
    return torch.stack([~support.mask() for support in supports]).sum(0)


def _histogram(times: Tensor, epochs: int) -> list[int]:
    return [int(count) for count in torch.bincount(times, minlength=epochs + 1)]


def _spread(times: Tensor) -> float:
    return float(times.double().var(correction=0))
