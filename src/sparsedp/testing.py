"""Conformance checks for one's own methods: `check_method(method)` raises AssertionError where a rule is broken."""

from __future__ import annotations

import json
from dataclasses import replace

import torch
from safetensors.torch import load, save
from torch import Tensor

from sparsedp.clipping import Identity
from sparsedp.methods.catalog import get_method
from sparsedp.methods.method import SELECT, Method
from sparsedp.methods.plan_config import PlanConfig
from sparsedp.methods.public_scores import Knowledge
from sparsedp.methods.support_scheduler import SchedulerState, StepSetting, SupportScheduler
from sparsedp.parameters import ParameterLayout, ParameterSlice, Support
from sparsedp.privacy.accounting import plan_epsilon
from sparsedp.privacy.mechanism import _SEAL, Release
from sparsedp.privacy.plan import Plan
from sparsedp.randomness import PublicRandomness

UNITS, EPOCHS, STEPS_PER_EPOCH = 50, 4, 5
EPSILON, DELTA = 2.0, 1e-5
LAYOUT = ParameterLayout(
    (
        ParameterSlice("0.weight", (6, 7), 0),
        ParameterSlice("0.bias", (6,), 42),
        ParameterSlice("1.weight", (3, 6), 48),
        ParameterSlice("1.bias", (3,), 66),
    )
)


def check_method(method: Method | str) -> None:
    """Put a method through what every method of the library is tested for.

    It is run over a plan on made-up releases, on the layout of a network with two linear layers:

    - its plan spends at most the epsilon asked for, and every training step belongs to one of its stages;
    - its row survives JSON, and a run that is saved and resumed at any step goes on as if it had never stopped;
    - supports follow from releases and public randomness alone: the same releases give the same supports;
    - a warm-up is dense and clips gradients as they are;
    - changes of the support are told.

    Raises:
        AssertionError: which rule is broken, and at which step.
    """
    method = get_method(method) if isinstance(method, str) else method
    _check_plan(method)
    whole, again = _Run(method), _Run(method)
    _check_settings(method, whole)
    for step, (one, other) in enumerate(zip(whole.settings, again.settings, strict=True)):
        assert one.support == other.support, (
            f"{method.name}: step {step}: the same releases gave another support"
        )
    for cut in {1, len(whole.settings) // 3, len(whole.settings) // 2, len(whole.settings) - 1}:
        _check_resume(method, whole, cut)


class _Run:
    """A method run over the training phases of its plan, on releases that depend on step and public setting alone."""

    def __init__(self, method: Method) -> None:
        plan = _config(method).plan()
        self.plan = replace(plan, phases=plan.training)
        self.controller = self.begun()
        self.settings = [self.step(self.controller, step) for step in range(self.plan.total_steps)]

    def begun(self) -> SupportScheduler:
        """A scheduler after its selection, if it has one, on made-up counts."""
        known = Knowledge(lambda: torch.arange(LAYOUT.dimension, dtype=torch.float64))
        controller = SupportScheduler(self.plan, LAYOUT, PublicRandomness(5), known)
        if controller.tables is not None and SELECT in controller.method.stages:
            everything = Support.full(controller.tables.total)
            counts = _numbers(everything.size, 0)
            controller.observe_counts(made_up_release(everything, counts, torch.full_like(counts, 0.1), 0))
        return controller

    def step(self, controller: SupportScheduler, step: int) -> StepSetting:
        """One step with a made-up release."""
        setting = controller.begin_step(step)
        mean = setting.support.gather(_numbers(LAYOUT.dimension, step))
        scale = setting.geometry.noise_scale(0.1, setting.support.size)
        controller.update(made_up_release(setting.support, mean, scale, step))
        return setting


def _config(method: Method) -> PlanConfig:
    batch_size = UNITS // STEPS_PER_EPOCH
    return PlanConfig.asked(
        method, units=UNITS, batch_size=batch_size, epochs=EPOCHS, epsilon=EPSILON, delta=DELTA
    )


def _check_plan(method: Method) -> None:
    values = method.to_json()
    assert json.loads(json.dumps(values)) == values, f"{method.name}: to_json gives values that JSON changes"
    assert Method.from_json(values) == method, f"{method.name}: from_json(to_json) is another method"
    plan = _config(method).plan()
    read = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert read == plan, f"{method.name}: its plan changes in JSON"
    spent = plan_epsilon(plan)
    assert spent <= EPSILON, f"{method.name}: its plan spends epsilon {spent}, asked for {EPSILON}"


def _check_settings(method: Method, run: _Run) -> None:
    before, main = Support.full(LAYOUT.dimension), run.plan.first_step(run.plan.training[-1].name)
    for step, setting in enumerate(run.settings):
        where, change, after = f"{method.name}: step {step}", setting.change, setting.support
        if change is None:
            assert after == before, f"{where}: the support changed without a change"
        else:
            told = (change.before, change.after, change.off_support)
            assert told == (before, after, method.off_support), f"{where}: the change is another one"
        if step < main:
            plain = (setting.geometry, setting.per_sample_top) == (Identity(), None)
            assert plain, f"{where}: a warm-up clips gradients as they are"
        before = after


def _check_resume(method: Method, whole: _Run, cut: int) -> None:
    first, second = whole.begun(), whole.begun()
    for step in range(cut):
        whole.step(first, step)
    saved = first.state()
    second.restore(SchedulerState(load(save(dict(saved.tensors))), json.loads(json.dumps(saved.values))))
    for step in range(cut, whole.plan.total_steps):
        resumed, expected = whole.step(second, step), whole.settings[step]
        same = resumed.support == expected.support and (resumed.change is None) == (expected.change is None)
        assert same, f"{method.name}: resumed at {cut}, step {step} differs"
    one, other = second.state(), whole.controller.state()
    same = one.tensors.keys() == other.tensors.keys() and one.values == other.values
    same = same and all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)
    assert same, f"{method.name}: resumed at {cut}, it ends in another state"


def _numbers(count: int, seed: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def made_up_release(support: Support, mean: Tensor, scale: Tensor, step: int) -> Release:
    """A release of made-up numbers, which no mechanism made and which is not publishable."""
    return Release(
        support=support,
        mean=mean.double(),
        noise_scale=scale.double(),
        phase="made up",
        step=step,
        publishable=False,
        seal=_SEAL,
    )
