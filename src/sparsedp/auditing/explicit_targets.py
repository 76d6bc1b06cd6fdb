"""Releases that are no gradients, as targets: counts of rows, and statistics of the inputs' channels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from sparsedp.auditing.canaries import Directions, added_by, length_of, one_batch
from sparsedp.auditing.coins import Coins
from sparsedp.auditing.estimators import Vector
from sparsedp.auditing.target import spread_out
from sparsedp.batch import MicroBatch
from sparsedp.core.clip import Clip, FlatClip
from sparsedp.errors import PrivacyError
from sparsedp.methods.order import TableRows
from sparsedp.methods.stages import SELECT
from sparsedp.parameters import Support
from sparsedp.privacy.exchange import ALONE
from sparsedp.privacy.ledger import Ledger, MemoryLedger
from sparsedp.privacy.normalisation import NORMALISE
from sparsedp.privacy.plan import Phase, Plan
from sparsedp.privacy.released import Released
from sparsedp.randomness import SystemRandomness
from sparsedp.sampling.poisson import LogicalBatch
from sparsedp.training.counts import StepCounts, release_selection
from sparsedp.training.normalised import release_statistics

ROWS_OF_A_CANARY = 4
"""That a canary touches at least, so that a unit which is not bounded as a whole shows."""
HUGE = 2.0**50
"""Size of a canary's inputs, in clip norms: beside it no centre makes a difference."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class RowCount:
    """A count of the rows that units touch or vote for: a phase of its own, or the first release of a step.

    Attributes:
        plan: what is audited.
        phase: the one that counts.
        step: any of the phase.
        tables: whose rows are counted.
    """

    plan: Plan
    phase: Phase
    step: int
    tables: TableRows

    @property
    def name(self) -> str:
        """The phase's, or what tells it from the gradient of the same step."""
        return f"{self.phase.name}, count" if self.phase.trains else self.phase.name

    @property
    def each(self) -> str:
        """Of a table, or a group of coordinates."""
        return "row"

    @property
    def numbers(self) -> str:
        """One for each row."""
        return "counts of rows"

    @property
    def noise(self) -> float:
        """The count's own."""
        return self.phase.count_noise if self.phase.trains else self.phase.noise_multiplier

    @property
    def support(self) -> Support:
        """All rows."""
        return Support.full(self.tables.total)

    @property
    def clip(self) -> Clip:
        """The bound on a unit's vector."""
        return FlatClip(1.0) if self.phase.trains else self.phase.clip

    def directions(self, most: int, *, single: bool) -> Directions:
        """Several rows each, or one."""
        fewer = most if single else min(most, max(1, self.tables.total // ROWS_OF_A_CANARY))
        return spread_out(self.tables.total, fewer, single=single).without_signs()

    def paid(self, directions: Directions, present: Coins) -> tuple[Released, Ledger]:
        """Make it; gives also the ledger that the gradient of the same step is to be charged to."""
        look: Any = _TouchesItsOwn(directions)
        controller: Any = (listener := _Listener(self.tables))
        batch, ledger = _batch(self.step, one_batch(present)), MemoryLedger()
        if self.phase.trains:
            counts = StepCounts(look, self.plan, controller, SystemRandomness(), ALONE)
            paid = counts.release(self.step, self.phase, batch, ledger)
            return listener.heard, paid
        release_selection(
            look, batch, self.plan, self.phase, controller,
            ledger=ledger, randomness=SystemRandomness(), exchange=ALONE,
        )  # fmt: skip
        return listener.heard, ledger

    def release(self, directions: Directions, present: Coins) -> Released:
        """By what training calls, with canaries that touch their rows."""
        return self.paid(directions, present)[0]

    def noisy_sum(self, released: Released) -> Vector:
        """The counts."""
        return _noisy_sum(self.plan, self.phase, self.clip, released)

    def added(self, directions: Directions, present: Coins) -> Vector:
        """One for each row of a canary, scaled down as a whole."""
        norms = torch.from_numpy(np.sqrt(np.maximum(1, directions.sizes)))
        return added_by(
            self.clip, self.noise, directions, present, lambda clip: (norms * clip.factors(norms)).numpy()
        )


@final
@dataclass(frozen=True, slots=True, eq=False)
class ChannelStatistic:
    """The means of the inputs' channels, or their spreads: one release of a normalisation.

    Attributes:
        plan: what is audited.
        phase: the normalisation.
        channels: of the inputs.
        number: which of the phase's releases.
    """

    plan: Plan
    phase: Phase
    channels: int
    number: int

    @property
    def name(self) -> str:
        """The phase's and the statistic's."""
        return f"{self.phase.name}, {'means' if self.number < self.phase.steps - 1 else 'spreads'}"

    @property
    def each(self) -> str:
        """Of the inputs; counted among those that are measured."""
        return "channel"

    @property
    def numbers(self) -> str:
        """One for each channel."""
        return "statistics of channels"

    @property
    def noise(self) -> float:
        """The phase's."""
        return self.phase.noise_multiplier

    @property
    def support(self) -> Support:
        """All channels that are measured."""
        return Support.full(len(self._columns))

    def directions(self, most: int, *, single: bool) -> Directions:
        """Positive, as spreads are."""
        return spread_out(len(self._columns), most, single=single).without_signs()

    def release(self, directions: Directions, present: Coins) -> Released:
        """By what training calls; the phase's other release has nobody in it."""
        first = self.plan.first_step(self.phase.name)
        batches = (
            _batch(first + number, self._inputs(directions, present) if number == self.number else [])
            for number in range(self.phase.steps)
        )
        heard = _Constants(torch.zeros(self.channels))
        model: Any = heard
        release_statistics(
            model, batches, self.plan, self.phase,
            ledger=MemoryLedger(), randomness=SystemRandomness(), exchange=ALONE,
        )  # fmt: skip
        return heard.heard[self.number]

    def noisy_sum(self, released: Released) -> Vector:
        """The statistics, added up."""
        return _noisy_sum(self.plan, self.phase, self.phase.clip, released)

    def added(self, directions: Directions, present: Coins) -> Vector:
        """Each canary as long as the clip lets it be."""
        return added_by(self.phase.clip, self.noise, directions, present, length_of)

    @property
    def _columns(self) -> Tensor:
        return torch.tensor(self.phase.support.get("columns", range(self.channels)), dtype=torch.int64)

    def _inputs(self, directions: Directions, present: Coins) -> list[MicroBatch]:
        """A row for every canary that is there and has a direction: far out along it."""
        numbers = np.flatnonzero(present[: directions.count])
        if not len(numbers):
            return []
        mine = directions.owner == numbers[:, None]
        rows = torch.zeros(len(numbers), self.channels, dtype=torch.float64)
        rows[:, self._columns] = torch.from_numpy(mine * HUGE * self.phase.clip.sensitivity)
        return [MicroBatch(rows)]


def preliminary_target(
    plan: Plan, phase: Phase, step: int, tables: TableRows | None, channels: int
) -> RowCount | ChannelStatistic:
    """The release of a step of a phase that does not train.

    Raises:
        PrivacyError: nobody knows what it is, so it cannot be attacked.
    """
    if phase.name == NORMALISE:
        return ChannelStatistic(plan, phase, channels, step - plan.first_step(phase.name))
    if phase.name != SELECT.name or tables is None:
        raise PrivacyError(
            f"audit: the phase {phase.name!r} releases something that is not known, so it cannot be attacked; make "
            "the plan with build_plan"
        )
    return RowCount(plan, phase, step, tables)


@final
@dataclass(frozen=True, slots=True, eq=False)
class _TouchesItsOwn:
    """In place of what looks at the model: a canary touches the rows of its direction."""

    directions: Directions

    def __call__(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        owner = torch.from_numpy(self.directions.owner)
        there = torch.zeros(self.directions.count + 1, dtype=torch.bool)  # the last is for rows of nobody: -1
        there[batch.rows[batch.rows < self.directions.count]] = True
        touched = torch.nonzero(there[owner]).flatten()
        return owner[touched], touched


@final
class _Listener:
    """In place of the controller: keeps what it is told."""

    heard: Released

    def __init__(self, tables: TableRows) -> None:
        self.tables = tables

    def observe_selection(self, released: Released) -> None:
        self.heard = released

    observe_counts = observe_selection


@final
class _Constants:
    """In place of a normalised model: keeps what its constants are to be made from."""

    heard: tuple[Released, ...]

    def __init__(self, centre: Tensor) -> None:
        self.centre = centre

    def set_constants(self, means: Released | None, spreads: Released, _columns: Tensor | None) -> None:
        self.heard = (spreads,) if means is None else (means, spreads)


def _batch(step: int, parts: list[MicroBatch]) -> LogicalBatch:
    loaded: Iterator[MicroBatch] = iter(parts)
    return LogicalBatch(step, SystemRandomness().secret(key=(step,)), loaded)


def _noisy_sum(plan: Plan, phase: Phase, clip: Clip, released: Released) -> Vector:
    total = released.mean * (plan.expected_batch_size(phase) / clip.sensitivity)
    return np.asarray(total.numpy(), dtype=np.float64)
