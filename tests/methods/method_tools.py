"""Releases, layouts and plans for tests of methods; and a drive through the real mechanism."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oracles.papers import TinyNetwork
from sparsedp.batch import MicroBatch
from sparsedp.clipping import FlatClip
from sparsedp.grad_sample.query import ClippedSumQuery, sum_clipped_rows
from sparsedp.methods.method import SELECT, Method, OffSupport
from sparsedp.methods.plan_config import PlanConfig
from sparsedp.methods.public_scores import Knowledge
from sparsedp.methods.support_scheduler import StepSetting, SupportScheduler
from sparsedp.parameters import ParameterLayout, ParameterSlice, Support
from sparsedp.privacy.charge import Charge, ChargeLog
from sparsedp.privacy.mechanism import GaussianMechanism, Release
from sparsedp.privacy.plan import Plan
from sparsedp.privacy.queries import GradientSum
from sparsedp.randomness import PrivateRandomness, PublicRandomness
from sparsedp.testing import made_up_release


def layout_of(*shapes: tuple[int, ...]) -> ParameterLayout:
    """A layout with parameters p0, p1, ... of these shapes."""
    slots, offset = [], 0
    for number, shape in enumerate(shapes):
        slots.append(ParameterSlice(f"p{number}", shape, offset))
        offset += slots[-1].size
    return ParameterLayout(tuple(slots))


def begun(
    plan: Plan,
    layout: ParameterLayout,
    public: PublicRandomness = PublicRandomness(5),  # noqa: B008
) -> SupportScheduler:
    """A controller after its selection, if it has one, on made-up counts; the weights are 0, 1, 2, ..."""
    known = Knowledge(lambda: torch.arange(layout.dimension, dtype=torch.float64))
    controller = SupportScheduler(plan, layout, public, known)
    if controller.tables is not None and SELECT in controller.method.stages:
        total = controller.tables.total
        counts = torch.from_numpy(np.random.default_rng(7).standard_normal(total))
        controller.observe_counts(release(Support.full(total), counts, 0.1))
    return controller


def release(support: Support, mean: Tensor, noise_scale: Tensor | float = 1.0, *, step: int = 0) -> Release:
    """A release made by nobody's mechanism, of whatever values the test wants."""
    scale = noise_scale if isinstance(noise_scale, Tensor) else torch.full((support.size,), noise_scale)
    return made_up_release(support, mean, scale, step)


def plan_of(method: Method, *, epochs: int = 4, noise: float = 1.0, **asked: Any) -> Plan:
    """A plan of any method with made-up noise, for the units of a `Problem`; its training phases alone."""
    plan = PlanConfig.asked(method, units=40, batch_size=8, epochs=epochs, **asked).draft()
    plan = dataclasses.replace(plan, phases=plan.training)
    return plan.with_noise({phase.name: noise for phase in plan.phases})


def random_release(seed: int, step: int, setting: StepSetting) -> Release:
    """A release that depends on nothing but the seed, the step and the public setting."""
    mean = torch.from_numpy(np.random.default_rng([seed, step]).standard_normal(setting.support.dimension))
    scale = setting.geometry.noise_scale(0.1, setting.support.size)
    return release(setting.support, setting.support.gather(mean), scale, step=step)


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
    *,
    layout: ParameterLayout | None = None,
    make: Callable[[int, int, StepSetting], Release] = random_release,
    **plan_settings: float,
) -> Run:
    """Every step of a plan, on releases from `make(seed, step, setting)`."""
    layout = layout or layout_of((6, 7), (6,), (3, 6), (3,))
    plan = plan_of(method, **plan_settings)
    controller = begun(plan, layout)
    settings = []
    for step in range(plan.total_steps):
        settings.append(controller.begin_step(step))
        controller.update(make(0, step, settings[-1]))
    return Run(controller, plan, settings)


NETWORK = TinyNetwork(inputs=5, hidden=3, classes=3)
LAYOUT = layout_of((3, 5), (3,), (3, 3), (3,))
PUBLIC = PublicRandomness(99)


@dataclass
class InjectedNoise:
    """A table of standard normal numbers, one row of d per step; gives those on the support it was told."""

    table: np.ndarray
    support: Support | None = None
    publishable: bool = False

    def rounded_gaussian(self, bits: int, size: int, key: tuple[int, ...]) -> Tensor:
        values = torch.from_numpy(self.table[key[0]])[self.support.indices]
        assert values.shape == (size,)
        return (values * 2.0**bits).round().to(torch.int64)

    def add_rounded_gaussian(self, bits: int, sums: Tensor, key: tuple[int, ...]) -> None:
        sums += self.rounded_gaussian(bits, sums.numel(), key)


@dataclass
class HandWritten:
    """The network's hand-written gradients, clipped and summed as every engine does."""

    theta: np.ndarray
    layout: ParameterLayout = LAYOUT
    parts: list[Tensor] = field(default_factory=list)

    def clipped_sum(self, batches: Iterable[MicroBatch], query: ClippedSumQuery) -> Tensor:
        rows = [
            NETWORK.gradient(self.theta, x, y)
            for batch in batches
            for x, y in zip(batch.rows[0].numpy(), batch.rows[1].numpy(), strict=True)
        ]
        gradients = torch.tensor(np.array(rows)).reshape(len(rows), NETWORK.dimension)
        total = sum_clipped_rows(query.support.gather(gradients), query)
        self.parts.append(total.clone())  # the mechanism takes the memory of what it is given
        return total


@dataclass
class Problem:
    """Data, starting point, Poisson batches (one of them empty) and noise, all fixed by a seed."""

    steps: int
    units: int = 40
    batch_size: int = 8
    seed: int = 0
    theta: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.inputs = rng.standard_normal((self.units, NETWORK.inputs)) * 1.5
        self.labels = self.inputs[:, : NETWORK.classes].argmax(axis=1)
        self.theta = rng.standard_normal(NETWORK.dimension) * 0.5
        q = self.batch_size / self.units
        self.batches = [np.flatnonzero(rng.random(self.units) < q) for _ in range(self.steps)]
        self.batches[self.steps // 2] = np.array([], dtype=np.int64)
        self.noise = rng.standard_normal((self.steps, NETWORK.dimension))

        data = (self.inputs, self.labels)
        self.given = (NETWORK, self.theta, data, self.batches, self.noise)


@dataclass
class Trajectory:
    """What a driven run went through."""

    controller: SupportScheduler
    settings: list[StepSetting]
    releases: list[Release]
    weights: np.ndarray
    noises: list[np.ndarray]

    @property
    def masks(self) -> np.ndarray:
        return np.array([setting.support.mask().double().numpy() for setting in self.settings])


def drive(
    plan: Plan,
    problem: Problem,
    *,
    lr: float,
    momentum: float = 0.0,
    randomness: PrivateRandomness | None = None,
    replace: Callable[[int, StepSetting], Release] | None = None,
) -> Trajectory:
    """The design's private step, literally: setting, release, apply, observe.

    With `replace`, the mechanism runs on the data but what it releases is swapped for that.
    """
    controller = begun(plan, LAYOUT, PUBLIC)
    injected, ledger = InjectedNoise(problem.noise), ChargeLog()
    inputs, labels = (torch.from_numpy(array) for array in (problem.inputs, problem.labels))
    theta, velocity = torch.from_numpy(problem.theta.copy()), torch.zeros(NETWORK.dimension).double()
    settings, releases, weights, noises = [], [], [], []
    for step, rows in enumerate(problem.batches):
        setting, phase = controller.begin_step(step), plan.phase_at(step)
        if setting.change is not None:
            left = setting.change.left.mask()
            theta = theta.masked_fill(left & setting.change.prune, 0.0)
            dropped = setting.change.off_support is OffSupport.DROPPED
            velocity = velocity.masked_fill(left & dropped, 0.0)
        engine = HandWritten(theta.numpy())
        injected.support = setting.support
        query = ClippedSumQuery(
            setting.support, FlatClip(phase.clip_norm), setting.geometry, setting.per_sample_top
        )
        batch = [MicroBatch((inputs[part], labels[part])) for part in np.array_split(rows, 2)]
        expected = plan.expected_batch_size(phase)
        released = GaussianMechanism(ledger, randomness or injected).release(
            GradientSum(engine, batch, query),
            Charge(phase.name, step, phase.sampling_rate, phase.noise_multiplier),
            expected_batch_size=expected,
        )
        clean = setting.geometry.inverse(sum(engine.parts) / expected)
        noises.append((released.mean - clean).numpy())
        if replace is not None:
            released = replace(step, setting)
        velocity = momentum * velocity + released.dense()
        moving = velocity
        if controller.method.off_support is OffSupport.DROPPED:
            moving = torch.where(setting.support.mask(), velocity, torch.zeros_like(velocity))
        theta = theta - lr * moving
        controller.update(released)
        settings.append(setting)
        releases.append(released)
        weights.append(theta.numpy().copy())
    return Trajectory(controller, settings, releases, np.array(weights), noises)
