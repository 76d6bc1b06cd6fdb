"""Counts of rows, with noise: one release over all units, or a second one in every step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn

from sparsedp.batch import MicroBatch, PerSampleLoss, Rows
from sparsedp.core.clip import FlatClip
from sparsedp.errors import PrivacyError
from sparsedp.grad_sample.touched import TouchedRows
from sparsedp.methods.controller import Controller
from sparsedp.privacy.exchange import Exchange
from sparsedp.privacy.ledger import Charge, Ledger
from sparsedp.privacy.mechanism import private_mean
from sparsedp.privacy.plan import Phase, Plan
from sparsedp.privacy.shares import SharedCharge
from sparsedp.privacy.touched import TouchedSum
from sparsedp.randomness import PrivateRandomness, PublicRandomness, own_generators
from sparsedp.sampling.poisson import LogicalBatch

COUNT = 1
"""The count's number among a step's releases; the gradient is number 0."""


def counted_rows(
    model: nn.Module,
    loss: PerSampleLoss,
    controller: Controller,
    probe: Callable[[], Rows],
    public: PublicRandomness,
) -> TouchedRows | None:
    """What a selection looks at, tried on a few rows; None for a method without one.

    Raises:
        ModelError: samples cannot be told apart in what the tables are asked for.
    """
    if controller.tables is None:
        return None
    look = TouchedRows(model, loss, [slot.name for slot in controller.tables.slots])
    with own_generators(public.generator_seed((0, 4)), next(model.parameters()).device):
        look.check(probe())
    return look


def release_selection(
    look: TouchedRows,
    batch: LogicalBatch,
    plan: Plan,
    phase: Phase,
    controller: Controller,
    *,
    ledger: Ledger,
    randomness: PrivateRandomness,
    exchange: Exchange,
) -> None:
    """Count, with noise, how many units touch each row, and let the controller rank by it.

    **Privacy.** One Gaussian release over all units, of sensitivity `clip_norm`; charged before it is computed.
    """
    if controller.tables is None:
        raise PrivacyError(f"the phase {phase.name!r} selects, and the method has nothing to select by")
    rows = controller.tables.total
    released = private_mean(
        TouchedSum(batch, look, rows, phase.clip),
        rows,
        expected_batch_size=plan.expected_batch_size(phase),
        charge=Charge(phase.name, batch.step, phase.sampling_rate, phase.noise_multiplier),
        ledger=ledger,
        randomness=randomness,
        exchange=exchange,
    )
    controller.observe_selection(released)


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Counts, with noise, the rows that a step's units touch, and lets the controller choose the step's rows by it.

    **Privacy.** The count and the gradient are two Gaussian releases of the same units; the plan's noise multiplier
    is that of both together, and is charged before the count is made. Each unit's vector has norm at most one.
    """

    look: TouchedRows | None
    plan: Plan
    controller: Controller
    randomness: PrivateRandomness
    exchange: Exchange

    def release(self, step: int, phase: Phase, batch: Iterable[MicroBatch], ledger: Ledger) -> Ledger:
        """Make the count; gives the ledger that the gradient of the same batch is to be charged to."""
        paid = SharedCharge(ledger, Charge(phase.name, step, phase.sampling_rate, phase.noise_multiplier))
        tables = self.controller.tables
        if self.look is not None and tables is not None and tables.total:
            self.controller.observe_counts(
                private_mean(
                    TouchedSum(batch, self.look, tables.total, FlatClip(1.0)),
                    tables.total,
                    expected_batch_size=self.plan.expected_batch_size(phase),
                    charge=Charge(phase.name, step, phase.sampling_rate, phase.count_noise, COUNT),
                    ledger=paid,
                    randomness=self.randomness,
                    exchange=self.exchange,
                )
            )
        return paid
