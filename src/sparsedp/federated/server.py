"""The server's part of a round: sample clients, send the task, sum their integers, charge, add the noise, learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
from torch import Tensor, nn

from sparsedp.clipping import FlatClip
from sparsedp.distributed import require_one_process
from sparsedp.errors import PrivacyError, SparseDPError
from sparsedp.evaluation import Evaluator
from sparsedp.federated.messages import ClientTask, model_digest
from sparsedp.optimizers.factory import OptimizerChoice, SchedulerChoice
from sparsedp.optimizers.sparse import change_weights
from sparsedp.parameters import ParameterLayout
from sparsedp.privacy.charge import Charge
from sparsedp.privacy.mechanism import GaussianMechanism
from sparsedp.privacy.plan import FLAT, Phase, Plan
from sparsedp.privacy.queries import ClientUpdateSum, is_within
from sparsedp.randomness import SeededRandomness, SystemRandomness
from sparsedp.results import CallbackLike, StepReport
from sparsedp.runs.directory import find_run
from sparsedp.runs.record import RunMetadata
from sparsedp.training.recorder import RecordedRun, facts_of, public_randomness
from sparsedp.training.state import Learner, OptimizerConfig


@final
@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """A round that has begun. Who takes part is private."""

    step: int
    clients: Sequence[int] = field(repr=False)
    task: ClientTask = field(repr=False)


class RejectedUpdate(NamedTuple):
    """An answer that does not count as it came, and the reason."""

    client: int
    reason: str


@final
@dataclass(frozen=True, slots=True)
class RoundReport:
    """A round that is done: the step as callbacks see it, which is public, and who took part, for the operator alone.

    `rejected` names clients whose answer was refused or shortened, `missing` those that did not answer.
    """

    report: StepReport
    rejected: tuple[RejectedUpdate, ...] = field(repr=False)
    missing: tuple[int, ...] = field(repr=False)


@final
class FederatedTrainer(RecordedRun):
    """A run over rounds: `configure_round()`, carry the task to the clients, `aggregate(round, answers)`, `finish()`.

    Args:
        model: trained in place.
        plan: from `build_plan(method, units=number of clients, unit_name="client")`; a step is a round.
        optimizer: makes any `torch.optim` optimizer; it descends along the mean of the clients' updates.
        scheduler: as in `fit`.
        evaluate: called with the model at the end of each epoch; see `held_out`.
        run_dir: run directory to make, or with `resume=True` to go on with.
        resume: go on with the run at `run_dir`.
        seed: makes samples and noise reproducible, and the run not for release.
        ema_decay: keep an exponential average of the weights.
        public_scores: what the method `given` ranks by, as in `fit`.
        callbacks: see every round and epoch: released and public values only.
        metadata: names for the record.

    Formal guarantees:
        The unit is the client. Every client is sampled by its own coin at the plan's rate; what it sends is clipped
        here, whatever it did; the ledger is charged before the sum is formed; the noise is drawn here, once. A client
        that does not answer, or whose answer is refused, adds zero, which moves no other client's part.

    Edge cases:
        A round in which nobody was sampled, or nobody answered, releases noise alone.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        plan: Plan,
        optimizer: OptimizerChoice,
        scheduler: SchedulerChoice = None,
        evaluate: Evaluator | None = None,
        run_dir: Path | str | None = None,
        resume: bool = False,
        seed: int | None = None,
        ema_decay: float | None = None,
        public_scores: Mapping[str, Any] | None = None,
        callbacks: Sequence[CallbackLike] = (),
        metadata: RunMetadata = RunMetadata(),  # noqa: B008
    ) -> None:
        require_one_process("a federated run's server")
        check_federated(plan)
        found = find_run(run_dir, resume, plan, replay=seed is not None)
        self._private = SystemRandomness() if seed is None else SeededRandomness(seed)
        public = public_randomness(seed, found)
        self._layout = ParameterLayout.of(model)
        rule = OptimizerConfig(optimizer, scheduler, ema_decay, public_scores=public_scores)
        learner = Learner(model, self._layout, plan, public, rule)
        setup = {"engine": "federated", "ema_decay": ema_decay, "rows_per_unit": None}
        facts = facts_of(learner, plan, metadata, seed=seed, public_seed=public.seed, setup=setup)
        super().__init__(learner, facts, evaluate=evaluate, callbacks=callbacks, out=run_dir, found=found)
        self._digest = model_digest(model, self._layout)
        self._round: Round | None = None

    @property
    def is_done(self) -> bool:
        """Whether every planned step is."""
        return self.position >= self.plan.total_steps

    def configure_round(self) -> Round:
        """Sample the clients of the next round and make their task."""
        if self._round is not None:
            raise SparseDPError(
                f"configure_round: the round of step {self._round.step} has begun; aggregate it first"
            )
        self._begin_step()
        step, phase = self.position, self.plan.phase_at(self.position)
        clients = self._sample_clients(phase, step)
        setting = self.learner.controller.begin_step(step)
        if setting.change is not None:
            change_weights(self.model, self._layout, setting.change)
        task = ClientTask(
            run=self.plan.fingerprint,
            model=self._digest,
            step=step,
            weights=self._layout.flatten(self.model).cpu(),
            support=setting.support,
            clip=FlatClip(phase.clip_norm),
            noise_multiplier=phase.noise_multiplier,
            geometry=setting.geometry,
            top=setting.per_sample_top,
        )
        self._round = Round(step, clients, task)
        return self._round

    def _sample_clients(self, phase: Phase, step: int) -> tuple[int, ...]:
        """The clients that take part, each by its own coin of exactly the charged probability. Private."""
        coins = self._private.bernoulli(phase.sampling_rate, self.plan.units, key=(step,))
        return tuple(int(number) for number in np.flatnonzero(coins))

    def aggregate(self, round_: Round, answers: Mapping[int, Tensor | str]) -> RoundReport:
        """Sum what came back, charge, add the noise, move the model.

        Args:
            round_: the one that `configure_round` gave.
            answers: by client, a vector of integers, or the words of one that could not answer.
        """
        if round_ is not self._round:
            raise SparseDPError("aggregate: got another round than the one that configure_round() gave last")
        updates, rejected = validate_updates(round_, answers)
        phase, task = self.plan.phase_at(round_.step), round_.task
        released = GaussianMechanism(self.ledger, self._private).release(
            ClientUpdateSum(updates, task.support, task.clip, task.grid, task.geometry),
            Charge(phase.name, round_.step, phase.sampling_rate, task.noise_multiplier),
            expected_batch_size=self.plan.expected_batch_size(phase),
        )
        self._round = None
        self.learner.apply(released)
        self.learner.controller.update(released)
        self.learner.after_step()
        missing = tuple(number for number in round_.clients if number not in answers)
        return RoundReport(self._end_step(released), rejected, missing)


def validate_updates(
    round_: Round, answers: Mapping[int, Tensor | str]
) -> tuple[tuple[Tensor, ...], tuple[RejectedUpdate, ...]]:
    """Tell updates from what is none. One that is too long counts, shortened by the mechanism, and is named.

    Formal guarantees:
        Whether a client's answer counts depends on that answer alone.
    """
    updates: list[Tensor] = []
    rejected: list[RejectedUpdate] = []
    for client, answer in sorted(answers.items()):
        reason = "it was not sampled" if client not in round_.clients else _fault(answer, round_.task)
        if reason is None and isinstance(answer, Tensor):
            updates.append(answer)
            if not is_within(answer, round_.task.grid):
                rejected.append(RejectedUpdate(client, "shortened: its update is longer than the clip norm"))
        else:
            rejected.append(RejectedUpdate(client, f"refused: {reason}"))
    return tuple(updates), tuple(rejected)


def _fault(answer: Tensor | str, task: ClientTask) -> str | None:
    if isinstance(answer, str):
        return answer
    expected = (task.support.size,)
    if answer.shape != expected:
        return f"got an update of shape {tuple(answer.shape)}, expected {expected}"
    return None if answer.dtype == task.dtype else f"got {answer.dtype}, expected {task.dtype}"


def check_federated(plan: Plan) -> None:
    """Refuse a plan that clients cannot run."""
    plan.check_calibrated()
    for phase in plan.phases:
        if phase.clipping != FLAT:
            raise PrivacyError(
                f"max_grad_norm: got {phase.clipping!r}, expected a number: a client's update is held to one norm"
            )
        if phase.loss_bound or phase.count_share or not phase.trains:
            raise PrivacyError(
                f"{plan.method}: clients are not asked for losses, statistics of inputs or counts of rows; leave "
                "out private_loss and normalise (scale the inputs at the clients, by public numbers)"
            )
