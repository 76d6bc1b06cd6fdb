"""The plan's batches: one sampler per phase, at the phase's own rate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast, final

import torch
from torch.utils.data import Dataset

from sparsedp.batch import Rows
from sparsedp.methods.stages import SELECT
from sparsedp.privacy.channels import inputs_of
from sparsedp.privacy.plan import Phase, Plan
from sparsedp.randomness import PrivateRandomness, PublicRandomness, own_generators
from sparsedp.sampling.fetching import Collate, fetch_rows, rows_in_order
from sparsedp.sampling.loading import Loading
from sparsedp.sampling.poisson import LogicalBatch, PoissonSampler
from sparsedp.sampling.shapes import FixedShapes
from sparsedp.sampling.sharing import EVERYTHING, Share
from sparsedp.training.planning import check_plan
from sparsedp.validation.data import validate_collate, validate_items

TRIAL_DRAW = 7
"""Keeps the draw of rows for a trial apart from other public draws."""
STATISTICS_ROWS = 1024
"""Most rows at once in a phase that does not train, unless told."""


@final
class Batches:
    """Draws every step's batch as the plan says.

    **Privacy.** The rate comes from the plan that the ledger is charged by, and N is checked against it. Rows that
    look different in different company are refused: the first ones here, by their shapes in every batch.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        plan: Plan,
        randomness: PrivateRandomness,
        loading: Loading,
        share: Share = EVERYTHING,
    ) -> None:
        self._dataset, self._plan, self._collate = dataset, plan, loading.collate
        shapes = FixedShapes()
        self._samplers = {
            phase.name: PoissonSampler(
                dataset,
                sampling_rate=phase.sampling_rate,
                randomness=randomness,
                loading=replace(loading, max_physical_batch=_at_once(loading, phase)),
                shapes=shapes,
                share=share,
                whole_units=phase.name == SELECT.name,
            )
            for phase in plan.phases
        }
        units = next(iter(self._samplers.values())).unit_count
        check_plan(plan, units, rows_are_units=loading.units is None)
        validate_items(dataset, loading.units)
        validate_collate(dataset, loading.collate, shapes)

    def rows_for_a_trial(self, count: int, public: PublicRandomness) -> Rows:
        """Rows from all over the data set, in the order of a public draw; they themselves are private."""
        everywhere = public.permutation(len(cast("Any", self._dataset)), key=(0, 0, TRIAL_DRAW)).numpy()
        with own_generators(PublicRandomness(0).generator_seed(()), torch.device("cpu")):
            return fetch_rows(self._dataset, everywhere[:count], self._collate)

    @property
    def most_rows(self) -> int:
        """About the most rows that are loaded at once. Public."""
        return max(self._samplers[phase.name].most_rows for phase in self._plan.phases if phase.trains)

    def starting_at(self, step: int) -> Iterator[LogicalBatch]:
        """The batches of this step and all after it, phase by phase."""
        for phase in self._plan.phases:
            first = self._plan.first_step(phase.name)
            if step < first + phase.steps:
                yield from self._samplers[phase.name].batches(max(step, first), first + phase.steps)


def _at_once(loading: Loading, phase: Phase) -> int | None:
    """Most rows at once: as told. A phase that does not train takes all units, so then there is a limit anyway."""
    if loading.max_physical_batch is not None or phase.trains:
        return loading.max_physical_batch
    return max(STATISTICS_ROWS, loading.rows_per_unit)


def count_channels(dataset: Dataset[Any], collate: Collate | None) -> int:
    """How many channels the inputs have: a shape, which is public."""
    with own_generators(PublicRandomness(0).generator_seed(()), torch.device("cpu")):
        return int(inputs_of(next(rows_in_order(dataset, 1, 1, collate))).shape[1])
