"""What takes a step: the model with its guards, engine, controller and optimizer, put together once."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple, final

from torch import nn

from sparsedp.batch import PerSampleLoss
from sparsedp.grad_sample import make_engine
from sparsedp.grad_sample.check import PROBE_ROWS
from sparsedp.guards.guard import CompanyGuard, ModelGuard
from sparsedp.privacy.exchange import ALONE, Exchange
from sparsedp.privacy.ledger import Ledger
from sparsedp.privacy.plan import Phase, Plan
from sparsedp.privacy.released import Released
from sparsedp.randomness import PrivateRandomness, PublicRandomness, own_generators
from sparsedp.sampling.poisson import LogicalBatch
from sparsedp.training.batches import Batches
from sparsedp.training.counts import StepCounts, counted_rows, release_selection
from sparsedp.training.learner import Learner, UpdateRule
from sparsedp.training.normalised import Normalised, release_statistics
from sparsedp.training.step import PrivateStep
from sparsedp.validation.state import StateGuard


class Randomness(NamedTuple):
    """Where a run draws from: noise and batches in secret, supports and trial rows in public."""

    private: PrivateRandomness
    public: PublicRandomness


@final
class Stepper:
    """A checked model, ready to be stepped; it stores nothing.

    **Privacy.** The checks on private rows happen here, before the first step, under random numbers of their own.

    Attributes:
        learner: what a release moves.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: PerSampleLoss,
        plan: Plan,
        batches: Batches,
        randomness: Randomness,
        rule: UpdateRule,
        engine: str,
        exchange: Exchange = ALONE,
    ) -> None:
        private, public = randomness
        some_rows = functools.partial(batches.rows_for_a_trial, PROBE_ROWS, public)
        guard = ModelGuard(model, loss, some_rows, fast=engine != "reference", largest=batches.most_rows)
        self._device = next(model.parameters()).device
        one_row = functools.partial(batches.rows_for_a_trial, 1, public)
        with own_generators(private.secret((0, 2)).seed(), self._device):
            state = StateGuard(model, loss, one_row)
            guard.check()
        computing = make_engine(model, loss, engine)
        self.learner = Learner(model, computing.layout, plan, public, rule)
        controller = self.learner.controller
        self._look = counted_rows(model, loss, controller, some_rows, public)
        state.check()
        self._plan = plan
        self._step = PrivateStep(
            model,
            guard,
            state,
            CompanyGuard(computing, model, loss, plan.epoch_ends(), private),
            plan,
            controller,
            computing,
            StepCounts(self._look, plan, controller, private, exchange),
            self.learner.apply,
            private,
            exchange,
        )

    def take(self, batch: LogicalBatch, ledger: Ledger) -> Released:
        """The private step of a batch, paid for to a ledger."""
        with own_generators(batch.secret.seed(), self._device):
            released = self._step(batch.step, batch, ledger)
        self.learner.after_step()
        return released

    def normalise(self, phase: Phase, batches: Iterator[LogicalBatch], ledger: Ledger) -> None:
        """Release the inputs' statistics before training, and set the model's constants to them."""
        model = self.learner.model
        assert isinstance(model, Normalised)
        release_statistics(
            model, batches, self._plan, phase,
            ledger=ledger, randomness=self._step.randomness, exchange=self._step.exchange,
        )  # fmt: skip

    def select(self, phase: Phase, batches: Iterator[LogicalBatch], ledger: Ledger) -> None:
        """Release the count that a selection ranks by."""
        assert self._look is not None
        step, batch = self._step, next(batches)
        step.guard.check()
        with step.state.untouched(last_of_epoch=True):
            release_selection(
                self._look, batch, self._plan, phase, step.controller,
                ledger=ledger, randomness=step.randomness, exchange=step.exchange,
            )  # fmt: skip

    def secret_generators(self, position: int) -> AbstractContextManager[None]:
        """Around what handles private rows outside a step: nothing there should draw from the global generators."""
        return own_generators(self._step.randomness.secret((position, 1)).seed(), self._device)
