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
    - changes of the support say exactly which coordinates left and entered.

    Raises:
        AssertionError: which rule is broken, and at which step.
    """
    method = get_method(method) if isinstance(method, str) else method
    _check_row(method)
    _check_plan(method)
    whole = _Run(method, seed=1)
    _check_changes(method, whole)
    _check_warm_up(method, whole)
    again = _Run(method, seed=1)
    for step, (one, other) in enumerate(zip(whole.settings, again.settings, strict=True)):
        assert one.support == other.support, (
            f"{method.name}: step {step}: the same releases gave another support"
        )
    for cut in {1, len(whole.settings) // 3, len(whole.settings) // 2, len(whole.settings) - 1}:
        _check_resume(method, whole, cut)


class _Run:
    """A method run over its plan on releases that depend on seed, step and public setting alone."""

    def __init__(self, method: Method, seed: int) -> None:
        self.seed, self.plan = seed, plan_for(method)
        self.controller = _begun(self.plan)
        self.settings = [self.step(self.controller, step) for step in range(self.plan.total_steps)]

    def step(self, controller: SupportScheduler, step: int) -> StepSetting:
        """One step with a made-up release."""
        setting = controller.begin_step(step)
        mean = torch.randn(LAYOUT.dimension, generator=_generator(self.seed, step), dtype=torch.float64)
        scale = setting.geometry.noise_scale(0.1, setting.support.size)
        controller.update(made_up_release(setting.support, setting.support.gather(mean), scale, step))
        return setting


def plan_for(method: Method) -> Plan:
    """A calibrated plan of the method for made-up data; its training phases alone."""
    plan = _config(method).plan()
    return replace(plan, phases=plan.training)


def _config(method: Method) -> PlanConfig:
    batch_size = UNITS // STEPS_PER_EPOCH
    return PlanConfig.asked(
        method, units=UNITS, batch_size=batch_size, epochs=EPOCHS, epsilon=EPSILON, delta=DELTA
    )


def _check_row(method: Method) -> None:
    values = method.to_json()
    assert json.loads(json.dumps(values)) == values, f"{method.name}: to_json gives values that JSON changes"
    assert Method.from_json(values) == method, f"{method.name}: from_json(to_json) is another method"


def _check_plan(method: Method) -> None:
    plan = _config(method).plan()
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan, (
        f"{method.name}: its plan changes in JSON"
    )
    spent = plan_epsilon(plan)
    assert spent <= EPSILON, f"{method.name}: its plan spends epsilon {spent}, asked for {EPSILON}"
    ends = plan.first_step(plan.training[0].name) + sum(phase.steps for phase in plan.training)
    assert plan.training_steps == sum(phase.steps for phase in plan.training) <= ends


def _check_changes(method: Method, run: _Run) -> None:
    before = Support.full(LAYOUT.dimension)
    for step, setting in enumerate(run.settings):
        change = setting.change
        assert setting.support.dimension == LAYOUT.dimension
        if change is None:
            assert setting.support == before, (
                f"{method.name}: step {step}: the support changed without a change"
            )
        else:
            left, entered = change.left.mask(), change.entered.mask()
            moved = (before.mask() & ~left) | entered
            wrong = (entered & before.mask()) | (left & ~before.mask()) | (moved ^ setting.support.mask())
            assert not bool(wrong.any()), f"{method.name}: step {step}: left and entered are wrong"
            assert change.off_support is method.off_support
        before = setting.support


def _check_warm_up(method: Method, run: _Run) -> None:
    main = run.plan.first_step(run.plan.training[-1].name)
    for step, setting in enumerate(run.settings[:main]):
        assert setting.geometry == Identity(), (
            f"{method.name}: step {step}: a warm-up clips gradients as they are"
        )
        assert setting.per_sample_top is None


def _check_resume(method: Method, whole: _Run, cut: int) -> None:
    first = _begun(whole.plan)
    for step in range(cut):
        whole.step(first, step)
    saved = first.state()
    second = _begun(whole.plan)
    second.restore(SchedulerState(load(save(dict(saved.tensors))), json.loads(json.dumps(saved.values))))
    for step in range(cut, whole.plan.total_steps):
        resumed = whole.step(second, step)
        expected = whole.settings[step]
        same = resumed.support == expected.support and (resumed.change is None) == (expected.change is None)
        assert same, f"{method.name}: resumed at {cut}, step {step} differs"
    one, other = second.state(), whole.controller.state()
    same = one.tensors.keys() == other.tensors.keys() and all(
        torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors
    )
    assert (same, one.values) == (True, other.values), (
        f"{method.name}: resumed at {cut}, it ends in another state"
    )


def _begun(plan: Plan) -> SupportScheduler:
    """A scheduler after its selection, if it has one, on made-up counts."""
    known = Knowledge(lambda: torch.arange(LAYOUT.dimension, dtype=torch.float64))
    controller = SupportScheduler(plan, LAYOUT, PublicRandomness(5), known)
    if controller.tables is not None and SELECT in controller.method.stages:
        total = controller.tables.total
        counts = torch.randn(total, generator=_generator(7, 0), dtype=torch.float64)
        scale = torch.full((total,), 0.1, dtype=torch.float64)
        controller.observe_counts(made_up_release(Support.full(total), counts, scale, 0))
    return controller


def _generator(seed: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * seed + step)


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
