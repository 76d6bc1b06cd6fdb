"""One private step: validate, charge, release, update. With the releases of a phase that does not train."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple, final

from torch import nn

from sparsedp.batch import Batch, LossFunction, MicroBatch
from sparsedp.clipping import FlatClip, LayerClip
from sparsedp.errors import PrivacyError
from sparsedp.grad_sample import make_engine
from sparsedp.grad_sample.query import ClippedSumQuery
from sparsedp.grad_sample.reference import ExampleLosses
from sparsedp.grad_sample.selection import EmbeddingRowCounter
from sparsedp.methods.support_scheduler import SupportScheduler
from sparsedp.privacy.charge import Charge, Chargeable, SplitCharge
from sparsedp.privacy.mechanism import GaussianMechanism, Release
from sparsedp.privacy.plan import Phase, Plan
from sparsedp.privacy.queries import GradientSum, LossSum, RowCountSum
from sparsedp.randomness import PrivateRandomness, PublicRandomness, fork_generators
from sparsedp.sampling import LogicalBatch
from sparsedp.training.data import Batches
from sparsedp.training.normalization import Normalised, release_statistics
from sparsedp.training.state import Learner, OptimizerConfig
from sparsedp.validation.data import PROBE_ROWS, refuse_nothing_finite
from sparsedp.validation.model import ModelValidation
from sparsedp.validation.state import StateGuard

COUNT, LOSS = 1, 2
"""The numbers of count and loss among a step's releases; the gradient is number 0."""


class Released(NamedTuple):
    """What a step releases: its gradient, and at the end of an epoch the loss, if the plan says so."""

    gradient: Release
    loss: Release | None = None


def counted_rows(
    model: nn.Module,
    loss: LossFunction,
    controller: SupportScheduler,
    probe: Callable[[], Batch],
    public: PublicRandomness,
) -> EmbeddingRowCounter | None:
    """What a selection looks at, tried on a few rows; None for a method without one."""
    if controller.tables is None:
        return None
    counter = EmbeddingRowCounter(model, loss, [slot.name for slot in controller.tables.slots])
    with fork_generators(public.generator_seed((0, 4)), next(model.parameters()).device):
        counter.check(probe())
    return counter


def release_selection(
    counter: EmbeddingRowCounter,
    batch: LogicalBatch,
    plan: Plan,
    phase: Phase,
    controller: SupportScheduler,
    *,
    ledger: Chargeable,
    randomness: PrivateRandomness,
) -> None:
    """Count, with noise, how many units touch each row, and let the controller rank by it.

    Formal guarantees: One Gaussian release over all units, of sensitivity `clip_norm`; charged before it is computed.
    """
    if controller.tables is None:
        raise PrivacyError(f"the phase {phase.name!r} selects, and the method has nothing to select by")
    released = GaussianMechanism(ledger, randomness).release(
        RowCountSum(batch, counter, controller.tables.total, phase.clip),
        Charge(phase.name, batch.step, phase.sampling_rate, phase.noise_multiplier),
        expected_batch_size=plan.expected_batch_size(phase),
    )
    controller.observe_counts(released)


def release_counts(
    counter: EmbeddingRowCounter | None,
    batch: Iterable[MicroBatch],
    plan: Plan,
    step: int,
    controller: SupportScheduler,
    *,
    ledger: Chargeable,
    randomness: PrivateRandomness,
) -> Chargeable:
    """Count the rows that a step's units touch, and let the controller choose the step's rows by it.

    Gives the ledger that the gradient of the same batch is to be charged to.
    Formal guarantees: The count and the gradient are two Gaussian releases of the same units; the plan's noise
    multiplier is that of both together, and is charged before the count is made. Each unit's vector has norm at most
    one.
    """
    phase, tables = plan.phase_at(step), controller.tables
    paid = SplitCharge(ledger, Charge(phase.name, step, phase.sampling_rate, phase.noise_multiplier))
    if counter is not None and tables is not None and tables.total:
        released = GaussianMechanism(paid, randomness).release(
            RowCountSum(batch, counter, tables.total, FlatClip(1.0)),
            Charge(phase.name, step, phase.sampling_rate, phase.count_noise, COUNT),
            expected_batch_size=plan.expected_batch_size(phase),
        )
        controller.observe_counts(released)
    return paid


class Randomness(NamedTuple):
    """Where a run draws from: noise and batches in secret, supports and made-up rows in public."""

    private: PrivateRandomness
    public: PublicRandomness


@final
class PrivateStep:
    """A validated model, ready to be stepped; it stores nothing.

    Formal guarantees: The model is validated here, before the first step, on made-up examples.
    `GaussianMechanism.release` is the only door of a step: all before it is public or a count released by the same
    mechanism, all after it is post-processing. A loss and the gradient are two releases of the same units that the
    step's one charge pays for (`SplitCharge`).

    Attributes:
        learner: what a release moves.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction,
        plan: Plan,
        batches: Batches,
        randomness: Randomness,
        rule: OptimizerConfig,
        engine: str,
    ) -> None:
        self._plan, (self._randomness, public) = plan, randomness
        some_rows = functools.partial(batches.probe_rows, PROBE_ROWS, public)
        refuse_nothing_finite(rows := some_rows())
        self._validation = ModelValidation(model, loss, rows)
        self._device = next(model.parameters()).device
        with fork_generators(self._randomness.secret((0, 2)).seed(), self._device):
            self._state = StateGuard(model, loss, lambda: self._validation.examples)
            self._validation.check()
        self._engine, self._losses = make_engine(model, loss, engine), ExampleLosses(model, loss)
        layout = self._engine.layout
        for phase in plan.training:
            if isinstance(phase.clip, LayerClip):
                phase.clip.check([slot.name for slot in layout])
        self.learner = Learner(model, layout, plan, public, rule)
        self._counter = counted_rows(model, loss, self.learner.controller, some_rows, public)
        self._state.check()

    def take(self, batch: LogicalBatch, ledger: Chargeable) -> Released:
        """Charge the step of a batch, release, move the support, learn from the release."""
        with fork_generators(batch.secret.seed(), self._device):
            released = self._take(batch.step, batch, ledger)
        self.learner.after_step()
        return released

    def _take(self, step: int, batch: Iterable[MicroBatch], ledger: Chargeable) -> Released:
        self._validation.check()
        plan, controller, private = self._plan, self.learner.controller, self._randomness
        phase = plan.phase_at(step)
        if phase.count_share:
            looked_at, batch = itertools.tee(batch)  # not loaded before it is paid for
            with self._state.untouched(last_of_epoch=False):
                ledger = release_counts(
                    self._counter, looked_at, plan, step, controller, ledger=ledger, randomness=private
                )
        setting = controller.begin_step(step)
        if setting.change is not None:
            self.learner.enter(setting.change)
        noise, loss = phase.gradient_noise, None
        with self._state.untouched(last_of_epoch=step + 1 in plan.epoch_ends()):
            if plan.releases_loss(step):
                looked_at, batch = itertools.tee(batch)
                ledger, loss = self._release_loss(step, phase, looked_at, ledger)
                noise = phase.loss_noises[1]
            query = ClippedSumQuery(setting.support, phase.clip, setting.geometry, setting.per_sample_top)
            released = GaussianMechanism(ledger, private).release(
                GradientSum(self._engine, batch, query),
                Charge(phase.name, step, phase.sampling_rate, noise),
                expected_batch_size=plan.expected_batch_size(phase),
            )
        self.learner.apply(released)
        controller.update(released)
        return Released(released, loss)

    def _release_loss(
        self, step: int, phase: Phase, batch: Iterable[MicroBatch], ledger: Chargeable
    ) -> tuple[Chargeable, Release]:
        """Release the loss of a step's batch; with the ledger that the gradient of the batch is to be charged to."""
        paid = SplitCharge(ledger, Charge(phase.name, step, phase.sampling_rate, phase.noise_multiplier))
        return paid, GaussianMechanism(paid, self._randomness).release(
            LossSum(self._losses, batch, FlatClip(phase.loss_bound)),
            Charge(phase.name, step, phase.sampling_rate, phase.loss_noises[0], LOSS),
            expected_batch_size=self._plan.expected_batch_size(phase),
        )

    def normalise(self, phase: Phase, batches: Iterator[LogicalBatch], ledger: Chargeable) -> None:
        """Release the inputs' statistics before training, and set the model's constants to them."""
        model = self.learner.model
        assert isinstance(model, Normalised)
        release_statistics(model, batches, self._plan, phase, ledger=ledger, randomness=self._randomness)

    def select(self, phase: Phase, batches: Iterator[LogicalBatch], ledger: Chargeable) -> None:
        """Release the count that a selection ranks by."""
        assert self._counter is not None
        batch, controller = next(batches), self.learner.controller
        self._validation.check()
        with self._state.untouched(last_of_epoch=True):
            release_selection(
                self._counter, batch, self._plan, phase, controller,
                ledger=ledger, randomness=self._randomness,
            )  # fmt: skip

    def secret_generators(self, position: int) -> AbstractContextManager[None]:
        """Around what handles private rows outside a step: nothing there should draw from the global generators."""
        return fork_generators(self._randomness.secret((position, 1)).seed(), self._device)
