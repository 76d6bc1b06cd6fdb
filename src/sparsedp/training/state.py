"""`Learner`: model, optimizer, scheduler, average and support controller as one saved state."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer

from sparsedp._files import Json
from sparsedp.evaluation import evaluation_mode
from sparsedp.methods import (
    Knowledge,
    OffSupport,
    PublicScores,
    SchedulerState,
    SupportChange,
    SupportScheduler,
)
from sparsedp.optimizers.ema import WeightAverage
from sparsedp.optimizers.factory import (
    OptimizerChoice,
    SchedulerChoice,
    make_optimizer,
    make_scheduler,
    restore_scheduler,
    scheduler_state,
)
from sparsedp.optimizers.sparse import SupportOptimizer, change_weights
from sparsedp.parameters import ParameterLayout, Support
from sparsedp.privacy.mechanism import Release
from sparsedp.privacy.plan import Plan
from sparsedp.randomness import PublicRandomness
from sparsedp.runs.checkpoint import Checkpoint, load_model_state


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """How releases move the weights.

    Attributes:
        optimizer: moves them.
        scheduler: moves its learning rate, every step.
        ema_decay: of a running average of the weights, if one is kept.
        public_scores: what the ranking `given` goes by, as users give them.
    """

    optimizer: OptimizerChoice
    scheduler: SchedulerChoice = None
    ema_decay: float | None = None
    public_scores: Mapping[str, Any] | None = None


@final
class Learner:
    """Everything that a release moves, and nothing that sees data.

    Attributes:
        setup: optimizer and scheduler as they were given, for the record.
        details: what else of them decides the training: a run resumes with the same alone.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: ParameterLayout,
        plan: Plan,
        public: PublicRandomness,
        rule: OptimizerConfig,
    ) -> None:
        self.model, self.layout = model, layout
        scores = None if rule.public_scores is None else PublicScores.of(rule.public_scores)
        known = Knowledge(lambda: layout.flatten(model), scores)
        self.controller = SupportScheduler(plan, layout, public, known)
        self._optimizer = make_optimizer(rule.optimizer, model)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        members: list[Json] = [
            [names.get(id(p)) for p in group["params"]] for group in self._optimizer.param_groups
        ]
        coasts = self.controller.method.off_support is OffSupport.COASTS
        self.applier = SupportOptimizer(model, layout, self._optimizer, coasts=coasts)
        self._scheduler = make_scheduler(rule.scheduler, self._optimizer, plan.training_steps)
        decay = rule.ema_decay
        self._average = None if decay is None else WeightAverage(model, layout, decay)
        if self._average is not None and coasts:
            self._average.follow(Support.full(layout.dimension))
        self._closed, self._made_optimizer = False, not isinstance(rule.optimizer, Optimizer)
        groups = [{n: v for n, v in one.items() if n != "params"} for one in self._optimizer.param_groups]
        self.setup: dict[str, Json] = {
            "optimizer": {"class": type(self._optimizer).__name__, "groups": plain(groups)},
            "scheduler": None if self._scheduler is None else type(self._scheduler).__name__,
        }
        schedule = plain(scheduler_state(self._scheduler))
        self.details: dict[str, Json] = {"schedule": schedule, "parameters": members}

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """One per parameter group, for the next step."""
        return tuple(float(group["lr"]) for group in self._optimizer.param_groups)

    def enter(self, change: SupportChange) -> None:
        """Change the weights as a change of support asks; an average of them begins again where they were shrunk."""
        change_weights(self.model, self.layout, change)
        if change.shrinkage is not None and self._average is not None:
            self._average.begin_again()

    def apply(self, released: Release) -> None:
        """Move the support by a release."""
        if self._average is not None:
            self._average.follow(released.support)
        self.applier.apply(released)

    def after_step(self) -> None:
        """Move the schedule and the average."""
        if self._scheduler is not None:
            self._scheduler.step()
        if self._average is not None:
            self._average.update()

    def skip(self, steps: int) -> None:
        """Let the schedule pass over steps that were lost."""
        if self._scheduler is None:
            return
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="Detected call of `lr_scheduler.step", category=UserWarning
            )
            for _ in range(steps):
                self._scheduler.step()

    @contextmanager
    def evaluated(self) -> Iterator[nn.Module]:
        """The model to evaluate, in evaluation mode, averaged if asked; then all is as before."""
        averaged = nullcontext() if self._average is None else self._average.in_place()
        with evaluation_mode(self.model), averaged:
            yield self.model

    def install_average(self) -> None:
        """Leave the averaged weights, if they were asked for, in the model."""
        if self._average is not None:
            self._average.install()

    def state(self) -> dict[str, Any]:
        """All of it, between two steps."""
        controller = self.controller.state()
        return {
            "model": self.model.state_dict(),
            "optimizer": self.applier.state(),
            "scheduler": scheduler_state(self._scheduler),
            "average": None if self._average is None else self._average.state(),
            "controller": {"tensors": dict(controller.tensors), "values": dict(controller.values)},
        }

    def optimizer_state_dict(self) -> dict[str, Any]:
        """The state of the optimizer over all coordinates, as `torch.optim` has it; fresh off the support."""
        with self._handed_back() as optimizer:
            return optimizer.state_dict()

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a state over all coordinates; it is dropped off the support."""
        with self._handed_back() as optimizer:
            optimizer.load_state_dict(dict(state))

    @contextmanager
    def _handed_back(self) -> Iterator[Optimizer]:
        """The optimizer over the model's own parameters; behind the support again afterwards if the run goes on."""
        self.applier.hand_back()
        try:
            yield self._optimizer
        finally:
            if not self._closed:
                self.applier.enter(self.controller.support)

    def hand_back(self) -> None:
        """Leave the optimizer as it was given, for good; one that was made here goes with its state."""
        self._closed = True
        if self._made_optimizer:
            self._optimizer.state.clear()
        self.applier.hand_back()

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint of the same run."""
        load_model_state(self.model, checkpoint)
        saved = checkpoint.state
        restore_scheduler(self._scheduler, saved["scheduler"])
        if self._average is not None and saved["average"] is not None:
            self._average.restore(saved["average"])
        self.controller.restore(SchedulerState(**saved["controller"]))
        self.applier.restore(saved["optimizer"], self.controller.support)


def plain(value: Any) -> Json:
    """The part of a nested value that JSON can say; functions and large tensors are left out."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items() if _sayable(item)}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value if _sayable(item)]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value.item() if isinstance(value, Tensor) else value


def _sayable(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return value is None or isinstance(value, (bool, int, float, str, list, tuple, dict))
