"""`RecordedRun`: position, history and files of a run between two steps."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Self

from sparsedp import distributed
from sparsedp._files import Json
from sparsedp.errors import PrivacyError, SparseDPError
from sparsedp.evaluation import Evaluator
from sparsedp.parameters import Support
from sparsedp.privacy.accounting import epsilon_by_epoch, plan_accountant, plan_epsilon
from sparsedp.privacy.ledger import Ledger
from sparsedp.privacy.mechanism import Release
from sparsedp.privacy.plan import Plan
from sparsedp.randomness import PublicRandomness, fork_generators
from sparsedp.results import CallbackLike, LedgerSummary, Result, StepReport, tell
from sparsedp.runs.checkpoint import Checkpoint, check_identity, checkpoint_of, history_of, identity_of
from sparsedp.runs.directory import RunDirectory, SavedRun, new_run
from sparsedp.runs.record import FINISHED, RUNNING, STOPPED, EpochMetrics, History, RunMetadata, RunSetup
from sparsedp.training.normalization import Normalised
from sparsedp.training.ranks import weight_facts
from sparsedp.training.state import Learner

SAVE_EVERY = 60.0
"""Seconds between checkpoints inside an epoch."""


class RecordedRun:
    """A run with its history and files; a subclass takes the steps. Among several ranks the main process keeps it.

    Attributes:
        learner: what the releases move.
        model: the model as it is now.
        plan: what was planned.
        position: how many steps of the plan are done, those lost in a crash included: the next step's index.
    """

    def __init__(
        self,
        learner: Learner,
        facts: RunSetup,
        *,
        evaluate: Evaluator | None,
        callbacks: Sequence[CallbackLike],
        out: Path | str | None,
        found: SavedRun | None,
        in_blocks: bool = False,
    ) -> None:
        self._clock = self._saved = time.monotonic()
        self._in_blocks = in_blocks
        self.learner, self.plan, self._facts, self._evaluate = learner, facts.plan, facts, evaluate
        self._public = PublicRandomness(facts.public_seed)
        self.model, self._callbacks = learner.model, tuple(callbacks)
        self._identity = identity_of(facts)
        distributed.check_same_on_all_ranks(lambda: self._identity)
        self._epoch_ends = facts.plan.epoch_ends()
        self._between_steps, self._closed = True, False
        self._rates: tuple[float, ...] = ()
        self._result: Result | None = None
        self.position, self._history = 0, History(facts.layout)
        if found is not None:
            self._store = distributed.all_or_raise(lambda: self._go_on(found))
        else:
            record, replay = facts.record(RUNNING, 0.0, None), facts.seed is not None
            self._store = new_run(out, facts.plan, self._state, record, replay=replay)

    @property
    def support(self) -> Support:
        """The coordinates of the last step; all of them before the first."""
        return self._history.support

    @property
    def history(self) -> tuple[EpochMetrics, ...]:
        """One report per epoch so far."""
        return tuple(self._history.epochs)

    @property
    def ledger(self) -> Ledger:
        """What the run pays to."""
        return self._store.ledger

    def epsilon(self, delta: float | None = None) -> float:
        """What the steps so far cost, those lost in a crash included, at the plan's delta or another one."""
        chosen, spent = self.plan.delta if delta is None else delta, self.plan.events(self.position)
        assert chosen is not None
        return plan_accountant(self.plan).epsilon(spent, chosen) if spent else 0.0

    @property
    def planned_epsilon(self) -> float:
        """The epsilon of the whole plan: the guarantee, also of a run that is stopped because of what it showed."""
        return plan_epsilon(self.plan)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.pause()

    def _check_open(self) -> None:
        if self._closed:
            raise SparseDPError("this trainer is finished or closed; resume its run with a new one")

    def _begin_step(self) -> None:
        self._check_open()
        self._rates, self._between_steps = self.learner.learning_rates, False

    def _end_step(self, released: Release, loss: Release | None = None) -> StepReport:
        """Note a release that was learned from; at the end of an epoch evaluate and save.

        Inside an epoch the end of a ledger block saves, at most once a minute.
        """
        self.position += 1
        self._history.record_support(released)
        epoch = bisect_left(self._epoch_ends, self.position) + 1
        report = StepReport(released.step, epoch, released.phase, released, self._rates)
        tell(self._callbacks, report)
        ends_epoch = self.position == self._epoch_ends[epoch - 1]
        ends_block = self.position == self._store.ledger.state.charged and self._store.path is not None
        if ends_epoch or ends_block:
            self._check_same_weights()
        if ends_epoch:
            self._end_epoch(report, loss)
        self._between_steps = True
        if ends_epoch or (ends_block and time.monotonic() >= self._saved + SAVE_EVERY):
            self.save()
        return report

    def save(self) -> None:
        """Write a checkpoint now; does nothing without a run directory."""
        if self._store.path is not None:
            self._store.write_checkpoint(self._state())
            self._saved = time.monotonic()

    def pause(self) -> None:
        """Save and close, so that a later `resume=True` goes on from here. Steps paid for and not taken are lost.

        Edge cases: After an error inside a step nothing is saved: the last checkpoint stands.
        """
        if self._closed:
            return
        if self._between_steps:
            self.save()
            last = self._history.epochs[-1].metrics if self._history.epochs else {}
            self._write_record(STOPPED, self._snapshot(last))
        self.close()

    def finish(self) -> Result:
        """Evaluate, save, write the record and close; further calls give the same result."""
        if self._result is None:
            self._check_open()
            self._check_same_weights()
            self.save()
            result, ledger = self._snapshot(self._metrics()), self._store.ledger
            self._write_record(FINISHED if result.complete else STOPPED, result)
            head, entries = ledger.place  # with the record's own line
            last = replace(result.ledger, head=head, entries=entries)
            self._result = replace(result, ledger=distributed.broadcast_from_main(lambda: last))
            self.learner.install_average()
            self.model.eval()
            self.close()
            tell(self._callbacks, self._result)
        return self._result

    def close(self) -> None:
        """Release the ledger; steps already paid for and not taken are lost to an unseeded run."""
        self._closed = True
        self.learner.hand_back()
        self._store.close()

    def _check_same_weights(self) -> None:
        distributed.check_same_on_all_ranks(lambda: weight_facts(self.model, self.support, self.position))

    def _go_on(self, found: SavedRun) -> RunDirectory:
        """Take up a run at its checkpoint, past the steps that were paid for and lost."""
        store, saved = found
        check_identity(saved.identity, self._identity)
        self.learner.restore(saved)
        self._history = history_of(saved, self._facts.layout)
        self.position = saved.step
        if self._facts.seed is None:
            paid = store.ledger.next_step
            if any(not self.plan.phase_at(step).trains for step in range(saved.step, paid)):
                raise PrivacyError(
                    "the run was interrupted after it paid for its normalisation or its selection and before that "
                    "was saved; releasing it again would cost again. Start a new run; what this one paid stays spent"
                )
            self.position = paid
            self.learner.skip(paid - saved.step)
        store.write_checkpoint(self._state())
        store.write_metrics(self.history)
        store.write_record(self._facts.record(RUNNING, store.seconds, None))
        return store

    def _state(self) -> Checkpoint:
        learner = self.learner.state()
        return checkpoint_of(self.position, self._identity, learner, self._history, self._in_blocks)

    @cached_property
    def _epsilons(self) -> Sequence[float]:
        return epsilon_by_epoch(self.plan)

    def _end_epoch(self, last: StepReport, loss: Release | None) -> None:
        report = EpochMetrics(
            epoch=last.epoch,
            step=self.position,
            phase=last.phase,
            epsilon=self._epsilons[last.epoch - 1],
            active=self.support.size,
            active_ratio=self.support.active_ratio,
            learning_rate=last.learning_rates[0],
            metrics=self._metrics(),
            training_loss=None if loss is None else float(loss.mean),
            training_loss_noise=None if loss is None else float(loss.noise_scale),
        )
        self._history.epochs.append(report)
        self._store.write_metrics(self.history)
        tell(self._callbacks, report)

    def _metrics(self) -> Mapping[str, float | None]:
        if self.history and self.history[-1].step == self.position:
            return self.history[-1].metrics
        return distributed.broadcast_from_main(self._evaluated)

    def evaluate(self, evaluate: Evaluator) -> Mapping[str, float]:
        """An evaluation of the model as it is now, in evaluation mode; of its averaged weights if they are kept."""
        seed = self._public.generator_seed((self.position, 2))
        with self.learner.evaluated() as model, fork_generators(seed, next(model.parameters()).device):
            return {name: float(value) for name, value in evaluate(model).items()}

    def _evaluated(self) -> dict[str, float | None]:
        found = {} if self._evaluate is None else self.evaluate(self._evaluate)
        return {n: v if math.isfinite(v) else None for n, v in found.items()}

    def _snapshot(self, metrics: Mapping[str, float | None]) -> Result:
        facts, plan, support, spent = self._facts, self.plan, self.support, self.ledger.state
        head, entries = self.ledger.place
        assert plan.delta is not None
        cost = plan_accountant(plan).epsilon(spent.events(), plan.delta)
        return Result(
            model=self.model,
            method=facts.method.name,
            epsilon=self.planned_epsilon,
            delta=plan.delta,
            unit=plan.unit,
            publishable=facts.publishable,
            complete=self.position >= plan.total_steps,
            d=support.dimension,
            k=support.size,
            support=support,
            supports=tuple(self._history.spans),
            scores=self.learner.controller.scores(),
            history=self.history,
            metrics=metrics,
            plan=plan,
            ledger=LedgerSummary(spent.charged, plan.total_steps, cost, entries, head),
            out=self._store.path,
        )

    def _write_record(self, status: str, result: Result) -> None:
        seconds = self._store.seconds + time.monotonic() - self._clock
        self._store.write_record(self._facts.record(status, seconds, result.outcome))


def facts_of(
    learner: Learner,
    plan: Plan,
    about: RunMetadata,
    *,
    seed: int | None,
    public_seed: int,
    setup: Mapping[str, Json],
) -> RunSetup:
    """What a run is, for its record and for a resume to compare; `setup` is what its trainer was told besides."""
    model = learner.model
    return RunSetup(
        metadata=about,
        model_class=type(model.model if isinstance(model, Normalised) else model).__name__,
        plan=plan,
        method=learner.controller.method,
        layout=learner.layout,
        seed=seed,
        public_seed=public_seed,
        settings={**learner.setup, **setup},
        details=learner.details,
    )


def public_randomness(seed: int | None, found: SavedRun | None) -> PublicRandomness:
    """What a run's public draws come from: its seed, the run it goes on with, or a new one."""
    if seed is not None:
        return PublicRandomness(seed)
    return (
        PublicRandomness.fresh()
        if found is None
        else PublicRandomness(int(found.checkpoint.identity["public_seed"]))
    )
