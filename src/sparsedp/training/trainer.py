"""`Trainer`: batches, steps and a recorded run, put together. The loop over it can be yours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, final

from torch import Tensor, nn
from torch.utils.data import Dataset

from sparsedp import distributed
from sparsedp.batch import PerExampleLoss, per_sample_loss
from sparsedp.errors import SparseDPError
from sparsedp.evaluation import Evaluator
from sparsedp.loading import DataConfig
from sparsedp.optimizers.factory import OptimizerChoice, SchedulerChoice
from sparsedp.privacy.normalization import NORMALISE
from sparsedp.privacy.plan import Phase, Plan
from sparsedp.randomness import PublicRandomness, SeededRandomness, SystemRandomness
from sparsedp.results import CallbackLike, StepReport
from sparsedp.runs.directory import closed_on_error, find_run, resumes
from sparsedp.runs.record import RunMetadata
from sparsedp.sampling import LogicalBatch
from sparsedp.training.data import Batches
from sparsedp.training.normalization import check_normalisation
from sparsedp.training.ranks import COMPARED_ROWS, data_facts, first_facts, partition_of
from sparsedp.training.recorder import RecordedRun, facts_of, public_randomness
from sparsedp.training.state import OptimizerConfig
from sparsedp.training.step import PrivateStep, Randomness


@final
class Trainer(RecordedRun):
    """Private training step by step: `for batch in trainer: trainer.step(batch)`, then `trainer.finish()`.

    Args:
        model: trained in place; its modes (`train`, `eval`) are left as you set them. For a plan that normalises
            the inputs, `Normalised(model, channels)`.
        train_dataset: map-style. Each row is protected, or each unit if `data` names one for every row.
        criterion: on (output, target), with any usual reduction, or `PerExampleLoss(lambda model, batch: ...)`.
        plan: from `build_plan`; it carries the method.
        optimizer: any `torch.optim` optimizer over the model's parameters, or a function that makes one.
        lr_scheduler: any scheduler that needs no metric, or a function (optimizer, steps); moves every step.
        data: units, and how rows are loaded.
        evaluate: called with the model at the end of each epoch and of the run; see `held_out`.
        run_dir: run directory to make, or with `resume=True` to go on with.
        resume: go on with the run at `run_dir`, after checking that it is the same run.
        seed: makes the run reproducible, and not for release.
        engine: "bookkeeping", or "reference", which is slow and takes any model.
        ema_decay: keep an exponential average of the weights, evaluate it and give it back at the end.
        public_scores: what the ranking `given` goes by; see `PublicScores`. Nothing is charged for them.
        callbacks: see every step and epoch: released and public values only.
        metadata: names for the record.

    Formal guarantees: Every step is charged before it is taken, to a ledger that pays for this plan once, and takes a
    batch that this trainer drew. Unseeded runs draw noise and batches from the operating system. What callbacks and
    files get is public or released.
    Edge cases: In a `torch.distributed` group all ranks make a trainer alike and step it alike; rank 0 keeps the
    run and evaluates, callbacks are called on all. An interrupted run resumes at its last checkpoint. A seeded one
    replays to the same weights; an unseeded one goes on after the steps that were paid for and lost, and so takes
    fewer.
    """

    def __init__(
        self,
        model: nn.Module,
        train_dataset: Dataset[Any],
        criterion: Callable[[Any, Tensor], Tensor] | PerExampleLoss,
        *,
        plan: Plan,
        optimizer: OptimizerChoice,
        lr_scheduler: SchedulerChoice = None,
        data: DataConfig = DataConfig(),  # noqa: B008
        evaluate: Evaluator | None = None,
        run_dir: Path | str | None = None,
        resume: bool = False,
        seed: int | None = None,
        engine: str = "bookkeeping",
        ema_decay: float | None = None,
        public_scores: Mapping[str, Any] | None = None,
        callbacks: Sequence[CallbackLike] = (),
        metadata: RunMetadata = RunMetadata(),  # noqa: B008
    ) -> None:
        distributed.connect()
        if seed is not None:
            distributed.use_threads_of_ranks()
        check_normalisation(plan, model)
        distributed.check_same_on_all_ranks(
            lambda: first_facts(plan, model, train_dataset, criterion, data, seed)
        )
        found = find_run(run_dir, resumes(run_dir, resume), plan, replay=seed is not None)
        with closed_on_error(found):
            private = SystemRandomness() if seed is None else SeededRandomness(seed)
            public = PublicRandomness(
                distributed.broadcast_from_main(lambda: public_randomness(seed, found).seed)
            )
            partition = partition_of(train_dataset, data, found and found.checkpoint)
            self._batches = distributed.all_or_raise(
                lambda: Batches(train_dataset, plan, private, data, partition)
            )
            distributed.check_same_on_all_ranks(
                lambda: data_facts(self._batches.probe_rows(COMPARED_ROWS, public), data)
            )
            distributed.broadcast_parameters(model)
            rule = OptimizerConfig(optimizer, lr_scheduler, ema_decay, public_scores)
            draws = Randomness(private, public)
            self._stepper = distributed.all_or_raise(
                lambda: PrivateStep(
                    model, per_sample_loss(criterion), plan, self._batches, draws, rule, engine
                )
            )
            learner = self._stepper.learner
            setup = {"engine": engine, "ema_decay": ema_decay, "rows_per_unit": data.rows_per_unit}
            facts = facts_of(learner, plan, metadata, seed=seed, public_seed=public.seed, setup=setup)
            self._issued: dict[int, LogicalBatch] = {}
            self._workers = data.num_workers
            super().__init__(
                learner, facts, evaluate=evaluate, callbacks=callbacks, out=run_dir, found=found,
                in_blocks=partition.in_blocks,
            )  # fmt: skip

    def __iter__(self) -> Iterator[LogicalBatch]:
        """The batches still to be stepped through, in order; what else the plan releases is released on the way."""
        self._check_open()
        batches = self._batches.starting_at(self.position)
        while (batch := self._next_batch(batches)) is not None:
            phase = self.plan.phase_at(batch.step)
            if phase.trains:
                self._issued[batch.step] = batch
                yield batch
            else:
                self._release(phase, batch, batches)

    def step(self, batch: LogicalBatch) -> StepReport:
        """Take the private step of a batch; at the end of an epoch evaluate, at the end of a ledger block save."""
        self._check_open()
        if self._issued.pop(self.position, None) is not batch:
            raise SparseDPError(
                f"step: got the batch of step {batch.step}, expected the one this trainer gave for step "
                f"{self.position}; take each batch of `for batch in trainer` once, in order"
            )
        self._begin_step()
        return self._end_step(*self._stepper.take(batch, self.ledger))

    def _release(self, phase: Phase, first: LogicalBatch, others: Iterator[LogicalBatch]) -> None:
        """The releases of a phase that does not train: steps of the plan that no report shows, saved at once."""
        if first.step != self.position:
            raise SparseDPError(
                f"the batch of step {first.step} is asked for before step {self.position} was taken, and the phase "
                f"{phase.name!r} looks at what the steps before it made; take each batch as it comes"
            )
        release = self._stepper.normalise if phase.name == NORMALISE else self._stepper.select
        self._begin_step()
        with self._stepper.secret_generators(self.position):
            release(phase, chain([first], others), self.ledger)
        self.position, self._between_steps = self.position + phase.steps, True
        self.save()

    def _next_batch(self, batches: Iterator[LogicalBatch]) -> LogicalBatch | None:
        if self._workers == 0:
            return next(batches, None)
        # Starting workers draws from torch's global generator.
        with self._stepper.secret_generators(self.position):
            return next(batches, None)
