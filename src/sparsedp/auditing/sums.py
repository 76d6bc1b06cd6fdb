"""Sums over units of the user's data that no unit may move by more than a stated sensitivity."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from sparsedp.auditing.explicit_targets import ChannelStatistic, RowCount
from sparsedp.auditing.subject import Subject
from sparsedp.core.clip import Clip
from sparsedp.grad_sample.check import PROBE_ROWS
from sparsedp.parameters import Layout
from sparsedp.privacy.channels import ChannelSum
from sparsedp.privacy.mechanism import BoundedSum
from sparsedp.privacy.normalisation import NORMALISE
from sparsedp.privacy.plan import Phase
from sparsedp.privacy.touched import TouchedSum
from sparsedp.randomness import PublicRandomness
from sparsedp.sampling.fetching import rows_in_order
from sparsedp.sampling.poisson import LogicalBatch
from sparsedp.training.counts import counted_rows


@final
@dataclass(frozen=True, slots=True, eq=False)
class UnitSum:
    """What is summed of a batch, before noise.

    Attributes:
        name: of the release that it is for.
        sensitivity: how far one unit may move it.
        of: the sum over a batch.
        whole_units: whether batches hold all rows of a unit.
    """

    name: str
    sensitivity: float
    of: Callable[[LogicalBatch], Tensor]
    whole_units: bool = False


def explicit_sums(subject: Subject, layout: Layout) -> list[UnitSum]:
    """The sums of the plan that are no gradients: counts by the user's model, and statistics of the user's inputs."""
    found: list[UnitSum] = []
    for phase in subject.plan.phases:
        if phase.name == NORMALISE:
            found += _statistics(subject, phase)
        elif not phase.trains or phase.count_share:
            found += _counts(subject, layout, phase)
    return found


def _counts(subject: Subject, layout: Layout, phase: Phase) -> list[UnitSum]:
    controller = subject.controller(layout)
    rows = min(PROBE_ROWS, subject.rows)
    look = counted_rows(
        subject.model,
        subject.loss,
        controller,
        lambda: next(rows_in_order(subject.dataset, rows, rows, subject.loading.collate)),
        PublicRandomness.fresh(),
    )
    if look is None or controller.tables is None or not controller.tables.total:
        return []
    target = RowCount(subject.plan, phase, subject.plan.first_step(phase.name), controller.tables)
    total, clip = controller.tables.total, target.clip
    return [
        _unit_sum(target.name, clip, lambda batch: TouchedSum(batch, look, total, clip), not phase.trains)
    ]


def _statistics(subject: Subject, phase: Phase) -> list[UnitSum]:
    """Means, if they are released, and spreads around zero: any public centre would do."""
    plan, channels, clip = subject.plan, subject.channels, phase.clip
    chosen = phase.support.get("columns")
    columns = None if chosen is None else torch.tensor(chosen)
    zero = torch.zeros(channels if columns is None else columns.numel())

    def of(number: int) -> UnitSum:
        centre = zero if number == phase.steps - 1 else None
        return _unit_sum(
            ChannelStatistic(plan, phase, channels, number).name,
            clip,
            lambda batch: ChannelSum(batch, channels, clip, centre, columns),
        )

    return [of(number) for number in range(phase.steps)]


def _unit_sum(
    name: str, clip: Clip, query: Callable[[LogicalBatch], BoundedSum], whole_units: bool = False
) -> UnitSum:
    bound = clip.sensitivity
    return UnitSum(
        name, bound, lambda batch: functools.reduce(torch.add, query(batch).parts(bound)), whole_units
    )
