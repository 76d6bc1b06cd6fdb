"""What the server asks in each round, and of whom: tasks by client, and who holds which weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import final

from torch import nn

from sparsedp.core.clip import FlatClip
from sparsedp.core.geometry import Identity
from sparsedp.core.layout import Layout
from sparsedp.core.support import Support
from sparsedp.federated.rounds import Round
from sparsedp.federated.task import Base, CountAsked, Task
from sparsedp.federated.weights import model_digest
from sparsedp.methods import Controller, OffSupport
from sparsedp.optimizers.apply import set_to_zero
from sparsedp.privacy.plan import Phase, Plan


@final
class Asking:
    """Makes the tasks of a run's rounds. A client that holds the present weights is sent what has changed alone."""

    def __init__(self, plan: Plan, model: nn.Module, layout: Layout, controller: Controller) -> None:
        self._plan, self._model, self._layout, self._controller = plan, model, layout, controller
        self._digest = model_digest(model, layout)
        self._coasts = controller.method.off_support is OffSupport.COASTS
        self._period = 0
        self._holders: dict[int, int] = {}

    def counts(self, phase: Phase) -> bool:
        """Whether a step of this phase asks for a count: before it trains, or instead."""
        tables = self._controller.tables
        return not phase.trains or bool(phase.count_share and tables is not None and tables.total)

    def counting(self, step: int, phase: Phase, picked: Sequence[int]) -> Round:
        """Ask which rows of tables a client touches: for a selection, or for this step's rows."""
        tables = self._controller.tables
        assert tables is not None
        self._period += 1
        task = self._task(
            step,
            self.base(Support.full(self._layout.dimension)),
            tables.total,
            clip=FlatClip(1.0) if phase.trains else clip_of(phase),
            noise_multiplier=phase.count_noise if phase.trains else phase.noise_multiplier,
        )
        task = replace(task, asked=CountAsked(tuple(slot.name for slot in tables.slots)))
        return Round(step, dict.fromkeys(picked, task), None, task)

    def training(self, step: int, phase: Phase, picked: Sequence[int], *, counted: bool) -> Round:
        """Ask for updates; `counted` if a round of the same step has just handed out all weights."""
        setting = self._controller.setting(step)
        prunes = setting.change is not None and setting.change.prune
        if setting.change is not None and prunes:
            set_to_zero(self._model, self._layout, setting.change.left)
        if prunes or (not counted and (setting.change is not None or self._coasts)):
            self._period += 1
        base = self.base(setting.support)
        whole = replace(
            self._task(step, base, setting.support.size, clip_of(phase), phase.gradient_noise),
            geometry=setting.geometry,
            top=setting.per_sample_top,
        )
        if counted and not prunes:
            light = replace(whole, base=None, moved=setting.support.indices)
        else:
            light = replace(whole, base=None, active=setting.support.gather(base.weights))
        tasks = {number: light if self._holders.get(number) == self._period else whole for number in picked}
        return Round(step, tasks, setting, whole if self._coasts and not counted else light)

    def remember(self, round_: Round, answered: Iterable[int]) -> None:
        """Who holds this period's weights from now on; one that could not answer may have lost them."""
        for number in round_.tasks:
            self._holders.pop(number, None)
        self._holders |= dict.fromkeys(answered, round_.task.period)

    def base(self, support: Support) -> Base:
        """All weights as they are now."""
        return Base(self._layout.flatten(self._model).cpu(), support)

    def _task(self, step: int, base: Base, size: int, clip: FlatClip, noise_multiplier: float) -> Task:
        return Task(
            run=self._plan.fingerprint,
            model=self._digest,
            step=step,
            period=self._period,
            active=None,
            base=base,
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
