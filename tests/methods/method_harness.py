"""Drives a SupportScheduler through the real mechanism with injected batches and noise, and plain SGD."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from method_tools import begun
from torch import Tensor, nn

from oracles.network import TinyNetwork
from sparsedp.batch import MicroBatch, from_criterion
from sparsedp.clipping import FlatClip
from sparsedp.grad_sample.query import ClippedSumQuery, sum_clipped_rows
from sparsedp.grad_sample.reference import ReferenceEngine
from sparsedp.methods.method import Method, MethodOptions, OffSupport
from sparsedp.methods.support_scheduler import StepSetting, SupportScheduler
from sparsedp.parameters import Support
from sparsedp.privacy.ledger import Charge, ChargeLog
from sparsedp.privacy.mechanism import GaussianMechanism, Release
from sparsedp.privacy.plan import Plan
from sparsedp.privacy.queries import GradientSum
from sparsedp.randomness import PrivateRandomness, PublicRandomness

NETWORK = TinyNetwork(inputs=5, hidden=3, classes=3)
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

    def bernoulli(self, probability: float, size: int, key: tuple[int, ...]) -> np.ndarray:
        raise AssertionError("the mechanism samples nothing")

    def below(self, bounds: np.ndarray, key: tuple[int, ...]) -> np.ndarray:
        raise AssertionError("the mechanism samples nothing")

    def secret(self, key: tuple[int, ...]) -> None:
        raise AssertionError("the mechanism keeps no secret")


class TorchModel:
    """The same network in PyTorch, through the reference engine."""

    def __init__(self) -> None:
        self._model = nn.Sequential(
            nn.Linear(NETWORK.inputs, NETWORK.hidden), nn.Tanh(), nn.Linear(NETWORK.hidden, NETWORK.classes)
        ).double()
        self._engine = ReferenceEngine(self._model, from_criterion(nn.CrossEntropyLoss(reduction="none")))
        self.layout = self._engine.layout

    def load(self, theta: Tensor) -> None:
        nn.utils.vector_to_parameters(theta, self._model.parameters())
        self.parts: list[Tensor] = []

    def clipped_sum(self, batches: Iterable[MicroBatch], query: ClippedSumQuery) -> Tensor:
        total = self._engine.clipped_sum(batches, query)
        self.parts.append(total.clone())  # the mechanism takes the memory of what it is given
        return total


class HandWritten:
    """The same engine contract on the hand-written gradients: much faster at this size."""

    def __init__(self) -> None:
        self.layout = TorchModel().layout

    def load(self, theta: Tensor) -> None:
        self._theta = theta.numpy()
        self.parts: list[Tensor] = []

    def clipped_sum(self, batches: Iterable[MicroBatch], query: ClippedSumQuery) -> Tensor:
        rows = [
            NETWORK.gradient(self._theta, x, y)
            for batch in batches
            for x, y in zip(batch.rows[0].numpy(), batch.rows[1].numpy(), strict=True)
        ]
        gradients = torch.tensor(np.array(rows)).reshape(len(rows), NETWORK.dimension)
        total = sum_clipped_rows(query.support.gather(gradients), query)
        self.parts.append(total.clone())
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

    @property
    def data(self) -> tuple[np.ndarray, np.ndarray]:
        return self.inputs, self.labels


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
    method: Method,
    options: MethodOptions | None,
    plan: Plan,
    problem: Problem,
    *,
    lr: float,
    momentum: float = 0.0,
    randomness: PrivateRandomness | None = None,
    replace: Callable[[int, StepSetting], Release] | None = None,
    engine: TorchModel | HandWritten | None = None,
) -> Trajectory:
    """The design's private step, literally: setting, release, apply, observe.

    With `replace`, the mechanism runs on the data but what it releases is swapped for that.
    """
    engine = engine or TorchModel()
    controller = begun(plan, engine.layout, PUBLIC)
    injected, ledger = InjectedNoise(problem.noise), ChargeLog()
    inputs, labels = (torch.from_numpy(array) for array in problem.data)
    theta, velocity = torch.from_numpy(problem.theta.copy()), torch.zeros(NETWORK.dimension).double()
    settings, releases, weights, noises = [], [], [], []
    for step, rows in enumerate(problem.batches):
        setting, phase = controller.begin_step(step), plan.phase_at(step)
        theta, velocity = _change(setting, theta, velocity)
        engine.load(theta)
        injected.support = setting.support
        clip = FlatClip(phase.clip_norm)
        query = ClippedSumQuery(setting.support, clip, setting.geometry, setting.per_sample_top)
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


def _change(setting: StepSetting, theta: Tensor, velocity: Tensor) -> tuple[Tensor, Tensor]:
    change = setting.change
    if change is None:
        return theta, velocity
    left = change.left.mask()
    zero = torch.zeros_like(theta)
    if change.prune:
        theta = torch.where(left, zero, theta)
    if change.off_support is OffSupport.DROPPED:
        velocity = torch.where(left, zero, velocity)
    return theta, velocity
