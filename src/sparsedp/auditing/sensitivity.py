"""The leave-one-out audit: how far one unit moves the clipped sum of a real batch of the user's data and model."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

from sparsedp.auditing.canaries import (
    AuditTarget,
    Coins,
    Indices,
    StepQuery,
    device_of,
    gradient_release,
    row_count_release,
    statistic_release,
)
from sparsedp.auditing.estimators import Scores
from sparsedp.clipping import Clip, FlatClip
from sparsedp.errors import SparseDPError
from sparsedp.grad_sample.isolation import same_draws
from sparsedp.grad_sample.losses import ExampleLosses
from sparsedp.loading import rows_in_order
from sparsedp.parameters import ParameterLayout
from sparsedp.privacy.normalization import NORMALISE
from sparsedp.privacy.plan import Phase
from sparsedp.privacy.queries import BoundedSum, ChannelStatisticsSum, LossSum, RowCountSum
from sparsedp.randomness import (
    PublicRandomness,
    SeededRandomness,
    fork_generators,
)
from sparsedp.sampling import LogicalBatch, PoissonSampler
from sparsedp.training.step import counted_rows
from sparsedp.validation.data import PROBE_ROWS


@final
@dataclass(frozen=True, slots=True, eq=False)
class ForcedBatch(SeededRandomness):
    """Makes the real sampler draw the units it is told to, each with the same rows whoever else is drawn.

    A unit's choice of rows is keyed by the unit: two draws that differ by one unit differ in nothing else.

    Attributes:
        chosen: one coin per unit.
        sizes: rows of each unit.
    """

    chosen: Coins
    sizes: npt.NDArray[np.int64]

    def bernoulli(self, probability: float, size: int, key: Sequence[int]) -> Coins:
        """The coins given."""
        if size != len(self.chosen):
            raise SparseDPError(f"forced batch: got {size} units, expected {len(self.chosen)}")
        return self.chosen

    def below(self, bounds: npt.NDArray[np.int64], key: Sequence[int]) -> npt.NDArray[np.int64]:
        """One integer per chosen unit, or one per row of the chosen units, as the sampler asks."""
        units = np.flatnonzero(self.chosen)
        whole = SeededRandomness(self.seed)
        if len(bounds) == len(units):
            draws = whole.below(np.full(len(self.chosen), 2**52), key=(0,))[units]
        else:
            starts = np.cumsum(self.sizes) - self.sizes
            rows = np.concatenate([np.arange(starts[u], starts[u] + self.sizes[u]) for u in units])
            draws = whole.below(np.full(int(self.sizes.sum()), 2**52), key=(1,))[rows]
        return (draws % bounds).astype(np.int64)


@final
@dataclass(frozen=True, slots=True, eq=False)
class UnitSum:
    """What is summed of a batch before noise, for the release of that name; a unit may move it by the sensitivity."""

    name: str
    sensitivity: float
    of: Callable[[LogicalBatch], Tensor]
    whole_units: bool = False


def explicit_sums(subject: AuditTarget, layout: ParameterLayout) -> list[UnitSum]:
    """The sums of the plan that are no gradients: counts by the user's model, and statistics of the user's inputs."""
    found: list[UnitSum] = []
    for phase in subject.plan.phases:
        if phase.loss_bound:
            found.append(_losses(subject, phase))
        if phase.name == NORMALISE:
            found += _statistics(subject, phase)
        elif not phase.trains or phase.count_share:
            found += _counts(subject, layout, phase)
    return found


def _losses(subject: AuditTarget, phase: Phase) -> UnitSum:
    """The loss that the last step of an epoch releases before its gradient."""
    losses, clip = ExampleLosses(subject.model, subject.loss), FlatClip(phase.loss_bound)
    return _unit_sum(f"{phase.name}, loss", clip, lambda batch: LossSum(losses, batch, clip))


def _counts(subject: AuditTarget, layout: ParameterLayout, phase: Phase) -> list[UnitSum]:
    controller = subject.controller(layout)
    rows = min(PROBE_ROWS, subject.rows)
    counter = counted_rows(
        subject.model,
        subject.loss,
        controller,
        lambda: next(rows_in_order(subject.dataset, rows, rows, subject.loading.collate_fn)),
        PublicRandomness.fresh(),
    )
    if counter is None or controller.tables is None or not controller.tables.total:
        return []
    released = row_count_release(subject.plan, phase, subject.plan.first_step(phase.name), controller.tables)
    total, clip = controller.tables.total, released.clip
    return [
        _unit_sum(
            released.name, clip, lambda batch: RowCountSum(batch, counter, total, clip), not phase.trains
        )
    ]


def _statistics(subject: AuditTarget, phase: Phase) -> list[UnitSum]:
    """Means, if they are released, and spreads around zero: any public centre would do."""
    plan, channels, clip = subject.plan, subject.channels, phase.clip
    chosen = phase.support.get("columns")
    columns = None if chosen is None else torch.tensor(chosen)
    zero = torch.zeros(channels if columns is None else columns.numel())

    def of(number: int) -> UnitSum:
        centre = zero if number == phase.steps - 1 else None
        return _unit_sum(
            statistic_release(plan, phase, channels, number).name,
            clip,
            lambda batch: ChannelStatisticsSum(batch, channels, clip, centre, columns),
        )

    return [of(number) for number in range(phase.steps)]


def _unit_sum(
    name: str, clip: Clip, query: Callable[[LogicalBatch], BoundedSum], whole_units: bool = False
) -> UnitSum:
    bound = clip.sensitivity
    return UnitSum(
        name, bound, lambda batch: functools.reduce(torch.add, query(batch).partial_sums(bound)), whole_units
    )


LARGEST_BATCH = 2048
SLACK = 1e-9
"""Relative; the stated sensitivity already has room for rounding."""

CRAFTED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "not a number": lambda own, _: torch.full_like(own, math.nan),
    "infinite": lambda own, _: torch.full_like(own, math.inf),
    "a million times as large": lambda own, _: own * 1e6,
    "all zero": lambda own, _: torch.zeros_like(own),
    "negated": lambda own, _: -own,
    "a copy of another": lambda _, other: other.clone(),
}
"""What is made of a unit's real numbers; the second argument is another row's."""


@final
@dataclass(frozen=True, slots=True)
class SensitivityFinding:
    """The farthest a unit moved a sum, of the pairs that were tried.

    `ratio` is the distance over the stated sensitivity: more than one breaks the guarantee.
    """

    ratio: float
    unit: str
    batch: int
    name: str
    tried: int

    @property
    def within(self) -> bool:
        """Whether it is as stated."""
        return self.ratio <= 1 + SLACK


@final
@dataclass(frozen=True, slots=True, eq=False)
class AdversarialRows(Dataset[Any]):
    """A data set in which the real numbers of some rows are replaced; stacked item by item."""

    base: Dataset[Any]
    rows: frozenset[int]
    other: int
    change: Callable[[Tensor, Tensor], Tensor]

    def __len__(self) -> int:
        return len(self.base)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        if index not in self.rows:
            return self.base[index]
        leaves, shape = pytree.tree_flatten(self.base[index])
        others = pytree.tree_leaves(self.base[self.other])
        return pytree.tree_unflatten(
            [self.change(a, b) if _real(a) else a for a, b in zip(leaves, others, strict=True)], shape
        )


def leave_one_out(
    subject: AuditTarget, sums: list[UnitSum], *, units: int, tick: Callable[[int], None]
) -> dict[str, SensitivityFinding]:
    """Compare sums with and without a unit, in batches of several sizes, for random units and for crafted ones.

    Batches are drawn by the real sampler, which is told whom to draw; rows go through the user's collate, the model
    and the engine, under the generators a step has. Modes and state of the model are left as they are. Gives the
    farthest movement of each sum.
    """
    found = {}
    for one in sums:
        worst, tried = SensitivityFinding(0.0, "none", 0, one.name, 0), 0
        for batch, unit, moved in _movements(subject, one, units):
            tried += 1
            tick(1)
            ratio = moved / one.sensitivity if math.isfinite(moved) else math.inf
            if ratio > worst.ratio:
                worst = SensitivityFinding(ratio, unit, batch, one.name, tried)
        found[one.name] = replace(worst, tried=tried)
    return found


def gradient_sums(subject: AuditTarget, settings: list[StepQuery]) -> list[UnitSum]:
    """The clipped sums of the steps."""
    engine = subject.make_engine()

    def of(setting: StepQuery) -> UnitSum:
        query = setting.query
        return UnitSum(
            setting.phase.name, setting.clip.sensitivity, lambda batch: engine.clipped_sum(batch, query)
        )

    return [of(setting) for setting in settings]


def count_pairs(subject: AuditTarget, sums: int, units: int) -> int:
    """How many pairs of sums `leave_one_out` compares."""
    return sums * (len(_sizes(subject)) * units + len(CRAFTED))


def _movements(subject: AuditTarget, one: UnitSum, units: int) -> Iterator[tuple[int, str, float]]:
    public, total = PublicRandomness.fresh(), subject.plan.units
    sizes = _sizes(subject)

    def moved(dataset: Dataset[Any], rest: Indices, unit: int, seed: int) -> float:
        sums = [_sum(subject, dataset, one, drawn, seed) for drawn in (rest, np.append(rest, unit))]
        return float(torch.linalg.vector_norm(sums[1] - sums[0]))

    for size in sizes:
        order = public.permutation(total, (size,)).numpy()
        for number in range(units):
            unit = int(order[(size + number) % total])
            rest = order[:size][order[:size] != unit]
            yield size, "a unit of the data", moved(subject.dataset, rest, unit, seed=number)
    order = public.permutation(total, (0,)).numpy()
    unit, rest = int(order[0]), order[1 : 1 + min(32, total - 1)]
    rows, other = rows_of(subject, unit), rows_of(subject, int(order[-1]))
    for name, change in CRAFTED.items():
        crafted = AdversarialRows(subject.dataset, frozenset(rows), other[0], change)
        yield len(rest), f"a unit made {name}", moved(crafted, rest, unit, seed=0)


def _sum(subject: AuditTarget, dataset: Dataset[Any], one: UnitSum, units: Indices, seed: int) -> Tensor:
    """The sum over a batch of these units, as a step would compute it, but for a fixed choice of random numbers."""
    with generators_of_a_step(subject, seed), same_draws():
        return one.of(batch_of(subject, dataset, units, seed, whole_units=one.whole_units))


def generators_of_a_step(subject: AuditTarget, seed: int) -> AbstractContextManager[None]:
    """The global generators as a trainer sets them for a step."""
    return fork_generators(PublicRandomness(seed).generator_seed((0, 0)), device_of(subject.model))


def batch_of(
    subject: AuditTarget, dataset: Dataset[Any], units: Indices, seed: int, *, whole_units: bool = False
) -> LogicalBatch:
    """The batch the real sampler makes when it draws exactly these units."""
    chosen = np.zeros(subject.plan.units, dtype=bool)
    chosen[units] = True
    sampler = PoissonSampler(
        dataset,
        sampling_rate=1.0,
        randomness=ForcedBatch(seed, chosen, _unit_sizes(subject)),
        loading=replace(subject.loading, num_workers=0),
        whole_units=whole_units,
    )
    (batch,) = sampler.batches(0, 1)
    return batch


def _sizes(subject: AuditTarget) -> list[int]:
    """Batch sizes: alone, few, and as many as a step expects."""
    expected = max(round(subject.plan.expected_batch_size(phase)) for phase in subject.phases)
    most = min(LARGEST_BATCH, subject.plan.units - 1, max(expected, 64))
    return sorted({size for size in (0, 7, 40, most) if size <= most})


def _unit_sizes(subject: AuditTarget) -> Indices:
    units = subject.loading.unit_ids
    if units is None:
        return np.ones(subject.plan.units, dtype=np.int64)
    return np.unique(np.asarray(units), return_counts=True)[1].astype(np.int64)


def rows_of(subject: AuditTarget, unit: int) -> list[int]:
    """The rows of a unit."""
    units = subject.loading.unit_ids
    if units is None:
        return [unit]
    names = np.asarray(units)
    return np.flatnonzero(names == np.unique(names)[unit]).tolist()


def _real(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


OTHERS = 7
"""Other units in the batch; the attacker knows them."""


def record_scores(
    subject: AuditTarget, setting: StepQuery, releases: int, tick: Callable[[int], None]
) -> Scores:
    """Release a small batch with and without one unit in turn; the attacker knows all the others.

    A score is the component of the release, less what the others add, along what the unit adds, over the clip norm.
    """
    engine, plan = subject.make_engine(), subject.plan
    query = setting.query
    order = PublicRandomness.fresh().permutation(plan.units, (0,)).numpy()
    rest, everyone = order[1 : 1 + OTHERS], order[: 1 + OTHERS]
    with generators_of_a_step(subject, 0):
        others = engine.clipped_sum(batch_of(subject, subject.dataset, rest, 0), query)
    with generators_of_a_step(subject, 0):
        own = engine.clipped_sum(batch_of(subject, subject.dataset, everyone, 0), query) - others
    length = float(torch.linalg.vector_norm(own))
    if length == 0:
        return Scores(np.empty(0), np.empty(0))
    direction, known = (own / length).numpy(), (others / setting.clip.sensitivity).numpy()
    attacked = gradient_release(plan, setting, engine.layout)
    found: tuple[list[float], list[float]] = ([], [])
    for number in range(releases):
        units = everyone if number % 2 else rest
        with generators_of_a_step(subject, 0):
            batch = batch_of(subject, subject.dataset, units, 0)
            released = setting.release(plan, engine, batch)
        found[number % 2].append(float((attacked.noisy_sum(released) - known) @ direction))
        tick(1)
    return Scores(np.asarray(found[1]), np.asarray(found[0]))
