"""The spine: one private step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn

from sparsedp.batch import MicroBatch
from sparsedp.grad_sample.query import Engine, Query
from sparsedp.guards.guard import CompanyGuard, ModelGuard
from sparsedp.methods.controller import Controller
from sparsedp.optimizers.apply import set_to_zero
from sparsedp.privacy.exchange import Exchange
from sparsedp.privacy.ledger import Charge, Ledger
from sparsedp.privacy.mechanism import privatize
from sparsedp.privacy.plan import Plan
from sparsedp.privacy.released import Released
from sparsedp.randomness import PrivateRandomness
from sparsedp.training.counts import StepCounts
from sparsedp.validation.state import StateGuard


@dataclass(frozen=True, slots=True)
class PrivateStep:
    """Everything a step needs; calling it takes the step."""

    model: nn.Module
    guard: ModelGuard
    state: StateGuard
    company: CompanyGuard
    plan: Plan
    controller: Controller
    engine: Engine
    counts: StepCounts
    move: Callable[[Released], None]
    randomness: PrivateRandomness
    exchange: Exchange

    def __call__(self, step: int, batch: Iterable[MicroBatch], ledger: Ledger) -> Released:
        """Charge, release, move the support, learn from the release.

        **Privacy.** `privatize` is the only door: all before it is public or a count released by the same mechanism,
        all after it is post-processing.
        """
        self.guard.check()
        phase = self.plan.phase_at(step)
        if phase.count_share:
            batch = list(batch)  # looked at twice
            with self.state.untouched(last_of_epoch=False):
                ledger = self.counts.release(step, phase, batch, ledger)
        setting = self.controller.setting(step)
        if setting.change is not None and setting.change.prune:
            set_to_zero(self.model, self.engine.layout, setting.change.left)
        last = step + 1 in self.plan.epoch_ends()
        with self.state.untouched(last_of_epoch=last):
            released = privatize(
                self.company.engine_for(step),
                batch,
                Query(setting.support, phase.clip, setting.geometry, setting.per_sample_top),
                expected_batch_size=self.plan.expected_batch_size(phase),
                charge=Charge(phase.name, step, phase.sampling_rate, phase.gradient_noise),
                ledger=ledger,
                randomness=self.randomness,
                absolute_noise_std=phase.noise_std or 0.0,
                exchange=self.exchange,
            )
        self.move(released)
        self.controller.observe(released)
        return released
