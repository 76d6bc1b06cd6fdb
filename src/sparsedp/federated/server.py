"""The server's part of a round: sample clients, send the task, sum their integers, charge, add the noise, learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

import numpy as np
from torch import Tensor, nn

from sparsedp.clipping import FlatClip, Identity
from sparsedp.distributed import require_one_process
from sparsedp.errors import PrivacyError, SparseDPError
from sparsedp.evaluation import Evaluator
from sparsedp.federated.messages import ClientTask, model_digest
from sparsedp.methods import StepSetting
from sparsedp.methods.method import SELECT
from sparsedp.optimizers.factory import OptimizerChoice, SchedulerChoice
from sparsedp.optimizers.sparse import change_weights
from sparsedp.parameters import ParameterLayout, Support
from sparsedp.privacy.charge import Charge, SplitCharge
from sparsedp.privacy.mechanism import GaussianMechanism
from sparsedp.privacy.plan import FLAT, Phase, Plan
from sparsedp.privacy.queries import ClientUpdateSum, is_within
from sparsedp.randomness import SeededRandomness, SystemRandomness
from sparsedp.results import CallbackLike, StepReport
from sparsedp.runs.directory import find_run
from sparsedp.runs.record import RunMetadata
from sparsedp.training.recorder import RecordedRun, facts_of, public_randomness
from sparsedp.training.state import Learner, OptimizerConfig
from sparsedp.training.step import COUNT


@final
@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """A round that has begun; its setting is None if it counts. Who takes part is private.

    A step that counts and trains has two rounds, of the same clients.
    """

    step: int
    clients: Sequence[int] = field(repr=False)
    setting: StepSetting | None = field(repr=False)
    task: ClientTask = field(repr=False)


@final
@dataclass(frozen=True, slots=True)
class RejectedUpdate:
    """An answer that does not count as it came, and the reason."""

    client: int
    reason: str


@final
@dataclass(frozen=True, slots=True)
class RoundReport:
    """A round that is done.

    Attributes:
        report: the step as callbacks see it; None for a round that counts. Public.
        rejected: clients whose answer was refused or shortened. For the operator: it tells who took part.
        missing: clients that were sampled and did not answer. As well.
    """

    report: StepReport | None
    rejected: tuple[RejectedUpdate, ...] = field(repr=False)
    missing: tuple[int, ...] = field(repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """A step that has begun: one round, or a count and then an update of the same clients."""

    clients: Sequence[int]
    charge: SplitCharge
    counted: bool = False


@final
class FederatedTrainer(RecordedRun):
    """A run over rounds: `configure_round()`, carry the task to the clients, `aggregate(round, answers)`, `finish()`.

    Args:
        model: trained in place.
        plan: from `build_plan(method, units=number of clients, unit="client")`; a step is a round, or two where the
            method counts rows in every step.
        optimizer: any `torch.optim` optimizer; it descends along the mean of the clients' updates.
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
        self._step: _Step | None = None

    @property
    def is_done(self) -> bool:
        """Whether every planned step is."""
        return self.position >= self.plan.total_steps

    @property
    def rounds_left(self) -> int:
        """How many rounds are still to come, one that has begun among them."""
        phases = [self.plan.phase_at(step) for step in range(self.position, self.plan.total_steps)]
        twice = sum(phase.trains and self._counts(phase) for phase in phases)
        return len(phases) + twice - int(self._step is not None and self._step.counted)

    def configure_round(self) -> Round:
        """Sample the clients of the next round and make their task.

        Formal guarantees:
            The two rounds of a step that counts rows have the same clients: its one charge covers both releases.
        """
        if self._round is not None:
            raise SparseDPError(
                f"configure_round: the round of step {self._round.step} has begun; aggregate it first"
            )
        step, phase = self.position, self.plan.phase_at(self.position)
        if self._step is None:
            self._begin_step()
            charge = Charge(phase.name, step, phase.sampling_rate, phase.noise_multiplier)
            self._step = _Step(self._sample_clients(phase, step), SplitCharge(self.ledger, charge))
        if self._counts(phase) and not self._step.counted:
            self._round = Round(step, self._step.clients, None, self._counting_task(step, phase))
        else:
            setting = self.learner.controller.begin_step(step)
            task = self._training_task(step, phase, setting)
            self._round = Round(step, self._step.clients, setting, task)
        return self._round

    def _sample_clients(self, phase: Phase, step: int) -> tuple[int, ...]:
        """The clients that take part, each by its own coin of exactly the charged probability. Private."""
        coins = self._private.bernoulli(phase.sampling_rate, self.plan.units, key=(step,))
        return tuple(int(number) for number in np.flatnonzero(coins))

    def _counts(self, phase: Phase) -> bool:
        """Whether a step of this phase asks for a count: before it trains, or instead."""
        tables = self.learner.controller.tables
        return not phase.trains or bool(phase.count_share and tables is not None and tables.total)

    def _counting_task(self, step: int, phase: Phase) -> ClientTask:
        """Ask which rows of tables a client uses: for a selection, or for this step's rows."""
        tables = self.learner.controller.tables
        assert tables is not None
        clip = FlatClip(1.0) if phase.trains else _clip_of(phase)
        noise = phase.count_noise if phase.trains else phase.noise_multiplier
        task = self._task(step, Support.full(self._layout.dimension), tables.total, clip, noise)
        return replace(task, count=tuple(slot.name for slot in tables.slots))

    def _training_task(self, step: int, phase: Phase, setting: StepSetting) -> ClientTask:
        """Ask for an update on the step's support."""
        if setting.change is not None:
            change_weights(self.model, self._layout, setting.change)
        size = setting.support.size
        task = self._task(step, setting.support, size, _clip_of(phase), phase.gradient_noise)
        return replace(task, geometry=setting.geometry, top=setting.per_sample_top)

    def _task(self, step: int, support: Support, size: int, clip: FlatClip, noise: float) -> ClientTask:
        return ClientTask(
            run=self.plan.fingerprint,
            model=self._digest,
            step=step,
            weights=self._layout.flatten(self.model).cpu(),
            support=support,
            size=size,
            clip=clip,
            noise_multiplier=noise,
            geometry=Identity(),
            top=None,
        )

    def aggregate(self, round_: Round, answers: Mapping[int, Tensor | str]) -> RoundReport:
        """Sum what came back, charge, add the noise, move the model.

        Args:
            round_: the one that `configure_round` gave.
            answers: by client, a vector of integers, or the words of one that could not answer.
        """
        if round_ is not self._round:
            raise SparseDPError("aggregate: got another round than the one that configure_round() gave last")
        updates, rejected = validate_updates(round_, answers)
        report = self._release(round_, updates)
        missing = tuple(number for number in round_.clients if number not in answers)
        return RoundReport(report, rejected, missing)

    def _release(self, round_: Round, updates: Sequence[Tensor]) -> StepReport | None:
        phase, step, task, setting = self.plan.phase_at(round_.step), self._step, round_.task, round_.setting
        assert step is not None
        query = ClientUpdateSum(
            updates,
            Support.full(task.size) if setting is None else setting.support,
            task.clip,
            task.grid,
            Identity() if setting is None else setting.geometry,
        )
        counts_in_step = setting is None and phase.trains
        released = GaussianMechanism(step.charge, self._private).release(
            query,
            Charge(
                phase.name,
                round_.step,
                phase.sampling_rate,
                task.noise_multiplier,
                COUNT if counts_in_step else 0,
            ),
            expected_batch_size=self.plan.expected_batch_size(phase),
        )
        self._round, self._step = None, None
        if setting is not None:
            self.learner.apply(released)
            self.learner.controller.update(released)
            self.learner.after_step()
            return self._end_step(released)
        self.learner.controller.observe_counts(released)
        if counts_in_step:
            self._step = replace(step, counted=True)
        else:
            self._end_preliminary(phase.steps)
        return None


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
        if reason is not None or not isinstance(answer, Tensor):
            rejected.append(RejectedUpdate(client, f"refused: {reason}"))
            continue
        updates.append(answer)
        if not is_within(answer, round_.task.grid):
            bound = f"longer than the clip norm {round_.task.clip.norm:g}"
            rejected.append(RejectedUpdate(client, f"shortened: its update is {bound}"))
    return tuple(updates), tuple(rejected)


def _fault(answer: Tensor | str, task: ClientTask) -> str | None:
    if not isinstance(answer, Tensor):
        return str(answer)
    if answer.shape != (task.size,):
        return f"got an update of shape {tuple(answer.shape)}, expected ({task.size},)"
    if answer.dtype != task.dtype:
        found = "numbers that are not integers" if answer.is_floating_point() else f"{answer.dtype}"
        return f"got {found}, expected {task.dtype}"
    return None


def _clip_of(phase: Phase) -> FlatClip:
    return FlatClip(phase.clip_norm)


def check_federated(plan: Plan) -> None:
    """Refuse a plan that clients cannot run."""
    plan.check_calibrated()
    beyond = [phase.clipping for phase in plan.phases if phase.clipping != FLAT]
    if beyond:
        raise PrivacyError(
            f"max_grad_norm: got {beyond[0]!r}, expected a number: a client's update is held to one norm"
        )
    if any(phase.loss_bound for phase in plan.phases):
        raise PrivacyError("private_loss: got a bound, expected None: clients are not asked for losses")
    others = [phase.name for phase in plan.phases if not phase.trains and phase.name != SELECT.name]
    if others:
        raise PrivacyError(
            f"the phases {others} release statistics of the inputs, which clients are not asked for; leave out "
            "normalise, and scale the inputs at the clients, by public numbers"
        )
