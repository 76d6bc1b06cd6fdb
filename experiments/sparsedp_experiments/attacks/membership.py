"""The membership attack: wrongly labelled units planted in the data, told by the losses of trained models alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from sparsedp.auditing.canaries import AuditTarget, Coins, Indices, device_of, fair_coins
from sparsedp.auditing.estimators import Scores, Vector, epsilon_from_gdp, epsilon_one_run
from sparsedp.auditing.sensitivity import rows_of
from sparsedp.batch import PerExampleLoss, example_count, to_device, validate_losses
from sparsedp.errors import SparseDPError
from sparsedp.loading import rows_in_order
from sparsedp.optimizers.factory import OptimizerChoice, Rate, default_optimizer
from sparsedp.randomness import PublicRandomness, SystemRandomness
from sparsedp.training.data import Batches
from sparsedp.training.trainer import Trainer

ROWS = 256
"""Canaries whose losses are computed at once."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class ExcludeUnits(SystemRandomness):
    """The operating system's randomness, except that excluded units are never sampled."""

    present: Coins  # one flag per unit

    def bernoulli(self, probability: float, size: int, key: Sequence[int]) -> Coins:
        """Independent coins; an absent unit's is never true."""
        return SystemRandomness.bernoulli(self, probability, size, key) & self.present


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipAttackConfig:
    """How models are trained for the attack: `trainings` of them, each with `records` planted units."""

    records: int
    trainings: int = 1
    lr: Rate | None = None
    optimizer: OptimizerChoice | None = None


@final
@dataclass(frozen=True, slots=True)
class MembershipFinding:
    """What losses told."""

    scores: Scores  # how far the loss of each canary fell, for those in the data and those not
    trainings: int  # models trained
    lower_bound: float  # from guesses of coins (Steinke et al. 2023): assumes nothing
    estimate: float  # what the scores would show if they were normal and independent; no bound


@final
@dataclass(frozen=True, slots=True, eq=False)
class Mislabelled(Dataset[Any]):
    """A data set of pairs in which some rows have the target of another row, one that differs where there is one."""

    base: Dataset[Any]
    targets: dict[int, Any]

    @classmethod
    def of(cls, base: Dataset[Any], rows: list[int], public: PublicRandomness) -> Mislabelled:
        """Give each of the rows the target of the first row of a random order that has another one."""
        order = public.permutation(len(base), (1,)).tolist()  # type: ignore[arg-type]
        found = {}
        for place, row in enumerate(rows):
            own = base[row][1]
            others = (base[order[(place + step) % len(order)]][1] for step in range(50))
            found[row] = next((other for other in others if not torch.equal(other, own)), own)
        return cls(base, found)

    def __len__(self) -> int:
        return len(self.base)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        """The item, with another's target if it is a canary's."""
        inputs, target = self.base[index]
        return inputs, self.targets.get(index, target)


def attack_membership(
    subject: AuditTarget, fresh: nn.Module, how: MembershipAttackConfig, significance: float
) -> MembershipFinding:
    """Train with planted records, each in the data by a fair coin, and guess the coins from losses.

    A canary that is out is never drawn, which is what it would be to be absent; everything public stays as planned.
    The score is the fall of its loss, on average over the ends of the later half of the epochs: black box. Several
    trainings are one mechanism on disjoint data, so their canaries count together.
    """
    if not 2 <= how.records <= subject.plan.units:
        raise SparseDPError(
            f"records: got {how.records}, expected 2 to {subject.plan.units}, the number of units"
        )
    parts = [_one_training(subject, fresh, how) for _ in range(how.trainings)]
    scores = Scores(
        np.concatenate([part.in_canary_scores for part in parts]),
        np.concatenate([part.out_canary_scores for part in parts]),
    )
    delta = subject.plan.delta or 0.0
    return MembershipFinding(
        scores,
        how.trainings,
        epsilon_one_run(scores, delta, significance),
        epsilon_from_gdp(scores, delta, significance),
    )


def _one_training(subject: AuditTarget, fresh: nn.Module, how: MembershipAttackConfig) -> Scores:
    plan, public = subject.plan, PublicRandomness.fresh()
    canaries = public.permutation(plan.units, (0,)).numpy()[: how.records]
    planted = [rows_of(subject, int(unit)) for unit in canaries]
    data = Mislabelled.of(subject.dataset, [row for rows in planted for row in rows], public)
    truth = fair_coins(how.records)
    present = np.ones(plan.units, dtype=bool)
    present[canaries] = truth
    trainer = Trainer(
        copy.deepcopy(fresh),
        data,
        PerExampleLoss(subject.loss),
        plan=plan,
        optimizer=how.optimizer or default_optimizer(how.lr, plan),
        data=subject.loading,
        engine=subject.engine,
    )
    trainer._batches = Batches(data, plan, ExcludeUnits(present), subject.loading)
    starts = np.cumsum([0, *(len(rows) for rows in planted)])[:-1]
    flat = np.asarray([row for rows in planted for row in rows])

    def losses() -> Vector:
        each = _losses(subject, trainer.model, data, flat)
        return np.add.reduceat(each, starts) / np.diff([*starts, len(flat)])

    before, after = losses(), np.zeros(how.records)
    ends = plan.epoch_ends()
    watched = set(ends[len(ends) // 2 :])
    for batch in trainer:
        trainer.step(batch)
        if trainer.position in watched:
            after += losses() / len(watched)
    trainer.close()
    fallen = np.nan_to_num(before - after, nan=0.0, posinf=0.0, neginf=0.0)
    return Scores(fallen[truth], fallen[~truth])


def _losses(subject: AuditTarget, model: nn.Module, data: Dataset[Any], rows: Indices) -> Vector:
    """One loss per row, without dropout; modes are put back."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    some, found = torch.utils.data.Subset(data, rows.tolist()), []
    with torch.no_grad():
        for part in rows_in_order(some, len(rows), ROWS, subject.loading.collate_fn):
            losses = subject.loss(model, to_device(part, device_of(subject.model)))
            found.append(validate_losses(losses, example_count(part)).double().cpu().numpy())
    for module, training in modes.items():
        module.training = training
    return np.concatenate(found)
