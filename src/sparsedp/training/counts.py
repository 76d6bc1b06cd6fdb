"""The second release of a step that counts the rows its own units touch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sparsedp.core.batch import MicroBatch
from sparsedp.core.clip import FlatClip
from sparsedp.core.randomness import PrivateRandomness
from sparsedp.gradients.touched import TouchedRows
from sparsedp.gradients.votes import GradientVotes
from sparsedp.methods.controller import Controller
from sparsedp.privacy.exchange import Exchange
from sparsedp.privacy.ledger import Charge, Ledger
from sparsedp.privacy.mechanism import private_mean
from sparsedp.privacy.plan import Phase, Plan
from sparsedp.privacy.shares import SharedCharge
from sparsedp.privacy.touched import TouchedSum

COUNT = 1
"""The count's number among a step's releases; the gradient is number 0."""


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Counts, with noise, the rows that a step's units touch, and lets the controller choose the step's rows by it.

    **Privacy.** The count and the gradient are two Gaussian releases of the same units; the plan's noise multiplier
    is that of both together, and is charged before the count is made. Each unit's vector has norm at most one.
    """

    look: TouchedRows | GradientVotes | None
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
