"""The trainer: everything a run is between two steps. The loop over it can be yours."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, final

from torch import Tensor, nn
from torch.utils.data import Dataset

from sparsedp.core.batch import PerSample, per_sample_loss
from sparsedp.core.errors import SparseDPError
from sparsedp.core.randomness import PublicRandomness, SeededRandomness, SystemRandomness
from sparsedp.core.support import Support
from sparsedp.methods import PublicScores
from sparsedp.optimizers.rule import OptimizerChoice, SchedulerChoice
from sparsedp.privacy.plan import Plan
from sparsedp.runs.checkpoint import Checkpoint
from sparsedp.runs.history import EpochReport, History
from sparsedp.runs.identity import check_identity, identity_of
from sparsedp.runs.moved import moved_checkpoint
from sparsedp.runs.record import FINISHED, RUNNING, STOPPED, About, RunFacts
from sparsedp.runs.state import checkpoint_of, history_of
from sparsedp.runs.store import ExistingRun, RunStore, find_run, new_store
from sparsedp.sampling.poisson import LogicalBatch
from sparsedp.training.batches import Batches, Loading
from sparsedp.training.evaluate import Evaluator
from sparsedp.training.learner import UpdateRule
from sparsedp.training.normalised import (
    Normalised,
    check_normalisation,
    check_not_lost,
    normalisation_phase,
)
from sparsedp.training.reports import Callback, Event, Result, Spending, StepReport
from sparsedp.training.selection import selection_phase
from sparsedp.training.stepper import Randomness, Stepper


@final
class Trainer:
    """Private training step by step: `for batch in trainer: trainer.step(batch)`, then `trainer.finish()`.

    Args:
        model: trained in place; its modes (`train`, `eval`) are left as you set them. For a plan that normalises
            the inputs, `Normalised(model, channels)`.
        dataset: map-style. Each row is protected, or each unit if `loading` names one for every row.
        loss: a criterion on (output, target) with `reduction="none"`, or `PerSample(lambda model, rows: ...)`.
        plan: from `build_plan`; it carries the method.
        optimizer: any `torch.optim` optimizer over the model's parameters, or a function that makes one.
        scheduler: any scheduler that needs no metric, or a function (optimizer, steps); moves every step.
        loading: units, and how rows are loaded.
        evaluate: called with the model at the end of each epoch and of the run; see `held_out`.
        out: run directory to make, or with `resume=True` to go on with.
        resume: go on with the run at `out`, after checking that it is the same run.
        seed: makes the run reproducible, and not for release.
        engine: "bookkeeping", or "reference", which is slow and takes any model.
        ema_decay: keep an exponential average of the weights, evaluate it and give it back at the end.
        public_scores: what the ranking `given` goes by; see `PublicScores`. Nothing is charged for them.
        callbacks: see every step and epoch: released and public values only.
        about: names for the record.

    **Privacy.** Every step is charged before it is taken, to a ledger that pays for this plan once, and takes a batch
    that this trainer drew. Unseeded runs draw noise and batches from the operating system. What callbacks and files
    get is public or released.
    **Edge cases.** An interrupted run resumes at its last checkpoint. A seeded one replays to the same weights; an
    unseeded one goes on after the steps that were paid for and lost, and so takes fewer.
    """

    def __init__(
        self,
        model: nn.Module,
        dataset: Dataset[Any],
        loss: Callable[[Any, Tensor], Tensor] | PerSample,
        *,
        plan: Plan,
        optimizer: OptimizerChoice,
        scheduler: SchedulerChoice = None,
        loading: Loading = Loading(),  # noqa: B008
        evaluate: Evaluator | None = None,
        out: Path | str | None = None,
        resume: bool = False,
        seed: int | None = None,
        engine: str = "bookkeeping",
        ema_decay: float | None = None,
        public_scores: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] = (),
        about: About = About(),  # noqa: B008
    ) -> None:
        self._clock = time.monotonic()
        check_normalisation(plan, model)
        found = find_run(out, resume, plan, replay=seed is not None)
        private = SystemRandomness() if seed is None else SeededRandomness(seed)
        public = _public_randomness(seed, found)
        self._batches = Batches(dataset, plan, private, loading)
        rule = UpdateRule(optimizer, scheduler, ema_decay)
        draws = Randomness(private, public)
        scores = None if public_scores is None else PublicScores.of(public_scores)
        self._stepper = Stepper(
            model, per_sample_loss(loss), plan, self._batches, draws, rule, engine, scores
        )
        self._learner = learner = self._stepper.learner
        setup = {"engine": engine, "ema_decay": ema_decay, "rows_per_unit": loading.rows_per_unit}
        self._facts = RunFacts(
            about=about,
            model_class=type(model.model if isinstance(model, Normalised) else model).__name__,
            plan=plan,
            method=learner.controller.method,
            layout=self._stepper.layout,
            seed=seed,
            public_seed=public.seed,
            setup={**learner.describe(), **setup},
            details=learner.details(),
        )
        self._identity = identity_of(self._facts)
        self._plan, self._evaluate, self._callbacks = plan, evaluate, tuple(callbacks)
        self._epoch_ends = plan.epoch_ends()
        self._position, self._between_steps, self._closed = 0, True, False
        self._workers = loading.workers
        self._history = History(self._stepper.layout)
        self._issued: dict[int, LogicalBatch] = {}
        self._result: Result | None = None
        self._store = self._begin(out) if found is None else self._go_on(found)
        self._spending = Spending(plan, self._store.ledger)

    @property
    def plan(self) -> Plan:
        """What was planned."""
        return self._plan

    @property
    def model(self) -> nn.Module:
        """The model as it is now."""
        return self._learner.model

    @property
    def position(self) -> int:
        """How many steps of the plan are done, those lost in a crash included: the next step's index."""
        return self._position

    @property
    def support(self) -> Support:
        """The coordinates of the last step; all of them before the first."""
        return self._history.support

    @property
    def history(self) -> tuple[EpochReport, ...]:
        """One report per epoch so far."""
        return tuple(self._history.epochs)

    def __iter__(self) -> Iterator[LogicalBatch]:
        """The batches still to be stepped through, in order; before the first, what the plan releases ahead."""
        self._check_open()
        self._before_training()
        batches = self._batches.starting_at(self._position)
        while (batch := self._next_batch(batches)) is not None:
            self._issued[batch.step] = batch
            yield batch

    def step(self, batch: LogicalBatch) -> StepReport:
        """Take the private step of a batch; at the end of an epoch evaluate, at the end of a ledger block save."""
        self._check_open()
        if self._issued.pop(self._position, None) is not batch:
            raise SparseDPError(
                f"step: got the batch of step {batch.step}, expected the one this trainer gave for step "
                f"{self._position}; take each batch of `for batch in trainer` once, in order"
            )
        rates = self._learner.learning_rates
        self._between_steps = False
        released = self._stepper.take(batch, self._store.ledger)
        self._position += 1
        self._history.note(released)
        epoch = bisect_left(self._epoch_ends, self._position) + 1
        report = StepReport(batch.step, epoch, released.phase, released, rates)
        self._tell(report)
        if self._position == self._epoch_ends[epoch - 1]:
            self._end_epoch(report)
        self._between_steps = True
        if self._position == self._store.ledger.charged:
            self._end_block()
        return report

    def save(self) -> None:
        """Write a checkpoint now; does nothing without a run directory."""
        self._store.save(self._state())
        self._learner.saved()

    def _end_block(self) -> None:
        """Write what moved since the last checkpoint; all of it at an epoch's end and where that is not less."""
        moved = None if self._position in self._epoch_ends else self._learner.moved()
        if moved is None:
            self.save()
        else:
            self._store.save_moved(moved_checkpoint(self._position, self._identity, moved, self._history))

    def pause(self) -> None:
        """Save and close, so that a later `resume=True` goes on from here. Steps paid for and not taken are lost.

        **Edge cases.** After an error inside a step nothing is saved: the last checkpoint stands.
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
            self.save()
            result, ledger = self._snapshot(self._metrics()), self._store.ledger
            self._write_record(FINISHED if result.complete else STOPPED, result)
            last = replace(result.ledger, head=ledger.head, entries=ledger.length)  # the record's own line
            self._result = replace(result, ledger=last)
            self._learner.install_average()
            self._learner.model.eval()
            self.close()
        return self._result

    def close(self) -> None:
        """Release the ledger; steps already paid for and not taken are lost to an unseeded run."""
        self._closed = True
        self._learner.applier.hand_back()
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.pause()

    def _before_training(self) -> None:
        """The releases before training: steps of the plan that no report shows, each saved at once."""
        stepper = self._stepper
        for phase, release in ((normalisation_phase, stepper.normalise), (selection_phase, stepper.select)):
            found = phase(self._plan)
            if found is None or self._position != self._plan.first_step(found.name):
                continue
            self._between_steps = False
            with stepper.secret_generators(self._position):
                release(found, self._batches.starting_at(self._position), self._store.ledger)
            self._position, self._between_steps = self._position + found.steps, True
            self.save()

    def _next_batch(self, batches: Iterator[LogicalBatch]) -> LogicalBatch | None:
        if self._workers == 0:
            return next(batches, None)
        # Starting workers draws from torch's global generator.
        with self._stepper.secret_generators(self._position):
            return next(batches, None)

    def _begin(self, out: Path | str | None) -> RunStore:
        """Keep a new run, with its first state."""
        start, record = self._state(), self._facts.record(RUNNING, 0.0, None)
        return new_store(out, self._plan, start, record, replay=self._facts.seed is not None)

    def _go_on(self, found: ExistingRun) -> RunStore:
        """Take up a run at its checkpoint, past the steps that were paid for and lost."""
        store, saved = found
        check_identity(saved.identity, self._identity)
        self._learner.restore(saved)
        self._history = history_of(saved, self._stepper.layout)
        self._position = saved.step
        if self._facts.seed is None:
            paid = store.ledger.next_step
            check_not_lost(self._plan, saved.step, paid)
            self._position = paid
            self._learner.skip(paid - saved.step)
        store.save(self._state())
        self._learner.saved()
        store.keep_epochs(self._history.epochs)
        store.keep_record(self._facts.record(RUNNING, store.seconds, None))
        return store

    def _state(self) -> Checkpoint:
        return checkpoint_of(self._position, self._identity, self._learner.state(), self._history)

    def _end_epoch(self, last: StepReport) -> None:
        report = EpochReport(
            epoch=last.epoch,
            step=self._position,
            phase=last.phase,
            epsilon=self._spending.at_epoch_end(self._position),
            active=self.support.size,
            active_ratio=self.support.active_ratio,
            learning_rate=last.learning_rates[0],
            metrics=self._metrics(),
        )
        self._history.epochs.append(report)
        self._store.keep_epochs(self._history.epochs)
        self._tell(report)

    def _metrics(self) -> Mapping[str, float | None]:
        """Held-out numbers of the model as it is now."""
        epochs = self._history.epochs
        if epochs and epochs[-1].step == self._position:
            return epochs[-1].metrics
        return {} if self._evaluate is None else self._stepper.evaluated(self._evaluate, self._position)

    def _tell(self, event: Event) -> None:
        for callback in self._callbacks:
            callback(event)

    def _snapshot(self, metrics: Mapping[str, float | None]) -> Result:
        facts, plan = self._facts, self._plan
        return Result(
            model=self._learner.model,
            method=facts.method.name,
            epsilon=self._spending.planned(),
            delta=plan.delta,
            unit=plan.unit,
            private=plan.is_private,
            for_release=facts.for_release,
            complete=self._position >= plan.total_steps,
            d=self.support.dimension,
            k=self.support.size,
            support=self.support,
            supports=tuple(self._history.spans),
            scores=self._learner.controller.scores(),
            history=self.history,
            metrics=metrics,
            plan=plan,
            ledger=self._spending.summary(),
            out=self._store.path,
        )

    def _write_record(self, status: str, result: Result) -> None:
        seconds = self._store.seconds + time.monotonic() - self._clock
        self._store.keep_record(self._facts.record(status, seconds, result.outcome))

    def _check_open(self) -> None:
        if self._closed:
            raise SparseDPError("this trainer is finished or closed; resume its run with a new one")


def _public_randomness(seed: int | None, found: ExistingRun | None) -> PublicRandomness:
    if seed is not None:
        return PublicRandomness(seed)
    return PublicRandomness.fresh() if found is None else PublicRandomness(found.public_seed)
