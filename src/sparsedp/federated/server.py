"""The server's part: pick clients, ask them, sum their integers, pay, add the noise, learn."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from sparsedp.callbacks.reports import Callback, StepReport
from sparsedp.core.clip import FlatClip
from sparsedp.core.errors import PrivacyError, SparseDPError
from sparsedp.core.layout import Layout
from sparsedp.core.randomness import SeededRandomness, SystemRandomness
from sparsedp.evaluation.evaluate import Evaluator
from sparsedp.federated.picking import pick
from sparsedp.federated.replies import Answers, Refusal, sort_out
from sparsedp.federated.task import Base, Task, Wire, integers_for
from sparsedp.federated.weights import model_digest
from sparsedp.methods import Controller, Knowledge, OffSupport, PublicScores, StepSetting
from sparsedp.optimizers.apply import set_to_zero
from sparsedp.optimizers.rule import OptimizerChoice, SchedulerChoice
from sparsedp.privacy.ledger import Charge
from sparsedp.privacy.mechanism import BoundedSum, private_mean
from sparsedp.privacy.plan import Phase, Plan
from sparsedp.privacy.released import Released
from sparsedp.privacy.updates import AggregatedUpdates, UpdateSum
from sparsedp.runs.record import About, RunFacts
from sparsedp.runs.store import find_run
from sparsedp.training.keeper import RunKeeper, public_randomness
from sparsedp.training.kept_run import KeptRun
from sparsedp.training.learner import Learner, UpdateRule

logger = logging.getLogger("sparsedp")

DOWN, UP, REFRESH = "client_bytes_down", "client_bytes_up", "client_bytes_refresh"
"""Metrics of an epoch: bytes to and from one client that takes part in its last round, and what it gets once for each
support. They follow from k and d; how many clients took part is nobody's business."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """A round that has begun. Who takes part is private.

    Attributes:
        step: of the plan.
        tasks: for each client that was picked, by its number.
    """

    step: int
    tasks: Mapping[int, Task] = field(repr=False)
    setting: StepSetting = field(repr=False)
    task: Task = field(repr=False)

    @property
    def clients(self) -> tuple[int, ...]:
        """Who was picked."""
        return tuple(self.tasks)


@final
@dataclass(frozen=True, slots=True)
class RoundReport:
    """A round that is done.

    Attributes:
        report: the step as callbacks see it. Public.
        refused: clients whose answer was refused or shortened, and why. For the operator: it tells who took part.
        missing: clients that were picked and did not answer. As well.
    """

    report: StepReport
    refused: tuple[Refusal, ...] = field(repr=False)
    missing: tuple[int, ...] = field(repr=False)


@final
class FederatedTrainer(KeptRun):
    """A run over rounds: `begin()`, carry the tasks to the clients, `complete(round, answers)`, `finish()`.

    Args:
        model: trained in place.
        plan: from `build_plan(method, units=number of clients, unit="client")`; a step is a round.
        optimizer: any `torch.optim` optimizer; it descends along the mean of the clients' updates.
        scheduler: as in `fit`.
        evaluate: called with the model at the end of each epoch; see `held_out`.
        out: run directory to make, or with `resume=True` to go on with.
        resume: go on with the run at `out`.
        seed: makes picks and noise reproducible, and the run not for release.
        ema_decay: keep an exponential average of the weights.
        public_scores: what the method `given` ranks by, as in `fit`.
        callbacks: see every round and epoch: released and public values only.
        about: names for the record.

    **Privacy.** The unit is the client. Every client is picked by its own coin at the plan's rate; what it sends is
    clipped here, whatever it did; the ledger is charged before the sum is formed; the noise is drawn here, once. A
    client that does not answer, or whose answer is refused, adds zero, which moves no other client's part.
    **Edge cases.** A round in which nobody was picked, or nobody answered, releases noise alone.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        plan: Plan,
        optimizer: OptimizerChoice,
        scheduler: SchedulerChoice = None,
        evaluate: Evaluator | None = None,
        out: Path | str | None = None,
        resume: bool = False,
        seed: int | None = None,
        ema_decay: float | None = None,
        public_scores: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] = (),
        about: About = About(),  # noqa: B008
    ) -> None:
        check_federated(plan)
        found = find_run(out, resume, plan, replay=seed is not None)
        self._private = SystemRandomness() if seed is None else SeededRandomness(seed)
        public = public_randomness(seed, found)
        layout = Layout.of(model)
        scores = None if public_scores is None else PublicScores.of(public_scores)
        controller = Controller(plan, layout, public, Knowledge(lambda: layout.flatten(model), scores))
        rule = UpdateRule(optimizer, scheduler, ema_decay)
        self._learner = Learner(model, layout, controller, rule, plan.training_steps)
        setup = {"engine": "federated", "ema_decay": ema_decay, "rows_per_unit": None}
        facts = RunFacts(
            about=about,
            model_class=type(model).__name__,
            plan=plan,
            method=controller.method,
            layout=layout,
            seed=seed,
            public_seed=public.seed,
            setup={**self._learner.describe(), **setup},
            details=self._learner.details(),
        )
        self._keeper = RunKeeper(
            self._learner, facts, evaluate=evaluate, callbacks=callbacks, out=out, found=found
        )
        self._layout = layout
        self._measure: Callable[[Wire], int] = lambda wire: wire.size
        self._digest = model_digest(model, layout)
        self._coasts = controller.method.off_support is OffSupport.COASTS
        self._period, self._holders = 0, dict[int, int]()
        self._begun: Round | None = None

    @property
    def model(self) -> nn.Module:
        """The model as it is now."""
        return self._learner.model

    @property
    def is_done(self) -> bool:
        """Whether every planned round is."""
        return self.position >= self.plan.total_steps

    def count_bytes_by(self, measure: Callable[[Wire], int]) -> None:
        """Let the transport say how many bytes a message has; without it, those of its arrays are counted."""
        self._measure = measure

    def begin(self) -> Round:
        """Pick the clients of the next round and say what each is asked."""
        if self._begun is not None:
            raise SparseDPError(f"round {self._begun.step} has begun; complete it first")
        self._keeper.begin_step()
        step = self.position
        phase = self.plan.phase_at(step)
        setting = self._learner.controller.setting(step)
        if setting.change is not None and setting.change.prune:
            set_to_zero(self.model, self._layout, setting.change.left)
        if setting.change is not None or self._coasts:
            self._period += 1
        whole = self._task(step, phase, setting)
        light = (
            replace(whole, base=None, active=setting.support.gather(whole.base.weights))
            if whole.base
            else whole
        )
        picked = pick(self.plan.units, phase.sampling_rate, self._private, step)
        tasks = {number: light if self._holders.get(number) == self._period else whole for number in picked}
        self._begun = Round(step, tasks, setting, whole if self._coasts else light)
        return self._begun

    def complete(self, round_: Round, answers: Answers) -> RoundReport:
        """Sum what came back, pay, add the noise, move the model.

        Args:
            round_: the one that `begin` gave.
            answers: by client, a vector of integers, or the words of one that could not answer.
        """
        self._check(round_)
        sorted_out = sort_out(round_, answers)
        for refusal in sorted_out.refused:
            logger.warning("client %s, round %d: %s", refusal.client, round_.step + 1, refusal.why)
        self._remember(round_, sorted_out.updates)
        clip, grid = round_.task.clip, round_.task.grid
        query = UpdateSum(tuple(sorted_out.updates.values()), round_.task.size, clip, grid)
        report = self._release(round_, query)
        missing = tuple(number for number in round_.tasks if number not in answers)
        return RoundReport(report, sorted_out.refused, missing)

    def complete_aggregated(self, round_: Round, total: Tensor, answered: Sequence[int]) -> RoundReport:
        """The same from the sum alone, as secure aggregation gives it: each client is trusted to clip its own.

        Args:
            round_: the one that `begin` gave.
            total: the sum of the integers of all clients in `answered`.
            answered: whose updates are in it.
        """
        self._check(round_)
        if total.shape != (round_.task.size,) or total.dtype != torch.int64:
            raise SparseDPError(
                f"total: got {total.dtype} of shape {tuple(total.shape)}, expected int64 ({round_.task.size},)"
            )
        self._remember(round_, answered)
        report = self._release(round_, AggregatedUpdates(total, round_.task.clip, round_.task.grid))
        return RoundReport(report, (), tuple(n for n in round_.tasks if n not in set(answered)))

    def _task(self, step: int, phase: Phase, setting: StepSetting) -> Task:
        assert phase.clip_norm is not None
        return Task(
            run=self.plan.fingerprint,
            model=self._digest,
            step=step,
            period=self._period,
            active=None,
            base=Base(self._layout.flatten(self.model).cpu(), setting.support),
            size=setting.support.size,
            clip=FlatClip(phase.clip_norm),
            noise_multiplier=phase.noise_multiplier,
            geometry=setting.geometry,
            top=setting.per_sample_top,
        )

    def _release(self, round_: Round, query: BoundedSum) -> StepReport:
        phase, setting = self.plan.phase_at(round_.step), round_.setting
        released = private_mean(
            query,
            setting.support.size,
            expected_batch_size=self.plan.expected_batch_size(phase),
            charge=Charge(phase.name, round_.step, phase.sampling_rate, phase.noise_multiplier),
            ledger=self._keeper.ledger,
            randomness=self._private,
            support=setting.support,
            geometry=setting.geometry,
        )
        self._learn(released)
        self._begun = None
        ends_epoch = round_.step + 1 in self.plan.epoch_ends()
        return self._keeper.end_step(released, self._bytes(round_) if ends_epoch else {})

    def _learn(self, released: Released) -> None:
        self._learner.apply(released)
        self._learner.controller.observe(released)
        self._learner.after_step()

    def _remember(self, round_: Round, answered: Iterable[int]) -> None:
        """Who holds this period's weights from now on; one that could not answer may have lost them."""
        for number in round_.tasks:
            self._holders.pop(number, None)
        self._holders |= dict.fromkeys(answered, round_.task.period)

    def _bytes(self, round_: Round) -> dict[str, float]:
        task = round_.task
        update = torch.zeros(task.size, dtype=integers_for(task.grid))
        base = Base(self._layout.flatten(self.model).cpu(), round_.setting.support)
        whole = task if task.base is not None else replace(task, base=base, active=None)
        return {
            DOWN: float(self._measure(task.to_wire())),
            UP: float(self._measure(Wire({"update": update.numpy()}, {}))),
            REFRESH: float(self._measure(whole.to_wire())),
        }

    def _check(self, round_: Round) -> None:
        if round_ is not self._begun:
            raise SparseDPError("complete: got another round than the one that begin() gave last")


def check_federated(plan: Plan) -> None:
    """Refuse a plan that clients cannot run.

    Raises:
        PrivacyError: it is not private, or has releases that are not training.
    """
    if not plan.is_private:
        raise PrivacyError(
            f"{plan.method} protects nobody, and clients were promised protection; run the ablations centrally"
        )
    others = [phase.name for phase in plan.phases if not phase.trains or phase.count_share]
    if others:
        raise PrivacyError(
            f"the phases {others} release something else than updates, which clients are not asked for; choose a "
            "method without a selection or count of its own, and no normalise"
        )
