"""Runs to look at: the trainer of some settings, the releases of a warm-up, held-out rows."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from sparsedp.batch import MicroBatch, PerSampleLoss, supervised
from sparsedp.errors import SparseDPError
from sparsedp.grad_sample.query import Engine
from sparsedp.loading import DataConfig
from sparsedp.methods import build_plan
from sparsedp.methods.method import WARM_UP
from sparsedp.randomness import PublicRandomness
from sparsedp.results import Callback, StepReport
from sparsedp.runs.record import EpochMetrics
from sparsedp.training.trainer import Trainer
from sparsedp_experiments.data.bundle import DataBundle, Split
from sparsedp_experiments.runs.datasets import load_data
from sparsedp_experiments.runs.networks import build_model
from sparsedp_experiments.runs.settings import Settings
from sparsedp_experiments.theory.oracle import mean_gradient

CRITERION = nn.CrossEntropyLoss(reduction="none")
LOSS: PerSampleLoss = supervised(CRITERION)
_HELD_OUT = 7


def open_trainer(settings: Settings) -> tuple[Trainer, DataBundle]:
    """A trainer of these settings, as `sparsedp train` would make it, and its data. SGD."""
    found = settings.resolved()
    bundle = load_data(found)
    train, rate = bundle.train, found.lr
    if rate is None:
        raise SparseDPError(f"lr: not given, and {found.dataset} has no recipe for {found.model}; give one")
    plan = build_plan(
        found.method, found.method_options(), units=train.unit_count, unit_name=bundle.unit, **found.asked()
    )
    model = build_model(
        found.model or "", found.model_options, bundle.input_shape, len(bundle.classes), found.seed
    )
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


@final
class Releases:
    """A callback that keeps every released gradient of dense steps, as `[steps, d]`."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def __call__(self, event: StepReport | EpochMetrics) -> None:
        """Keep a step's."""
        if isinstance(event, StepReport):
            self._kept.append(event.released.mean.detach().to("cpu", torch.float32))

    def stacked(self) -> Tensor:
        """All of them, float64."""
        return torch.stack(self._kept).double()


def train_until(trainer: Trainer, step: int, callbacks: Sequence[Callback] = ()) -> None:
    """Take the steps before `step`; what was planned and not done is given up."""
    for batch in trainer:
        report = trainer.step(batch)
        for callback in callbacks:
            callback(report)
        if trainer.position >= step:
            break


def switch_of(trainer: Trainer) -> int:
    """The first step after the warm-up."""
    plan = trainer.plan
    warm_up = next(phase for phase in plan.phases if phase.name == WARM_UP.name)
    return plan.first_step(WARM_UP.name) + warm_up.steps


def held_out(split: Split, units: int, size: int, seed: int) -> list[MicroBatch]:
    """Random held-out units in micro-batches of `size`; a unit brings all its rows, and counts as their mean."""
    public = PublicRandomness(seed)
    if split.units is None:
        chosen = public.permutation(len(split), (_HELD_OUT,))[:units]
        return [MicroBatch(split.rows_at(part)) for part in torch.split(chosen, size)]
    owner = torch.unique(split.units, return_inverse=True)[1]
    order = public.permutation(int(owner.max()) + 1, (_HELD_OUT,))[:units]
    by_owner = torch.argsort(owner, stable=True)
    counts = torch.bincount(owner)
    ends = counts.cumsum(0)
    batches = []
    for part in torch.split(order, size):
        rows = torch.cat([by_owner[int(ends[u] - counts[u]) : int(ends[u])] for u in part])
        numbers = torch.repeat_interleave(torch.arange(len(part)), counts[part])
        batches.append(MicroBatch(split.rows_at(rows), numbers))
    return batches


def unit_gradients(engine: Engine, split: Split, units: int, seed: int) -> Tensor:
    """One un-noised gradient for each of some random held-out rows, `[units, d]`. Not private."""
    rows = PublicRandomness(seed).permutation(len(split), (_HELD_OUT,))[:units]
    singles = (MicroBatch(split.rows_at(row.reshape(1))) for row in rows)
    return torch.stack([mean_gradient(engine, [single]).value for single in singles])
