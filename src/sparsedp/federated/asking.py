"""What the server asks of the clients in each round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

from torch import nn

from sparsedp.clipping import FlatClip, Identity
from sparsedp.federated.rounds import Round
from sparsedp.federated.task import CountAsked, Task
from sparsedp.federated.weights import model_digest
from sparsedp.methods import Controller
from sparsedp.optimizers.sparse import change_weights
from sparsedp.parameters import Layout, Support
from sparsedp.privacy.plan import Phase, Plan


@final
class Asking:
    """Makes the tasks of a run's rounds: all weights and the support, every time, as clients keep nothing."""

    def __init__(self, plan: Plan, model: nn.Module, layout: Layout, controller: Controller) -> None:
        self._plan, self._model, self._layout, self._controller = plan, model, layout, controller
        self._digest = model_digest(model, layout)

    def counts(self, phase: Phase) -> bool:
        """Whether a step of this phase asks for a count: before it trains, or instead."""
        tables = self._controller.tables
        return not phase.trains or bool(phase.count_share and tables is not None and tables.total)

    def counting(self, step: int, phase: Phase, picked: Sequence[int]) -> Round:
        """Ask which rows of tables a client touches: for a selection, or for this step's rows."""
        tables = self._controller.tables
        assert tables is not None
        task = self._task(
            step,
            Support.full(self._layout.dimension),
            tables.total,
            clip=FlatClip(1.0) if phase.trains else clip_of(phase),
            noise_multiplier=phase.count_noise if phase.trains else phase.noise_multiplier,
        )
        return Round(step, picked, None, replace(task, asked=CountAsked(tuple(s.name for s in tables.slots))))

    def training(self, step: int, phase: Phase, picked: Sequence[int]) -> Round:
        """Ask for updates."""
        setting = self._controller.setting(step)
        if setting.change is not None:
            change_weights(self._model, self._layout, setting.change)
        task = replace(
            self._task(step, setting.support, setting.support.size, clip_of(phase), phase.gradient_noise),
            geometry=setting.geometry,
            top=setting.per_sample_top,
        )
        return Round(step, picked, setting, task)

    def _task(self, step: int, support: Support, size: int, clip: FlatClip, noise_multiplier: float) -> Task:
        return Task(
            run=self._plan.fingerprint,
            model=self._digest,
            step=step,
            weights=self._layout.flatten(self._model).cpu(),
            support=support,
            size=size,
            clip=clip,
            noise_multiplier=noise_multiplier,
            geometry=Identity(),
            top=None,
        )


def clip_of(phase: Phase) -> FlatClip:
    """A private phase's clip."""
    assert phase.clip_norm is not None
    return FlatClip(phase.clip_norm)
