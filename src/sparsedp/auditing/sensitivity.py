"""The leave-one-out audit: how far one unit moves the clipped sum of a real batch of the user's data and model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

from sparsedp.auditing.canaries import MEANS, AuditedRelease, AuditTarget, Coins, Indices, device_of, with_bar
from sparsedp.clipping import FlatClip
from sparsedp.grad_sample.isolation import same_draws
from sparsedp.grad_sample.reference import ExampleLosses
from sparsedp.grad_sample.selection import EmbeddingRowCounter
from sparsedp.loading import rows_in_order
from sparsedp.privacy.queries import BoundedSum, ChannelStatisticsSum, GradientSum, LossSum, RowCountSum
from sparsedp.randomness import PublicRandomness, SeededRandomness, fork_generators
from sparsedp.sampling import LogicalBatch, PoissonSampler
from sparsedp.training.step import counted_rows
from sparsedp.validation.data import PROBE_ROWS

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
@dataclass(frozen=True, slots=True, eq=False)
class UnitSum:
    """What is summed of a batch for the release of that name; `query` bounds how far a unit may move it."""

    name: str
    query: Callable[[LogicalBatch], BoundedSum]
    whole_units: bool = False


def sums_of(subject: AuditTarget, targets: Iterable[AuditedRelease]) -> Iterator[UnitSum]:
    """What the releases are made from, by the user's model and data; and the losses, which are not attacked."""
    for target in targets:
        if target.query.support.size:
            yield UnitSum(target.name, _query_of(subject, target), target.counts and not target.phase.trains)
    for phase in subject.plan.phases:
        if phase.loss_bound:
            yield UnitSum(f"{phase.name}, loss", _loss_of(subject, FlatClip(phase.loss_bound)))


def _query_of(subject: AuditTarget, target: AuditedRelease) -> Callable[[LogicalBatch], BoundedSum]:
    query, phase, size = target.query, target.phase, target.query.support.size
    if target.counts:
        counter = _counter(subject)
        return lambda batch: RowCountSum(batch, counter, size, query.clip)
    if phase.trains:
        engine = subject.make_engine()
        return lambda batch: GradientSum(engine, batch, query)
    chosen = phase.support.get("columns")
    columns = None if chosen is None else torch.tensor(chosen)
    centre = None if target.name == MEANS else torch.zeros(size)  # any public centre would do
    return lambda batch: ChannelStatisticsSum(batch, subject.channels, query.clip, centre, columns)


def _loss_of(subject: AuditTarget, clip: FlatClip) -> Callable[[LogicalBatch], BoundedSum]:
    losses = ExampleLosses(subject.model, subject.loss)
    return lambda batch: LossSum(losses, batch, clip)


def _counter(subject: AuditTarget) -> EmbeddingRowCounter:
    rows = min(PROBE_ROWS, len(subject.dataset))  # type: ignore[arg-type]
    counter = counted_rows(
        subject.model,
        subject.loss,
        subject.controller(subject.make_engine().layout),
        lambda: next(rows_in_order(subject.dataset, rows, rows, subject.loading.collate_fn)),
        PublicRandomness.fresh(),
    )
    assert counter is not None, "the plan counts rows"
    return counter


@final
@dataclass(frozen=True, slots=True)
class SensitivityFinding:
    """The farthest a unit moved a sum, over the stated sensitivity: a ratio above one breaks the guarantee."""

    ratio: float
    unit: str
    batch: int
    name: str
    tried: int

    @property
    def within(self) -> bool:
        """Whether it is as stated."""
        return self.ratio <= 1 + SLACK


def leave_one_out(
    subject: AuditTarget, sums: Sequence[UnitSum], *, units: int, progress: bool
) -> dict[str, SensitivityFinding]:
    """Compare sums with and without a unit, in batches of several sizes, for random units and for crafted ones.

    Batches are drawn by the real sampler, which is told whom to draw, and go the way of a step's; the model is left
    as it is. Gives the farthest movement of each sum.
    """
    found = {}
    for one in sums:
        pairs = list(_pairs(subject, units))
        worst = SensitivityFinding(0.0, "none", 0, one.name, len(pairs))
        for pair in with_bar(pairs, f"leaving units out of {one.name}", progress):
            ratio = pair.moved(subject, one)
            if ratio > worst.ratio:
                worst = replace(worst, ratio=ratio, unit=pair.words, batch=len(pair.rest))
        found[one.name] = worst
    return found


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Pair:
    """A batch of some units, and the same with one more; the same seed draws the same for both."""

    dataset: Dataset[Any]
    rest: Indices
    unit: int
    words: str
    seed: int = 0

    def moved(self, subject: AuditTarget, one: UnitSum) -> float:
        """How far the unit moves a sum, over what it may; not finite counts as infinitely far."""
        sums = []
        for units in (self.rest, np.append(self.rest, self.unit)):
            chosen = np.zeros(subject.plan.units, dtype=bool)
            chosen[units] = True
            sampler = PoissonSampler(
                self.dataset,
                sampling_rate=1.0,
                randomness=ForcedBatch(self.seed, chosen),
                loading=replace(subject.loading, num_workers=0),
                whole_units=one.whole_units,
            )
            generators = PublicRandomness(self.seed).generator_seed((0, 0))
            with fork_generators(generators, device_of(subject.model)), same_draws():
                query = one.query(next(sampler.batches(0, 1)))
                sums.append(reduce(torch.add, query.partial_sums(query.sensitivity)))
        ratio = float(torch.linalg.vector_norm(sums[1] - sums[0])) / query.sensitivity
        return ratio if math.isfinite(ratio) else math.inf


def _pairs(subject: AuditTarget, units: int) -> Iterator[_Pair]:
    """Batches of nobody, few, and as many as a step expects; then one with a crafted unit."""
    public, total = PublicRandomness.fresh(), subject.plan.units
    expected = max(round(subject.plan.expected_batch_size(phase)) for phase in subject.plan.training)
    most = min(LARGEST_BATCH, total - 1, max(expected, 64))
    for size in sorted({size for size in (0, 7, 40, most) if size <= most}):
        order = public.permutation(total, (size,)).numpy()
        for number in range(units):
            unit = int(order[(size + number) % total])
            rest = order[:size][order[:size] != unit]
            yield _Pair(subject.dataset, rest, unit, "a unit of the data", seed=number)
    order = public.permutation(total, (0,)).numpy()
    unit, rest = int(order[0]), order[1 : 1 + min(32, total - 1)]
    rows, other = frozenset(rows_of(subject, unit)), rows_of(subject, int(order[-1]))[0]
    for name, change in CRAFTED.items():
        crafted = AdversarialRows(subject.dataset, rows, other, change)
        yield _Pair(crafted, rest, unit, f"a unit made {name}")


@final
@dataclass(frozen=True, slots=True, eq=False)
class ForcedBatch(SeededRandomness):
    """Makes the real sampler draw the units with a coin, each with the same rows whoever else is drawn."""

    chosen: Coins

    def bernoulli(self, probability: float, size: int, key: Sequence[int]) -> Coins:
        """The coins given."""
        return self.chosen

    def below(self, bounds: npt.NDArray[np.int64], key: Sequence[int]) -> npt.NDArray[np.int64]:
        """The same number for all, so a unit's rows follow from the seed alone."""
        return np.full(len(bounds), self.seed) % bounds


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
        changed = [
            self.change(own, other) if isinstance(own, Tensor) and own.is_floating_point() else own
            for own, other in zip(leaves, others, strict=True)
        ]
        return pytree.tree_unflatten(changed, shape)


def rows_of(subject: AuditTarget, unit: int) -> list[int]:
    """The rows of a unit."""
    units = subject.loading.unit_ids
    if units is None:
        return [unit]
    names = np.asarray(units)
    return np.flatnonzero(names == np.unique(names)[unit]).tolist()
