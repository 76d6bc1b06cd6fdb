"""What is audited: a plan, a model and a data set, through the code that would train them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from sparsedp.batch import PerSampleLoss
from sparsedp.core.clip import Clip
from sparsedp.core.geometry import Geometry
from sparsedp.grad_sample import make_engine
from sparsedp.grad_sample.query import Engine
from sparsedp.methods import Controller, Knowledge
from sparsedp.parameters import Layout, Support
from sparsedp.privacy.plan import Phase, Plan
from sparsedp.randomness import PublicRandomness
from sparsedp.sampling.loading import Loading
from sparsedp.training.normalised import Normalised


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Subject:
    """Everything a run would be made of.

    Attributes:
        model: the user's; never moved.
        dataset: the user's.
        loss: one loss per row.
        plan: what is claimed.
        loading: units and how rows become batches.
        engine: the engine's name.
    """

    model: nn.Module
    dataset: Dataset[Any]
    loss: PerSampleLoss
    plan: Plan
    loading: Loading
    engine: str

    def make_engine(self) -> Engine:
        """The engine that would train the model, without the checks that come before training."""
        return make_engine(self.model, self.loss, self.engine)

    def controller(self, layout: Layout) -> Controller:
        """The method at work on this plan, with fresh public randomness."""
        known = Knowledge(lambda: layout.flatten(self.model))
        return Controller(self.plan, layout, PublicRandomness.fresh(), known)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases that train."""
        return self.plan.training

    @property
    def channels(self) -> int:
        """Of the inputs, where the plan measures them; else none."""
        return self.model.centre.numel() if isinstance(self.model, Normalised) else 0

    @property
    def rows(self) -> int:
        """Of the data set."""
        return len(self.dataset)  # type: ignore[arg-type]

    def some_steps(self, most: int) -> list[int]:
        """About so many steps that train, spread evenly, the first and last of each phase among them; all others."""
        chosen: set[int] = set()
        for phase in self.plan.phases:
            first = self.plan.first_step(phase.name)
            share = max(2, most * phase.steps // self.plan.training_steps) if phase.trains else phase.steps
            chosen |= set(
                np.unique(np.linspace(first, first + phase.steps - 1, share).round()).astype(int).tolist()
            )
        return sorted(chosen)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """What a step of some phase asks of the mechanism."""

    phase: Phase
    step: int
    support: Support
    geometry: Geometry
    per_sample_top: float | None

    @property
    def clip(self) -> Clip:
        """The phase's."""
        return self.phase.clip


def device_of(model: nn.Module) -> torch.device:
    """Where the model lives."""
    return next(model.parameters()).device
