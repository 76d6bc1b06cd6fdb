"""The server's part: pick clients, ask them, sum their integers, pay, add the noise, learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, final

from torch import nn

from sparsedp.clipping import Identity
from sparsedp.errors import PrivacyError, SparseDPError
from sparsedp.evaluation import Evaluator
from sparsedp.federated.asking import Asking
from sparsedp.federated.picking import pick
from sparsedp.federated.replies import Answers, sort_out
from sparsedp.federated.rounds import Round, RoundReport, Step
from sparsedp.methods.method import SELECT
from sparsedp.optimizers.factory import OptimizerChoice, SchedulerChoice
from sparsedp.parameters import Layout, Support
from sparsedp.privacy.ledger import Charge, SharedCharge
from sparsedp.privacy.mechanism import GaussianMechanism, Release
from sparsedp.privacy.plan import Plan
from sparsedp.privacy.queries import BoundedSum, ClientUpdateSum
from sparsedp.randomness import SeededRandomness, SystemRandomness
from sparsedp.ranks.here import refuse_ranks
from sparsedp.results import Callback, StepReport
from sparsedp.runs.directory import find_run
from sparsedp.runs.record import RunMetadata
from sparsedp.training.recorder import RunKeeper, facts_of, public_randomness
from sparsedp.training.state import Learner, UpdateRule
from sparsedp.training.step import COUNT
from sparsedp.training.trainer import KeptRun


@final
class FederatedTrainer(KeptRun):
    """A run over rounds: `begin()`, carry the tasks to the clients, `complete(round, answers)`, `finish()`.

    Args:
        model: trained in place.
        plan: from `build_plan(method, units=number of clients, unit="client")`; a step is a round, or two where the
            method counts rows in every step.
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
        about: RunMetadata = RunMetadata(),  # noqa: B008
    ) -> None:
        refuse_ranks("a federated run's server")
        check_federated(plan)
        found = find_run(out, resume, plan, replay=seed is not None)
        self._private = SystemRandomness() if seed is None else SeededRandomness(seed)
        public = public_randomness(seed, found)
        layout = Layout.of(model)
        rule = UpdateRule(optimizer, scheduler, ema_decay, public_scores=public_scores)
        self._learner = Learner(model, layout, plan, public, rule)
        setup = {"engine": "federated", "ema_decay": ema_decay, "rows_per_unit": None}
        facts = facts_of(self._learner, plan, about, seed=seed, public_seed=public.seed, setup=setup)
        self._keeper = RunKeeper(
            self._learner, facts, evaluate=evaluate, callbacks=callbacks, out=out, found=found
        )
        self._asking = Asking(plan, model, layout, self._learner.controller)
        self._begun: Round | None = None
        self._step: Step | None = None

    @property
    def model(self) -> nn.Module:
        """The model as it is now."""
        return self._learner.model

    @property
    def is_done(self) -> bool:
        """Whether every planned step is."""
        return self.position >= self.plan.total_steps

    @property
    def rounds_left(self) -> int:
        """How many rounds are still to come, one that has begun among them."""
        phases = [self.plan.phase_at(step) for step in range(self.position, self.plan.total_steps)]
        twice = sum(phase.trains and self._asking.counts(phase) for phase in phases)
        return len(phases) + twice - int(self._step is not None and self._step.counted)

    def begin(self) -> Round:
        """Pick the clients of the next round and say what each is asked.

        **Privacy.** The two rounds of a step that counts rows have the same clients: its one charge covers both
        releases of those.
        """
        if self._begun is not None:
            raise SparseDPError(f"round {self._begun.step} has begun; complete it first")
        phase = self.plan.phase_at(self.position)
        if self._step is None:
            self._keeper.begin_step()
            charge = Charge(phase.name, self.position, phase.sampling_rate, phase.noise_multiplier)
            drawn = pick(self.plan.units, phase.sampling_rate, self._private, self.position)
            self._step = Step(drawn, SharedCharge(self._keeper.ledger, charge))
        picked = self._step.picked
        if self._asking.counts(phase) and not self._step.counted:
            self._begun = self._asking.counting(self.position, phase, picked)
        else:
            self._begun = self._asking.training(self.position, phase, picked)
        return self._begun

    def complete(self, round_: Round, answers: Answers) -> RoundReport:
        """Sum what came back, pay, add the noise, move the model.

        Args:
            round_: the one that `begin` gave.
            answers: by client, a vector of integers, or the words of one that could not answer.
        """
        self._check(round_)
        sorted_out = sort_out(round_, answers)
        clip, grid = round_.task.clip, round_.task.grid
        setting = round_.setting
        support = Support.full(round_.task.size) if setting is None else setting.support
        geometry = Identity() if setting is None else setting.geometry
        updates = tuple(sorted_out.updates.values())
        report = self._release(round_, ClientUpdateSum(updates, support, clip, grid, geometry))
        missing = tuple(number for number in round_.clients if number not in answers)
        return RoundReport(report, sorted_out.refused, missing)

    def _release(self, round_: Round, query: BoundedSum) -> StepReport | None:
        phase, step = self.plan.phase_at(round_.step), self._step
        assert step is not None
        setting, in_step = round_.setting, round_.setting is None and phase.trains
        noise, number = round_.task.noise_multiplier, COUNT if in_step else 0
        released = GaussianMechanism(step.paid, self._private).release(
            query,
            Charge(phase.name, round_.step, phase.sampling_rate, noise, number),
            expected_batch_size=self.plan.expected_batch_size(phase),
        )
        self._begun, self._step = None, None
        if setting is not None:
            return self._learn(released)
        if in_step:
            self._learner.controller.observe_counts(released)
            self._step = replace(step, counted=True)
        else:
            self._learner.controller.observe_selection(released)
            self._keeper.end_preliminary(phase.steps)
        return None

    def _learn(self, released: Release) -> StepReport:
        """Move the model by the mean of the updates, with noise."""
        self._learner.apply(released)
        self._learner.controller.observe(released)
        self._learner.after_step()
        return self._keeper.end_step(released)

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
    others = [phase.name for phase in plan.phases if not phase.trains and phase.name != SELECT.name]
    if others:
        raise PrivacyError(
            f"the phases {others} release statistics of the inputs, which clients are not asked for; leave out "
            "normalise, and scale the inputs at the clients, by public numbers"
        )
