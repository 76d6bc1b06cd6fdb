"""Releases, layouts and plans for tests of methods."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsedp.methods.method import SELECT, Method, MethodOptions
from sparsedp.methods.plan_config import PlanConfig
from sparsedp.methods.scores import Knowledge
from sparsedp.methods.support_scheduler import StepSetting, SupportScheduler
from sparsedp.parameters import ParameterLayout, ParameterSlice, Support
from sparsedp.privacy.mechanism import _SEAL, Release
from sparsedp.privacy.plan import Plan
from sparsedp.randomness import PublicRandomness


def layout_of(*shapes: tuple[int, ...]) -> ParameterLayout:
    """A layout with parameters p0, p1, ... of these shapes."""
    slots, offset = [], 0
    for number, shape in enumerate(shapes):
        slots.append(ParameterSlice(f"p{number}", shape, offset))
        offset += slots[-1].size
    return ParameterLayout(tuple(slots))


def known_of(layout: ParameterLayout) -> Knowledge:
    """Weights 0, 1, 2, ...: public, and the same for all."""
    return Knowledge(lambda: torch.arange(layout.dimension, dtype=torch.float64))


def begun(
    plan: Plan,
    layout: ParameterLayout,
    public: PublicRandomness = PublicRandomness(5),  # noqa: B008
) -> SupportScheduler:
    """A controller after its selection, if it has one, on made-up counts."""
    controller = SupportScheduler(plan, layout, public, known_of(layout))
    if controller.tables is not None and SELECT in controller.method.stages:
        total = controller.tables.total
        counts = torch.from_numpy(np.random.default_rng(7).standard_normal(total))
        controller.observe_selection(release(Support.full(total), counts, 0.1, phase="select"))
    return controller


def release(
    support: Support, mean: Tensor, noise_scale: Tensor | float = 1.0, *, step: int = 0, phase: str = "main"
) -> Release:
    """A release made by nobody's mechanism, of whatever values the test wants."""
    scale = (
        noise_scale if isinstance(noise_scale, Tensor) else torch.full((support.size,), float(noise_scale))
    )
    return Release(
        support=support,
        mean=mean.double(),
        noise_scale=scale.double(),
        phase=phase,
        step=step,
        publishable=False,
        seal=_SEAL,
    )


def plan_of(
    method: Method,
    options: MethodOptions | None = None,
    *,
    epochs: int = 4,
    steps_per_epoch: int = 5,
    noise: float = 1.0,
    warmup_fraction: float = 0.3,
    clip_norm: float = 1.0,
) -> Plan:
    """A plan of any method with made-up noise, for 10 expected units a batch; its training phases alone."""
    plan = PlanConfig.asked(
        method,
        options,
        units=10 * steps_per_epoch,
        batch_size=10,
        epochs=epochs,
        max_grad_norm=clip_norm,
        warmup_fraction=warmup_fraction,
    ).draft()
    plan = dataclasses.replace(plan, phases=plan.training)
    return plan.with_noise({phase.name: noise for phase in plan.phases})


def random_release(seed: int, step: int, setting: StepSetting, phase: str = "main") -> Release:
    """A release that depends on nothing but the seed, the step and the public setting."""
    mean = torch.from_numpy(np.random.default_rng([seed, step]).standard_normal(setting.support.dimension))
    scale = setting.geometry.noise_scale(0.1, setting.support.size)
    return release(setting.support, setting.support.gather(mean), scale, step=step, phase=phase)


@dataclass
class Run:
    """A method run over its plan on made-up releases."""

    controller: SupportScheduler
    plan: Plan
    settings: list[StepSetting]

    @property
    def sizes(self) -> list[int]:
        return [setting.support.size for setting in self.settings]


def run(
    method: Method,
    options: MethodOptions | None = None,
    *,
    layout: ParameterLayout | None = None,
    seed: int = 0,
    make: Callable[[int, int, StepSetting], Release] = random_release,
    **plan_settings: float,
) -> Run:
    """Every step of a plan, on releases from `make(seed, step, setting)`."""
    layout = layout or layout_of((6, 7), (6,), (3, 6), (3,))
    plan = plan_of(method, options, **plan_settings)
    controller = begun(plan, layout)
    settings = []
    for step in range(plan.total_steps):
        settings.append(controller.begin_step(step))
        controller.update(make(seed, step, settings[-1]))
    return Run(controller, plan, settings)
